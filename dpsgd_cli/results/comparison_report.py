"""Comparison for people and programs: Markdown, CSV, JSON, and one self-contained HTML page.

The page embeds its pictures (`pictures.py`). `document.py` escapes everything that comes from a recipe or a result.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dpsgd_cli.accounting.tradeoff import LEAST_ERROR, RATES
from dpsgd_cli.common.text_format import count, epsilon_text, interval_text
from dpsgd_cli.engine.metrics import in_words
from dpsgd_cli.results import files
from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.document import Block, Bullets, Details, Heading, Picture, TableBlock, Text, html, markdown
from dpsgd_cli.results.guarantee import percent, price_terms, setting_terms, together
from dpsgd_cli.results.result import NONPRIVATE, Row

TITLES = {
    "metric-by-setting": "{metric} by what the sweep varied",
    "metric-by-epsilon": "{metric} by budget",
    "metric-by-epoch": "{metric} by epoch",
    "noise-by-epoch": "Noise multiplier by epoch",
    "budget-by-epoch": "Budget spent by epoch",
}


def write(comparison: Comparison, out: Path, stem: str = "comparison") -> list[Path]:
    """Write `.csv`, `.json` and `.md`, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "metric": comparison.metric,
        "baseline": comparison.baseline,
        "notes": notes(comparison),
        "rows": comparison.rows,
        "privacy": {str(e.directory): e.privacy for e in comparison.entries},
    }
    content = {"csv": files.to_csv(comparison.rows), "json": files.to_json(document), "md": to_markdown(comparison)}
    hidden = comparison.metric.startswith(NONPRIVATE)
    for ending, text in content.items():
        files.write_whole(out / f"{stem}.{ending}", text, owner_only=hidden)
    return [out / f"{stem}.{ending}" for ending in content]


def to_markdown(comparison: Comparison) -> str:
    """Return the table and the notes on its columns."""
    return markdown([_table(comparison), *map(Text, notes(comparison))])


def page(comparison: Comparison, pictures: dict[str, Path]) -> str:
    """Return the HTML page: table, pictures, guarantees and recipes."""
    methods = list(dict.fromkeys(entry.method for entry in comparison.entries))
    words = in_words(comparison.metric)
    blocks: list[Block] = [
        Heading(f"{', '.join(methods[:4])}{' and others' if len(methods) > 4 else ''}: {words}", 1),
        *map(Text, notes(comparison)),
        _table(comparison),
    ]
    for name, file in pictures.items():
        title = TITLES.get(name, name).format(metric=words[:1].upper() + words[1:])
        content = base64.b64encode(file.read_bytes()).decode()
        image = f'<img alt="{escape(title)}" src="data:image/png;base64,{content}">'
        blocks += [Heading(title), Picture(image, title)]
    blocks += [Heading("What is guaranteed"), *_statements(comparison.entries), Heading("Recipes")]
    for entry in comparison.entries:
        target = "" if entry.target is None else f" at epsilon {entry.target:g}"
        blocks.append(Details(f"{entry.method}{target}", entry.recipe_text))
    return html(blocks)


def _table(comparison: Comparison) -> TableBlock:
    rows = comparison.rows
    names: dict[str, str] = {"method": "method"}
    if len(comparison.data) > 1:
        names["data"] = "data"
    if len({row["test_records"] for row in rows}) > 1:
        names["test_records"] = "test records"
    deltas = {row["delta"] for row in rows if row["delta"] is not None}
    at = f" at delta {min(deltas):g}" if len(deltas) == 1 else ""
    names |= {f"epsilon ({adjacency})": f"epsilon ({adjacency}){at}" for adjacency in comparison.adjacencies}
    if comparison.adjacencies:
        names |= {"delta": "delta"} if len(deltas) > 1 else {}
        names |= {"accountant": "accountant"}
        names |= {f"true_positives_at_{rate:g}": f"TPR at FPR {rate * 100:g}%" for rate in RATES}
        names |= {"mu": "mu (regret)"}
    names |= {comparison.metric: f"{in_words(comparison.metric)} (95% CI)", "n": "trials"}
    names |= {"difference": f"difference from {comparison.baseline}", "p_holm": "p (Holm)", "verdict": "verdict"}
    cells = [[_cell(row, name, comparison.metric) for name in names] for row in rows]
    return TableBlock(list(names.values()), cells)


def _cell(row: Row, name: str, metric: str) -> str:
    value = row[name]
    if value is None or isinstance(value, str):
        return value or ""
    if name.startswith("epsilon ("):
        return f"{'about ' if row['bound'] == 'estimate' else ''}{epsilon_text(value)}"
    if name.startswith("true_positives_at_"):
        return f"{'at most ' if row['regret'] else ''}{percent(value)}"
    if name == "mu":
        return f"{epsilon_text(value)} ({percent(row['regret']) if row['regret'] else 'exact'})"
    if name in (metric, "difference"):
        half, sign = (row["ci95"], "") if name == metric else (row["difference_ci95"], "+")
        return interval_text(value, half, sign)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def notes(comparison: Comparison) -> list[str]:
    """Return the notes that a reader needs to judge the table."""
    rows = comparison.rows
    found = [
        "Values are means over trials with 95% intervals (Student). Each epsilon is that of one trial."
        f" {together(comparison.why_apart)}"
    ]
    if any(row["verdict"].startswith("not compared: different") for row in rows):
        found.append(
            "A difference is stated only between results on the same test records and at equal budgets; the verdict"
            " says which of these does not hold."
        )
    if len(comparison.adjacencies) > 1:
        found.append(
            f"Epsilons for {' and '.join(comparison.adjacencies)} are different guarantees and stand in columns of"
            " their own; a method is compared only with a baseline of the same adjacency."
        )
    accountants = list(dict.fromkeys(row["accountant"] for row in rows if row["accountant"]))
    if len(accountants) > 1:
        found.append(
            f"Epsilons are stated by different accountants ({', '.join(accountants)}): for the same noise a looser one"
            " states a larger epsilon, so equal epsilons are not equal noise."
        )
    if any(row[f"true_positives_at_{RATES[0]:g}"] is not None for row in rows):
        found.append(
            "TPR at FPR 1% and 0.1%: no membership inference attack, even one that knows all other records, finds a"
            " larger share of the training records at that false positive rate. A blind guess finds 1% and 0.1%."
            f" mu: no attack whose error rates are at least {LEAST_ERROR:g} does better than one that tells a draw of"
            " N(0, 1) from one of N(mu, 1); the regret is the largest distance between the two trade-off curves."
        )
    estimates = [e.method for e in comparison.entries if e.privacy.get("bound") == "estimate"]
    if estimates:
        found.append(f"Epsilon is an estimate, not an upper bound, for {', '.join(dict.fromkeys(estimates))}.")
    if comparison.differences:
        found.append(f"{count(comparison.differences, 'difference')} judged at 5% (Holm).")
    return found


def _statements(entries: Sequence[Entry]) -> list[Block]:
    """Return the guarantee of each method. Parts that do not depend on the budget are printed once."""
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[str, str]]] = {}
    for entry in entries:
        alike.setdefault((entry.method, tuple(setting_terms(entry.privacy))), []).extend(price_terms(entry.privacy))
    blocks: list[Block] = []
    for method in dict.fromkeys(entry.method for entry in entries):
        for (name, settings), prices in alike.items():
            if name == method:
                blocks += [Heading(method, 3), Bullets([f"{term}: {text}" for term, text in (*prices, *settings)])]
    return blocks
