"""Content of a page as blocks, and its output as Markdown or as one self-contained HTML file.

Everything that comes from a recipe or a result is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dpsgd_cli import __version__

STYLE = """
:root{color-scheme:light dark;--ink:#1a1a1a;--soft:#57606a;--line:#d8dee4;--card:#fff;--page:#f6f7f9}
:root{--warn:#8a5a00;--link:#0550ae}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa4b2;--line:#2c333d;--card:#171b21;--page:#0f1216}
:root{--warn:#e3b341;--link:#6ea8fe}}
*{box-sizing:border-box}a{color:var(--link)}
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
body{color:var(--ink);background:var(--page);--under:var(--page)}.cards>section,details{--under:var(--card)}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid var(--line)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(17rem,100%),1fr));gap:.9rem;margin:.9rem 0}
.cards>section{min-width:0}
.cards>section,details{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.9rem 1.1rem}
.cards h2{font-size:1.05rem;margin:0;border:0}.cards p{margin:.3rem 0}.cards ul{padding-left:1.1rem;margin:.3rem 0}
.card h2{font-size:.85rem;font-weight:400;color:var(--soft)}.card .small{font-size:.92rem;color:var(--soft)}
.card .big{font-size:1.45rem;font-weight:600;line-height:1.25}.warn{border-color:var(--warn)!important}
.warn .big{color:var(--warn)}
details{margin:.7rem 0}summary{cursor:pointer;font-weight:600}
@media print{details::details-content{content-visibility:visible!important;block-size:auto!important}}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--under) 40%,#0000) 0/2rem 100% no-repeat local,
linear-gradient(270deg,var(--under) 40%,#0000) 100%/2rem 100% no-repeat local,
linear-gradient(90deg,var(--soft),#0000) 0/.7rem 100% no-repeat,
linear-gradient(270deg,var(--soft),#0000) 100%/.7rem 100% no-repeat}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.said td:last-child,.said th:last-child{white-space:normal;text-align:left;min-width:min(24rem,70vw)}
th{vertical-align:bottom;white-space:normal}th:last-child{min-width:9rem}td{vertical-align:top}
figure{margin:1rem 0;overflow-x:auto}img,svg{max-width:100%;height:auto}
figure svg{background:#fff;border-radius:.4rem}
@media screen and (prefers-color-scheme:dark){figure svg,figure img{filter:invert(.91) hue-rotate(180deg)}}
pre{background:var(--page);border:1px solid var(--line);padding:.8rem;overflow-x:auto;font-size:.85rem}
"""
_SENTENCE = 25
"""Characters from which the last column of a table is prose, which is wrapped and begins at the left."""


@dataclass(frozen=True)
class Heading:
    """A title; level 1 is that of the page."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; backticks enclose names and commands."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of paragraphs."""

    items: Sequence[str]


@dataclass(frozen=True)
class TableBlock:
    """A table of finished texts; the first column is text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Details:
    """A text that HTML hides behind a title, and that Markdown leaves out."""

    title: str
    text: str


@dataclass(frozen=True)
class Picture:
    """An SVG or `img` element; Markdown leaves it out."""

    element: str
    title: str


@dataclass(frozen=True)
class Box:
    """A box of the first screen: what it is about, the answer, and what that means; `warned` of bad news."""

    label: str
    answer: str
    meaning: str
    warned: bool = False


@dataclass(frozen=True)
class Cards:
    """Boxes side by side: answers, or lists of blocks."""

    boxes: Sequence[Box | Sequence[Block]]


@dataclass(frozen=True)
class Folded:
    """A section whose blocks HTML shows when its title is clicked, or when the page is printed."""

    title: str
    blocks: Sequence[Block]


Block = Heading | Text | Bullets | TableBlock | Details | Picture | Cards | Folded


def markdown(blocks: Sequence[Block]) -> str:
    """Return the blocks as Markdown, without pictures."""
    return "\n\n".join(filter(None, map(_in_markdown, blocks))) + "\n"


def html(blocks: Sequence[Block]) -> str:
    """Return the blocks as an HTML page. Its title is the first heading."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{html_part(blocks)}\n"
        f"<footer><p>Made by dpsgd {escape(__version__)}.</p></footer>\n</main></body></html>\n"
    )


def html_part(blocks: Sequence[Block]) -> str:
    """Return the blocks as HTML without a page around them."""
    return "\n".join(map(_in_html, blocks))


def _in_markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case TableBlock(header, rows):
            rule = ["---", *["---:"] * (len(header) - 1)]
            return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (header, rule, *rows))
        case Cards(boxes):
            return "\n\n".join(filter(None, map(_box_in_markdown, boxes)))
        case Folded(title, blocks):
            return "\n\n".join(filter(None, [f"## {_plain(title)}", *map(_in_markdown, blocks)]))
        case Picture() | Details():
            return ""


def _box_in_markdown(box: Box | Sequence[Block]) -> str:
    if isinstance(box, Box):
        return _plain(f"**{box.label}: {box.answer}.** {box.meaning}")
    # a heading says nothing without its picture
    shown = [] if all(isinstance(block, Heading | Picture) for block in box) else box
    return "\n\n".join(filter(None, map(_in_markdown, shown)))


def _in_html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_marked(text)}</h{level}>"
        case Text(text):
            return f"<p>{_marked(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{_marked(item)}</li>' for item in items)}</ul>"
        case TableBlock(header, rows):
            names = [re.sub(r"(?<=[a-z])([._])(?=[a-z])", r"\1<wbr>", _marked(name)) for name in header]
            head = "".join(f'<th scope="col">{name}</th>' for name in names)
            body = "\n".join(f"<tr>{''.join(f'<td>{_marked(cell)}</td>' for cell in row)}</tr>" for row in rows)
            kind = ' class="said"' if any(len(row[-1]) >= _SENTENCE for row in rows) else ""
            table = f"<table{kind}><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
            return f'<div class="wide">{table}</div>'
        case Details(title, text):
            return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        case Cards(boxes):
            return f'<div class="cards">{"".join(map(_box_in_html, boxes))}</div>'
        case Folded(title, blocks):
            return f"<details><summary>{_marked(title)}</summary>{html_part(blocks)}</details>"
        case Picture(element, title):
            return f'<figure role="img" aria-label="{escape(title)}">{element}</figure>'


def _box_in_html(box: Box | Sequence[Block]) -> str:
    if not isinstance(box, Box):
        return f"<section>{html_part(box)}</section>"
    told = f'<h2>{_marked(box.label)}</h2><p class="big">{_marked(box.answer)}</p>'
    return f'<section class="card{" warn" * box.warned}">{told}<p class="small">{_marked(box.meaning)}</p></section>'


def _marked(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False).replace(" +- ", " \u00b1 "))


def _plain(text: str) -> str:
    """Return text on one line, with HTML disabled outside of code."""
    parts = text.replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
