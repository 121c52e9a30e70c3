"""Conversion of a pandas table with declared columns to a matrix and labels; undeclared content is refused.

The module also writes the declarations of a user's own file. Card tables (`card_readers.py`) and a user's own files
(`own_table.py`, `own_arrays.py`) share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.common.text_format import count, listed, quoted
from dpsgd_cli.data.column_settings import ColumnUse, DateColumn, HashedColumn, TableFormat
from dpsgd_cli.data.computed_columns import entries
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import MISSING, PLAIN
from dpsgd_cli.data.text_features import described
from dpsgd_cli.data.written_numbers import numbers_in, plain_cells, plain_text, row_of
from dpsgd_cli.discovery.run import code
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_MOST_PROBLEMS = 20
_FIRST_ROWS = 1000


def to_matrix(frame: pd.DataFrame, columns: Sequence[Column], where: str, written: TableFormat = PLAIN) -> np.ndarray:
    """Return a float64 matrix (N, D), one column per declared column: numbers, or indices into the public values.

    Text is read as `written` says. Raises DataError naming `where`, the column, the first bad row (data rows count from
    1) and what to do; never the content of a cell.
    """
    matrix = np.empty((len(frame), len(columns)), order="F")
    problems: list[str] = []
    no_numbers, kept, unusable = set(), dict[str, Any](), set[str]()
    for index, column in enumerate(columns):
        if column.source in unusable:
            continue
        try:
            matrix[:, index] = _entries(frame[column.source], column, written, kept)
        except DataError as error:
            unusable.add(column.source)
            problems.append(f"{where}: {error}")
            if isinstance(error, NoNumbers):
                no_numbers.add(column.name)
        if len(problems) == _MOST_PROBLEMS:
            problems.append(f"{where}: columns after {quoted(column.name)} were not looked at")
            break
    if problems:
        raise BadColumns(problems, no_numbers)
    return matrix


def _entries(series: pd.Series, column: Column, written: TableFormat, kept: dict[str, Any]) -> np.ndarray:
    series = plain_cells(series)
    if column.private == "categories":
        return to_private_codes(series, written)
    if column.private == "bounds":
        return to_numbers(series, math.nan, written)
    if column.computed is None and column.marks is None:
        return to_codes(series, column, written) if column.values else to_numbers(series, column.filling, written)
    missing = kept.setdefault(f"gaps {column.source}", None)
    if missing is None:
        missing = kept[f"gaps {column.source}"] = gaps(series, written)
    return missing if column.computed is None else entries(series, missing, column, kept)


class WithinBounds:
    """The numeric columns of a table that have values, but none within their public bounds except their filling."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._left = {at: own for at, own in enumerate(columns) if own.bounds is not None and not own.indicator}
        self._outside, self._first, self._rows = dict.fromkeys(self._left, 0), dict[int, int](), 0

    def with_part(self, matrix: np.ndarray) -> WithinBounds:
        """Count the next rows (n, D) of the table, and return self."""
        # most columns have a value within in their first rows
        for rows in (matrix[:_FIRST_ROWS], matrix[_FIRST_ROWS:]):
            for at, column in list(self._left.items()):
                values = rows[:, at]
                assert column.bounds is not None
                outside = (values < column.bounds[0]) | (values > column.bounds[1])
                if not (outside | (values == column.filling)).all():
                    del self._left[at]
                elif outside.any():
                    self._first.setdefault(at, self._rows + int(outside.argmax()) + 1)
                    self._outside[at] += int(outside.sum())
            self._rows += len(rows)
        return self

    def problems(self, where: str) -> list[str]:
        """Return a problem for each such column."""
        return [
            f"{where}: {'data.bounds' if column.computed is None else 'data.columns'}: the bounds of"
            f" {quoted(column.source)} hold none of its {self._outside[at]} values, first in data row"
            f" {self._first[at]}; are they in another unit?"
            for at, column in self._left.items()
            if self._outside[at]
        ]


