"""New rows for a trained model, one by one: a row that cannot be used does not stop the others, and says why.

`opening.open_unlabelled` reads rows that must all be usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.data import own_table, table
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.opening import kind_for
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import read_table
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
    frame = read_table(path, kind, data.format, set(layout.categorical))
    absent = [name for name in keep if name not in frame.columns]
    if absent:
        raise UsageError(f"--keep: {path} has no column {quoted(absent[0])}{suggested(absent[0], frame.columns)}")
    own_table.check_columns(frame, layout, None, str(path))
    reasons: list[str | None] = [None] * len(frame)
    ignored: dict[int, np.ndarray] = {}
    for at, column in enumerate(columns):
        for rows, reason in _unusable(frame[column.marks or column.name], column):
            if unknown == "ignore" and column.values is not None:
                ignored[at] = rows
                continue
            for row in np.flatnonzero(rows):
                reasons[row] = reasons[row] or f"{column.name}: {reason}"
    usable = np.array([reason is None for reason in reasons])
    if not usable.any():
        raise DataError(f"{path}: no row can be used; the first says: {reasons[0]}")
    sound = frame.loc[usable].reset_index(drop=True)
    for at, rows in ignored.items():
        cells = sound[columns[at].name].astype(object)
        sound[columns[at].name] = cells.where(~rows[usable], (columns[at].values or ("",))[0])
    x = in_units(table.to_matrix(sound, columns, str(path)))
    for at, rows in ignored.items():
        x[rows[usable], at] = NO_CATEGORY
    # as an owner is read, whose "007" stays text
    kept = {name: read_table(path, kind, data.format, owner=name)[name] for name in keep}
    return NewRows(x, reasons, kept)


def _unusable(cells: pd.Series, column: Column) -> list[tuple[np.ndarray, str]]:
    """Return masks (N,) of the cells that a model cannot use, each with the reason, which shows no cell."""
    if column.marks is not None:
        return []
    if column.values is not None:
        return [(table.codes(cells, column) < 0, "a category that the model was not trained with")]
    numbers, text = table.numbers(cells)
    missing = np.isnan(numbers) & ~text
    found = [(text, "not a number"), (np.isinf(numbers), "not finite")]
    return found if column.filling is not None else [*found, (missing, "no value, and the model needs one")]
