"""New rows for a trained model, one by one: a row that cannot be used does not stop the others, and says why.

`opening.open_unlabelled` reads rows that must all be usable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data import own_table, table
from dpsgd_cli.data.cells import PLAIN, Cells, Table
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.opening import kind_for
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import known_columns, read_table
from dpsgd_cli.errors import DataError, UsageError

NO_CATEGORY = -1
"""Code of a cell whose category is not known and is ignored: it is none of the column's values."""
Unknown = Literal["error", "ignore"]


@dataclass(frozen=True)
class NewRows:
    """The N rows of a table: `x` (n, D) of those that can be used, and for each row why it cannot be, or None.

    `kept` are the columns that go beside the predictions.
    """

    x: np.ndarray
    reasons: Sequence[str | None]
    kept: Mapping[str, Sequence[str | None]]

    @property
    def usable(self) -> np.ndarray:
        """A mask (N,) of the rows that can be used."""
        return np.array([reason is None for reason in self.reasons])


def read(
    path: Path,
    layout: Layout,
    data: Data,
    keep: Sequence[str] = (),
    unknown: Unknown = "error",
    in_units: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> NewRows:
    """Read a table for a model of `layout`; columns `keep` keep their text.

    With `unknown` ignore, an unknown category counts as none of the column's values. Raises DataError if the table
    cannot be read, lacks a column, or has no row that can be used; UsageError if `keep` names no column.
    """
    columns, kind, written = layout.columns or (), kind_for(path, layout), data.format or PLAIN
    rows = read_table(path, kind, data.format)
    absent = [name for name in keep if name not in rows]
    if absent:
        raise UsageError(f"--keep: {path} has no column {quoted(absent[0])}{known_columns(absent[0], rows.names)}")
    own_table.check_columns(rows, layout, None, str(path))
    reasons: list[str | None] = [None] * len(rows)
    ignored: dict[int, list[int]] = {}
    for at, together in _looked_at(columns).items():
        for row, reason in _unusable(rows, together, written).items():
            if unknown == "ignore" and columns[at].values is not None:
                ignored.setdefault(at, []).append(row)
            else:
                reasons[row] = reasons[row] or reason
    usable = np.array([reason is None for reason in reasons])
    if not usable.any():
        raise DataError(f"{path}: no row can be used; the first says: {reasons[0]}")
    told = dict.fromkeys(rows.names)
    for at, which in ignored.items():
        cells = rows[columns[at].name].texts()
        for row in which:
            cells[row] = (columns[at].values or ("",))[0]
        told[columns[at].name] = Cells.of(columns[at].name, cells)
    known = Table.of({name: cells or rows[name] for name, cells in told.items()})
    x = in_units(table.to_matrix(known.take(usable), columns, str(path), written))
    place = usable.cumsum() - 1
    for at, which in ignored.items():
        x[[place[row] for row in which if usable[row]], at] = NO_CATEGORY
    return NewRows(x, reasons, {name: rows[name].texts() for name in keep})


def _looked_at(columns: Sequence[Column]) -> dict[int, list[Column]]:
    """Return columns that are looked at together by the place of the first.

    A category is alone, because it may be ignored. All numbers of one source, such as the buckets of a text, are one.
    """
    first: dict[str, int] = {}
    found: dict[int, list[Column]] = {}
    for at, column in enumerate(columns):
        place = at if column.values is not None else first.setdefault(column.source, at)
        found.setdefault(place, []).append(column)
    return found


def _unusable(rows: Table, columns: Sequence[Column], written: TableFormat) -> dict[int, str]:
    """Return the rows whose cell of one source a model cannot use, each with what `table.to_matrix` says of it.

    Equal cells are looked at once. Halves of the others are searched, so a few bad cells among many are found fast.
    """
    name = columns[0].source
    codes = rows[name].distinct[1]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    found: dict[int, str] = {}
    left = [np.arange(len(first))]
    while left:
        cells = left.pop()
        try:
            table.to_matrix(Table.of({name: rows[name].take(first[cells])}), columns, "", written)
        except DataError as error:
            if len(cells) > 1:
                left += np.array_split(cells, 2)
            else:
                found[int(cells[0])] = _reason(str(error))
    return {row: found[code] for row, code in enumerate(which.tolist()) if code in found} if found else {}


def _reason(problem: str) -> str:
    """Return a problem with the only row of a table, without a place and without advice about a recipe."""
    told = problem.removeprefix(": ").rpartition("; ")[0] or problem
    return re.sub(r"(, first)? in data row \d+| \(data row \d+\)", "", told)