class BadColumns(DataError):
    """Problems with the cells of some columns; the columns `no_numbers` hold text or dates."""

    def __init__(self, problems: Sequence[str], no_numbers: Set[str]) -> None:
        super().__init__("\n".join(problems))
        self.no_numbers = no_numbers


class NoNumbers(DataError):
    """A column that must be numeric holds text or dates."""


def gaps(series: pd.Series, written: TableFormat = PLAIN, listed: Sequence[str] = ()) -> np.ndarray:
    """Return a mask (N,) of the cells without a value: empty, or a mark of missing values that is not in `listed`."""
    cells = series.astype("category")
    blank = {*MISSING, *written.marks} - set(listed) | {""}
    empty = [plain_text(value) in blank for value in cells.cat.categories]
    return np.array([*empty, True])[cells.cat.codes.to_numpy()]


def to_numbers(
    series: pd.Series, filling: float | str | None = None, written: TableFormat = PLAIN, is_target: bool = False
) -> np.ndarray:
    """Return the column as finite float64 (N,), with `filling` for missing values, which may be NaN.

    Text is read as `written` says. Raises DataError for other text and infinite values, and for missing ones without a
    filling.
    """
    import pandas as pd

    series = plain_cells(series)
    drop = "" if is_target else ", or put the column under data.drop"
    if pd.api.types.is_datetime64_any_dtype(series) or pd.api.types.is_timedelta64_dtype(series):
        raise NoNumbers(f"column {quoted(series.name)} holds dates; name it under data.columns{drop}")
    numbers, text = numbers_in(series, written)
    if text.any():
        advice = (
            "; targets of data.task: regression must be numbers; for classes, leave data.task out"
            if is_target
            else "; name the column under data.categorical or data.columns, or leave it out with data.drop"
        )
        thousands = "" if written.thousands is None else f", thousands {quoted(written.thousands)}"
        more = "" if text.sum() == 1 else f" and {int(text.sum()) - 1} more"
        raise NoNumbers(
            f"column {quoted(series.name)} holds no number in data row {row_of(series, text.argmax())}{more}, as"
            f" data.format says they are written (decimal {quoted(written.decimal)}{thousands}){advice}"
        )
    if filling is not None:
        numbers = np.where(np.isnan(numbers), float(filling), numbers)
    bad = np.isinf(numbers) if isinstance(filling, float) and math.isnan(filling) else ~np.isfinite(numbers)
    if not bad.any():
        return numbers
    number, infinite = int(bad.sum()), not np.isnan(numbers[bad]).all()
    what = "missing or infinite value" if infinite else "missing value"
    advice = f"say what they mean, data.missing: {{{series.name}: VALUE}}, or leave those rows out"
    raise DataError(
        f"column {quoted(series.name)} has {count(number, what)}, first in data row"
        f" {row_of(series, bad.argmax())}; {'mend them' if infinite else advice}{drop}"
    )


def to_codes(series: pd.Series, column: Column, written: TableFormat = PLAIN) -> np.ndarray:
    """Return each cell's index (N,) among the column's public values. Raises DataError for a value that is not listed.

    An unlisted 1.0 is the value 1, as spreadsheets write whole numbers beside gaps. An empty cell, or an unlisted mark
    of missing values, counts as the column's filling.
    """
    import pandas as pd

    cells = series.astype("category")
    known = pd.Index(column.values or ())
    texts = [plain_text(value) for value in cells.cat.categories]
    codes_of = known.get_indexer(pd.Index(texts, dtype=object))
    filling = -1 if column.filling is None else int(known.get_indexer([column.filling])[0])
    unknown = codes_of < 0
    whole = [re.sub(r"\.0+$", "", text) if re.fullmatch(r"-?\d+\.0+", text) else text for text in texts]
    codes_of[unknown] = known.get_indexer(pd.Index(whole, dtype=object))[unknown]
    blank = {*MISSING, *written.marks}
    codes_of[(codes_of < 0) & np.array([text in blank for text in texts], dtype=bool)] = filling
    codes = np.append(codes_of, filling)[cells.cat.codes.to_numpy()]
    if (codes >= 0).all():
        return np.asarray(codes)
    place = int((codes < 0).argmax())
    row, value = row_of(series, place), series.iloc[place]
    if pd.isna(value) or value == "":
        raise DataError(
            f"categorical column {quoted(column.name)} has {count(int((codes < 0).sum()), 'cell')} without a listed"
            f" value, the first (data row {row}) is empty; fill it, or list '' among the values"
        )
    cells_without = count(int((codes < 0).sum()), "cell")
    raise DataError(
        f"categorical column {quoted(column.name)}: {cells_without}, first in data row {row}, not among"
        f" its public values {listed(column.values or ())}; add what is missing there, or use"
        f" data.columns: {{{column.name}: {{hash: 64}}}}{_yaml_hint(column.values or ())}"
    )


