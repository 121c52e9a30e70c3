"""What a page trains and says, from its `page.yaml`. A `$name` in a text is a value of the group, row or column.

`cases`: groups of trainings, one for each combination of the lists of `for`. A value that is a mapping sets several
    names. A rule of `rules` changes those whose values `where` names: it adds `changes`, replaces other fields, or
    drops them (`skip`).
`metrics`: the columns of a run's `trials.csv` that the page's own keeps.
`same`: points of tables that are the training of another place.
`tables`: `rows`, each with its values, and `columns`, each a heading and a cell, and before them the lists for which
    there is one. A cell is a text, or a list: what to say (`Spec.cell`), and of which TABLE/CASE. A row is left out if
    `only`, or a whole table if one of `needs`, has no trainings.
`claims`: what a paper says, as contrasts that it takes to be positive (`claims.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from benchmarks.pages.case import Case
from benchmarks.pages.claims import Claim, Contrast
from benchmarks.pages.rows import MISSING, Rows, markdown, percent

Values = Mapping[str, Any]


def filled(text: Any, values: Values) -> str:
    """Return a text with its `$name`s replaced."""
    return Template(str(text)).substitute(values)


def combined(lists: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the values of each combination, the last list running fastest."""
    for found in itertools.product(*lists.values()):
        values: dict[str, Any] = {}
        for name, value in zip(lists, found, strict=True):
            values |= value if isinstance(value, dict) else {name: value}
        yield values


class Spec:
    """A `page.yaml`; `names` are values that every training knows."""

    def __init__(self, path: Path, names: dict[str, Any] | None = None) -> None:
        self.content = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.metrics: list[str] = self.content["metrics"]
        self.cases = [case for group in self.content["cases"] for case in _cases(group, names or {})]

    def key(self, name: str, values: Values) -> tuple[str, str]:
        """Return the table and the case of a TABLE/CASE."""
        place = filled(name, values)
        table, _, case = self.content.get("same", {}).get(place, place).rpartition("/")
        return table, case

    def said(self, rows: Rows) -> dict[str, str]:
        """Return every table of the page."""
        return {name: self.table(rows, table) for name, table in self.content.get("tables", {}).items()}

    def table(self, rows: Rows, table: Mapping[str, Any]) -> str:
        """Return one of `tables`."""
        if not all(rows.has(name) for name in table.get("needs", ())):
            return MISSING
        columns = [
            (filled(heading, values), cell, values)
            for *lists, heading, cell in table["columns"]
            for values in combined(lists[0] if lists else {})
        ]
        lines = [
            [self.cell(rows, cell, row | values) for _, cell, values in columns]
            for row in table["rows"]
            if "only" not in table or rows.of(*self.key(table["only"], row)) is not None
        ]
        return markdown([heading for heading, *_ in columns], lines)

    def cell(self, rows: Rows, cell: Any, values: Values) -> str:
        """Return a text, or what a list says of its first TABLE/CASE.

        `text`: mean and interval of a column, with so many digits. `percent`: of the accuracy. `mean`: of a column, in
        a format. `gain`: over a second one, of the same seeds; nothing over itself, or if the page lacks one of them.
        `n`: trials. `epochs`: the fewest and the most.
        """
        if not isinstance(cell, list):
            return filled(cell, values)
        kind, name, *more = cell
        key = self.key(name, values)
        if kind == "text":
            return rows.text(*key, *more) if key in rows.cases else "-"
        if kind == "percent":
            return percent(rows.summary(*key))
        if kind == "mean":
            found = rows.of(*key)
            return "" if found is None or found[more[0]].isna().all() else f"{found[more[0]].mean():{more[1]}}"
        if kind == "gain":
            other = self.key(more[0], values)
            return rows.gain(key, other) if key != other and {key, other} <= rows.cases.keys() else ""
        return {"n": rows.n, "epochs": rows.epochs}[kind](*key)

    @property
    def claims(self) -> list[Claim]:
        """What the paper says."""
        return [
            Claim(claim["where"], claim["says"], tuple(self._contrasts(claim["contrasts"])), claim.get("slack", 0.0))
            for claim in self.content["claims"]
        ]

    def _contrasts(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[Contrast]:
        for group in groups:
            for values in combined(group.get("for", {})):
                plus, less = (tuple(self.key(name, values) for name in group[side]) for side in ("plus", "less"))
                yield Contrast(filled(group["label"], values), plus, less)


def _cases(group: Mapping[str, Any], names: dict[str, Any]) -> Iterator[Case]:
    for values in combined(group.get("for", {})):
        values |= names
        made: dict[str, Any] = {}
        changes: list[str] = []
        for rule in (group, *group.get("rules", ())):
            where = rule.get("where", {})
            if all(values[name] in (told if isinstance(told, list) else [told]) for name, told in where.items()):
                made |= rule
                changes += rule.get("changes", ())
        if made.get("skip"):
            continue
        own: dict[str, Any] = {name: made[name] for name in ("trials", "chunk", "curves") if name in made}
        own |= {name: filled(made[name], values) for name in ("table", "name", "recipe")}
        pack = filled(made.get("pack", ""), own | values)
        yield Case(**own, changes=tuple(filled(change, values) for change in changes), pack=pack)
