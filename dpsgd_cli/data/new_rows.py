"""New rows for a trained model, one by one: a row that cannot be used does not stop the others, and says why.

`opening.open_unlabelled` reads rows that must all be usable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data import own_table, table
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.opening import kind_for
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import PLAIN, known_columns, read_table
from dpsgd_cli.data.written_numbers import plain_cells
from dpsgd_cli.errors import DataError, UsageError

if TYPE_CHECKING:
    import pandas as pd

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
    kept: Mapping[str, pd.Series]

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
    columns, kind = layout.columns or (), kind_for(path, layout)
    frame = read_table(path, kind, data.format, layout.text_columns)
    absent = [name for name in keep if name not in frame.columns]
    if absent:
        raise UsageError(f"--keep: {path} has no column {quoted(absent[0])}{known_columns(absent[0], frame.columns)}")
    own_table.check_columns(frame, layout, None, str(path))
    reasons: list[str | None] = [None] * len(frame)
    ignored: dict[int, list[int]] = {}
    for at, together in _looked_at(columns).items():
        for row, reason in _unusable(frame, together, data.format or PLAIN).items():
            if unknown == "ignore" and columns[at].values is not None:
                ignored.setdefault(at, []).append(row)
            else:
                reasons[row] = reasons[row] or reason
    usable = np.array([reason is None for reason in reasons])
    if not usable.any():
        raise DataError(f"{path}: no row can be used; the first says: {reasons[0]}")
    for at, rows in ignored.items():
        cells = frame[columns[at].name].astype(object)
        cells.iloc[rows] = (columns[at].values or ("",))[0]
        frame[columns[at].name] = cells
    x = in_units(table.to_matrix(frame[usable], columns, str(path), data.format or PLAIN))
    place = usable.cumsum() - 1
    for at, rows in ignored.items():
        x[[place[row] for row in rows if usable[row]], at] = NO_CATEGORY
    # as an owner is read, whose "007" stays text
    kept = {name: read_table(path, kind, data.format, owner=name)[name] for name in keep}
    return NewRows(x, reasons, kept)


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


def _unusable(frame: pd.DataFrame, columns: Sequence[Column], written: TableFormat) -> dict[int, str]:
    """Return the rows whose cell of one source a model cannot use, each with what `table.to_matrix` says of it.

    Equal cells are looked at once. Halves of the others are searched, so a few bad cells among many are found fast.
    """
    import pandas as pd

    own = frame[[columns[0].source]]
    if isinstance(own.dtypes.iloc[0], pd.CategoricalDtype):
        own = own.astype(object)  # a part of it would keep all categories
    try:
        own = plain_cells(own.iloc[:, 0]).to_frame()
        codes, distinct = pd.factorize(own.iloc[:, 0], use_na_sentinel=False)
        first = np.full(len(distinct), len(own))
        np.minimum.at(first, codes, np.arange(len(own)))
    except (TypeError, DataError):  # lists and objects
        codes = first = np.arange(len(own))
    found: dict[int, str] = {}
    left = [np.arange(len(first))]
    while left:
        cells = left.pop()
        try:
            table.to_matrix(own.iloc[first[cells]], columns, "", written)
        except DataError as error:
            if len(cells) > 1:
                left += np.array_split(cells, 2)
            else:
                found[int(cells[0])] = _reason(str(error))
    return {row: found[code] for row, code in enumerate(codes.tolist()) if code in found} if found else {}


def _reason(problem: str) -> str:
    """Return a problem with the only row of a table, without a place and without advice about a recipe."""
    told = problem.removeprefix(": ").rpartition("; ")[0] or problem
    return re.sub(r"(, first)? in data row \d+| \(data row \d+\)", "", told)