def to_private_codes(series: pd.Series, written: TableFormat = PLAIN) -> np.ndarray:
    """Return the code of each cell's text (N,), float64, a function of that cell alone; NaN for a missing value."""
    cells = series.astype("category")
    texts, blank = [plain_text(value) for value in cells.cat.categories], {*MISSING, *written.marks}
    codes_of = [math.nan if text in blank else code(text) for text in texts]
    return np.array([*codes_of, math.nan])[cells.cat.codes.to_numpy()]


def _yaml_hint(values: Sequence[str]) -> str:
    if {"True", "False"} & set(values):
        return " (YAML reads yes, no, on and off as true and false: put quotes around them)"
    return ""


@dataclass(frozen=True)
class TargetScale:
    """A scale of regression targets, on which public bounds become -1 and 1; without bounds it changes nothing.

    Clipped gradients bound the length of a step, so a model needs many steps to reach large outputs: thousands for
    targets of some hundreds. Training therefore scales the recipe's public target bounds to [-1, 1], whatever the data
    are. Metrics and predictions are in the targets' own unit. `engine/losses.py` clamps targets out of bounds in
    training. A `log_unit` u other than 0 scales log(1 + d / u), where d is the distance from the lower bound. Below the
    bound it scales -log(1 + |d| / u), so every target has its place.

    >>> scale = TargetScale(100.0, 200.0)
    >>> scale.inward(np.array([100.0, 175.0])).tolist(), scale.outward(np.array([-1.0, 0.5])).tolist()
    ([-1.0, 0.5], [100.0, 175.0])
    >>> log = TargetScale(100.0, 400.0, log_unit=100.0)
    >>> log.inward(np.array([200.0])).tolist(), log.outward(np.array([-1.0, 0.0, 1.0])).round(9).tolist()
    ([0.0], [100.0, 200.0, 400.0])
    """

    low: Any = -1.0
    high: Any = 1.0
    log_unit: float = 0.0

    @property
    def unit(self) -> Any:
        """The distance that becomes 1; with `log_unit`, on the log scale."""
        return self._straight[1]

    @property
    def _straight(self) -> tuple[Any, Any]:
        """The value that becomes 0, and the distance that becomes 1."""
        if not self.log_unit:
            return (self.low + self.high) / 2, (self.high - self.low) / 2
        half = math.log1p((self.high - self.low) / self.log_unit) / 2
        return half, half

    def inward(self, targets: np.ndarray) -> np.ndarray:
        """Return targets (N,) in the unit of training."""
        middle, unit = self._straight
        if self.log_unit:
            far = targets - self.low
            targets = np.sign(far) * np.log1p(np.abs(far) / self.log_unit)
        return (targets - middle) / unit

    def outward(self, targets: np.ndarray) -> np.ndarray:
        """Return targets of training in their own unit."""
        middle, unit = self._straight
        found = targets * unit + middle
        if self.log_unit:
            found = self.low + np.sign(found) * np.expm1(np.abs(found)) * self.log_unit
        return found


