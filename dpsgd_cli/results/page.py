"""Comparison as one self-contained HTML page: tables, pictures, privacy statements, recipes.

Pictures are embedded. The only script sorts tables. Everything that comes from a recipe or a result is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.joint_composition import scope
from dpsgd_cli.common.text_format import epsilon_text, interval_text, metric_text
from dpsgd_cli.engine.metrics import in_words
from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.document import html_page
from dpsgd_cli.results.guarantee import CHOSEN, NO_PRIVACY, epsilon_words
from dpsgd_cli.results.result import Row
from dpsgd_cli.results.tables import notes, told_apart

TITLES = {
    "metric-by-epsilon": "What each budget buys",
    "nonprivate_objective-by-epsilon": "How well each budget fits the training records"
    " (computed without privacy: do not publish)",
    "metric-by-epoch": "{metric} by epoch",
    "noise-by-epoch": "Noise multiplier by epoch",
    "budget-by-epoch": "Budget spent by epoch",
}
SCRIPT = """
for (const head of document.querySelectorAll("table.sortable th")) {
  head.querySelector("button").addEventListener("click", () => {
    const table = head.closest("table"), column = head.cellIndex, down = head.ariaSort === "ascending";
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const x = key(a), y = key(b), numeric = x !== "" && y !== "" && !isNaN(x) && !isNaN(y);
      if (x === "" || y === "") return (x === "") - (y === "");
      return (numeric ? x - y : x.localeCompare(y)) * (down ? -1 : 1);
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
  });
}
"""


def page(comparison: Comparison, pictures: dict[str, Path]) -> str:
    """Return the whole page as text."""
    methods = list(dict.fromkeys(entry.method for entry in comparison.entries))
    title = f"{', '.join(methods[:4])}{' and others' if len(methods) > 4 else ''}: {in_words(comparison.metric)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes(comparison)),
        _table(comparison),
        *(_figure(name, file, in_words(comparison.metric)) for name, file in pictures.items()),
        "<h2>What is guaranteed</h2>",
        _statements(comparison.entries),
        "<h2>Recipes</h2>",
        *map(_recipe, comparison.entries),
    ]
    return html_page(title, "\n".join(parts), SCRIPT)


def _table(comparison: Comparison) -> str:
    rows = comparison.rows
    told = [key for key in ("delta", "bound") if len({row[key] for row in rows if row[key] is not None}) > 1]
    epsilons = [f"epsilon ({adjacency})" for adjacency in comparison.adjacencies]
    renamed = {"difference": f"difference from {comparison.baseline}", "p_holm": "p (Holm)", "n": "trials"}
    renamed["test_records"] = "test records"
    renamed[comparison.metric] = f"{in_words(comparison.metric)} (95% CI)"
    deltas = {row["delta"] for row in rows if row["delta"] is not None}
    if len(deltas) == 1:
        renamed |= {name: f"{name} at delta {min(deltas):g}" for name in epsilons}
    priced = [*epsilons, "accountant"] if epsilons else []
    columns = ["method", *told_apart(comparison), *priced, *told, comparison.metric, "n"]
    columns += ["difference", "p_holm", "verdict"]
    spreads = {comparison.metric: "ci95", "difference": "difference_ci95"}
    writes = dict.fromkeys(spreads, metric_text) | dict.fromkeys(epsilons, epsilon_text)
    head = "".join(_head(column, renamed.get(column, column), rows) for column in columns)
    lines = [
        "".join(_cell(row[name], row.get(spreads.get(name, "")), writes.get(name, "{:.4g}".format)) for name in columns)
        for row in rows
    ]
    body = "\n".join(f"<tr>{cells}</tr>" for cells in lines)
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _head(column: str, words: str, rows: Sequence[Row]) -> str:
    kind = ' class="text"' if any(isinstance(row[column], str) for row in rows) else ""
    return f'<th scope="col"{kind}><button type="button">{escape(words)}</button></th>'


def _cell(value: Any, spread: float | None, write: Callable[[float], str]) -> str:
    """Return a table cell: a number with its interval, formatted by `write`, and sorted by the number."""
    if value is None:
        return "<td></td>"
    if isinstance(value, float):
        shown = write(value) if spread is None else interval_text(value, spread).replace("+-", "\u00b1")
        return f'<td data-value="{value!r}">{shown}</td>'
    if isinstance(value, str):
        return f'<td class="text">{escape(value)}</td>'
    return f"<td>{value}</td>"


def _figure(name: str, file: Path, words: str) -> str:
    content = base64.b64encode(file.read_bytes()).decode()
    title = escape(TITLES.get(name, name).format(metric=words[:1].upper() + words[1:]))
    return f'<h2>{title}</h2><figure><img alt="{title}" src="data:image/png;base64,{content}"></figure>'


def _statements(entries: Sequence[Entry]) -> str:
    """Return the guarantee of each method. Parts that do not depend on the budget are printed once."""
    parts = []
    for method in dict.fromkeys(entry.method for entry in entries):
        said: dict[tuple[tuple[str, str], ...], list[Entry]] = {}
        for entry in entries:
            if entry.method == method:
                said.setdefault(_said(entry), []).append(entry)
        for terms, alike in said.items():
            parts.append(f"<h3>{escape(method)}</h3>{_terms([*map(_epsilon, alike), *terms])}")
    return "\n".join(parts)


def _epsilon(entry: Entry) -> tuple[str, str]:
    privacy = entry.privacy
    if privacy["accountant"] is None:
        return "no privacy", NO_PRIVACY
    return "epsilon", f"{epsilon_words(privacy)}, by {privacy['accountant']}"


def _said(entry: Entry) -> tuple[tuple[str, str], ...]:
    privacy = entry.privacy
    if privacy["accountant"] is None:
        return ()
    return (
        ("neighbouring data sets", f"{privacy['adjacency']}; batches: {privacy['batching']}"),
        ("noise", str(privacy["noise_source"])),
        *([("what a trial spends", CHOSEN)] if privacy.get("spent") else []),
        ("scope", scope(entry.run)),
        *(("declared public", text) for text in privacy["declarations"]),
        *(("read without privacy", text) for text in privacy.get("uncovered_steps", [])),
    )


def _terms(said: Sequence[tuple[str, str]]) -> str:
    """Return a list that prints a term once if it has several descriptions."""
    items, last = "", None
    for term, text in said:
        items += ("" if term == last else f"<dt>{escape(term)}</dt>") + f"<dd>{escape(text)}</dd>"
        last = term
    return f"<dl>{items}</dl>"


def _recipe(entry: Entry) -> str:
    name = entry.method if entry.target is None else f"{entry.method} at epsilon {entry.target:g}"
    return f"<details><summary>{escape(name)}</summary><pre>{escape(entry.recipe_text)}</pre></details>"