def target_scale(data: Data) -> TargetScale:
    """Return the scale of the recipe's public target bounds, (K,) of several targets; without bounds, of no effect."""
    if data.intervals is None:
        return TargetScale()
    if len(data.intervals) > 1:
        lows, highs = np.array(data.intervals).T
        return TargetScale(lows, highs)
    ((low, high),) = data.intervals
    unit = 0.0 if not data.log_scale else low if low > 0 else (high - low) / 1000
    return TargetScale(low, high, unit)


def predicted(data: Data, outputs: np.ndarray) -> np.ndarray:
    """Return outputs of a model as predictions in the target's own unit, within its public bounds."""
    return target_scale(data).outward(outputs if data.target_bounds is None else outputs.clip(-1.0, 1.0))


def declarations(data: Data, columns: Sequence[Column], classes: tuple[Any, ...] | None) -> tuple[str, ...]:
    """Return the declarations of public facts of a user's own file, each with its origin (recipe or data)."""
    said = []
    if classes is not None:
        how = "recipe" if data.classes is not None else "read from the data"
        said.append(f"The class labels are public ({how}): {', '.join(map(str, classes))}.")
    private = data.private_columns
    if data.bounds is not None and any(column.bounds and not column.indicator for column in columns):
        other = "other " if False in private.values() else ""
        said.append(f"The bounds of the {other}numeric features are public (recipe).")
    if private:
        said.append(
            f"Of {', '.join(private)} it is public (recipe) that missing values are not counted, and how many"
            " categories are told apart at most; their bounds and categories are released with noise and charged."
        )
    if data.intervals is not None:
        names = data.target_names if len(data.intervals) > 1 else ["the target"]
        for name, (low, high) in zip(names, data.intervals, strict=True):
            said.append(
                f"The bounds of {name} are public (recipe): {low:g} to {high:g}; in training values outside are"
                " clamped, predictions lie within, and metrics of test records are of their targets as they are."
            )
    if any(column.values is not None and column.computed is None for column in columns):
        how = "recipe" if isinstance(data.categorical, dict) else "read from the data"
        said.append(f"The values of the categorical columns are public ({how}).")
    said += [used(name, use) for name, use in (data.columns or {}).items()]
    if data.missing:
        told = {column.name: column.filling for column in columns if column.name in data.missing}
        told |= {name: "middle of the bounds" for name, value in told.items() if value is None}
        told |= {name: one.value for name, one in data.fillings.items() if name in data.target_names}
        what = ", ".join(f"{name} {quoted(value)}" for name, value in told.items())
        said.append(f"What a missing value means is public (recipe), a rule for each record by itself: {what}.")
    return tuple(said)


def used(name: str, use: ColumnUse) -> str:
    """Return the declaration of how a column of dates, codes or text becomes numbers."""
    if isinstance(use, DateColumn):
        told = f"days from {use.bounds[0]} to {use.bounds[1]}, and cycles"
    else:
        told = f"a hash into {use.hash} buckets" if isinstance(use, HashedColumn) else described(use)
    return f"How {quoted(name)} becomes numbers is public (recipe), a rule for each record by itself: {told}."


def read_warnings(data: Data, classes: tuple[Any, ...] | None, columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return one warning that lists what was read from the data: the classes, and the values of `columns`."""
    found, lists = [], []
    if columns:
        found.append(f"the values of categorical column{'s' * (len(columns) > 1)} {', '.join(map(quoted, columns))}")
        lists.append(f"data.categorical: {{{', '.join(f'{name}: [...]' for name in columns)}}}")
    if classes is not None and data.classes is None:
        found.append("the class labels")
        lists.append(f"data.classes: {list(classes)}")
    if not found:
        return ()
    return (
        f"{' and '.join(found)} were read from the data and are declared public; if they are not, list them:"
        f" {' and '.join(lists)}",
    )
