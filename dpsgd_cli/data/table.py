"""Conversion of a table with declared columns to a matrix; undeclared content is refused.

The module also writes the declarations of a user's own file. Card tables (`card_readers.py`) and a user's own files
(`own_table.py`, `own_arrays.py`) share it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, listed, quoted
from dpsgd_cli.data.cells import PLAIN, Cells, TableRows, is_gap, numbers_in
from dpsgd_cli.data.column_settings import ColumnUse, DateColumn, HashedColumn, TableFormat
from dpsgd_cli.data.computed_columns import described, entries
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.settings import Data
from dpsgd_cli.discovery.run import code
from dpsgd_cli.errors import DataError

_MOST_PROBLEMS = 20
_FIRST_ROWS = 1000


def to_matrix(rows: TableRows, columns: Sequence[Column], where: str, written: TableFormat = PLAIN) -> np.ndarray:
    """Return a float64 matrix (N, D), one column per declared column: numbers, or indices into the public values.

    Text is read as `written` says. Raises DataError naming `where`, the column, the first bad row (data rows count from
    1) and what to do; never the content of a cell.
    """
    matrix = np.empty((len(rows), len(columns)), order="F")
    problems: list[str] = []
    no_numbers, kept, unusable = set(), dict[str, Any](), set[str]()
    for index, column in enumerate(columns):
        if column.source in unusable:
            continue
        try:
            if column.source not in kept.get("cells", ()):  # features of one source follow each other
                kept = {"cells": {column.source: rows[column.source]}}
            matrix[:, index] = _entries(kept["cells"][column.source], column, written, kept)
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


def _entries(cells: Cells, column: Column, written: TableFormat, kept: dict[str, Any]) -> np.ndarray:
    if column.private == "categories":
        return cells.mapped(lambda text: math.nan if text is None or is_gap(text, written) else code(text), np.float64)
    if column.private == "bounds":
        return to_numbers(cells, math.nan, written)
    if column.computed is None and column.marks is None:
        return to_codes(cells, column, written) if column.values else to_numbers(cells, column.filling, written)
    if column.computed is None:
        return cells.gaps(written)
    return entries(cells, cells.gaps(written), column, kept)


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


def to_numbers(
    cells: Cells, filling: float | str | None = None, written: TableFormat = PLAIN, is_target: bool = False
) -> np.ndarray:
    """Return the column as finite float64 (N,), with `filling` for missing values, which may be NaN.

    Text is read as `written` says. Raises DataError for other text and infinite values, and for missing ones without a
    filling.
    """
    drop = "" if is_target else ", or put the column under data.drop"
    if cells.is_temporal:
        raise NoNumbers(f"column {quoted(cells.name)} holds dates; name it under data.columns{drop}")
    numbers, text = numbers_in(cells, written)
    if text.any():
        advice = (
            "; targets of data.task: regression must be numbers; for classes, leave data.task out"
            if is_target
            else "; say in data.format what such cells are (missing, below), or leave the column out with data.drop"
            if 2 * text.sum() < len(text)
            else "; name the column under data.categorical or data.columns, or leave it out with data.drop"
        )
        thousands = "" if written.thousands is None else f", thousands {quoted(written.thousands)}"
        more = "" if text.sum() == 1 else f" and {int(text.sum()) - 1} more"
        raise NoNumbers(
            f"column {quoted(cells.name)} holds no number in data row {cells.row(text.argmax())}{more}, as"
            f" data.format says they are written (decimal {quoted(written.decimal)}{thousands}){advice}"
        )
    if filling is not None:
        numbers = np.where(np.isnan(numbers), float(filling), numbers)
    bad = np.isinf(numbers) if isinstance(filling, float) and math.isnan(filling) else ~np.isfinite(numbers)
    if not bad.any():
        return numbers
    number, infinite = int(bad.sum()), not np.isnan(numbers[bad]).all()
    what = "missing or infinite value" if infinite else "missing value"
    advice = f"say what they mean, data.missing: {{{cells.name}: VALUE}}, or leave those rows out"
    raise DataError(
        f"column {quoted(cells.name)} has {count(number, what)}, first in data row"
        f" {cells.row(bad.argmax())}; {'mend them' if infinite else advice}{drop}"
    )


def to_codes(cells: Cells, column: Column, written: TableFormat = PLAIN) -> np.ndarray:
    """Return each cell's index (N,) among the column's public values. Raises DataError for a value that is not listed.

    An unlisted 1.0 is the value 1, as spreadsheets write whole numbers beside gaps. An empty cell, or an unlisted mark
    of missing values, counts as the column's filling.
    """
    values = column.values or ()
    known = {text: index for index, text in enumerate(values)}
    filling = known.get(str(column.filling), -1)

    def index_of(text: str | None) -> int:
        if text in known:
            return known[text]
        if text is not None and re.fullmatch(r"-?\d+\.0+", text) and (whole := text.partition(".")[0]) in known:
            return known[whole]
        return filling if is_gap(text, written) else -1

    codes = cells.mapped(index_of, np.int64)
    if (codes >= 0).all():
        return codes
    place, number = int((codes < 0).argmax()), count(int((codes < 0).sum()), "cell")
    if is_gap(cells.take(np.array([place])).texts()[0]):
        raise DataError(
            f"categorical column {quoted(column.name)} has {number} without a listed value, the first (data row"
            f" {cells.row(place)}) is empty; fill it, or list '' among the values"
        )
    raise DataError(
        f"categorical column {quoted(column.name)}: {number}, first in data row {cells.row(place)}, not among"
        f" its public values {listed(values)}; add what is missing there, or use"
        f" data.columns: {{{column.name}: {{hash: 64}}}}{_yaml_hint(values)}"
    )


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

    low: float = -1.0
    high: float = 1.0
    log_unit: float = 0.0

    @property
    def unit(self) -> float:
        """The distance that becomes 1; with `log_unit`, on the log scale."""
        return self._straight[1]

    @property
    def _straight(self) -> tuple[float, float]:
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
    """Return the scale of the recipe's public target bounds; without bounds, of no effect."""
    if data.target_bounds is None:
        return TargetScale()
    low, high = data.target_bounds
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
        which = f"; {classes[1]} is the positive one" if len(classes) == 2 and data.task == "classification" else ""
        said.append(f"The class labels are public ({how}): {', '.join(map(str, classes))}{which}.")
    private = data.private_columns
    bounded = any(column.bounds and not column.indicator for column in columns) or not columns  # of an array
    if data.bounds is not None and bounded:
        other = "other " if False in private.values() else ""
        said.append(f"The bounds of the {other}numeric features are public (recipe).")
    if private:
        said.append(
            f"Of {', '.join(private)} it is public (recipe) that missing values are not counted, and how many"
            " categories are told apart at most; their bounds and categories are released with noise and charged."
        )
    if data.target_bounds is not None:
        low, high = data.target_bounds
        said.append(
            f"The bounds of the target are public (recipe): {low:g} to {high:g}; in training values outside are"
            " clamped, predictions lie within, and metrics of public test records are of their targets as they are."
        )
    if any(column.values is not None and column.computed is None for column in columns):
        how = "recipe" if isinstance(data.categorical, dict) else "read from the data"
        said.append(f"The values of the categorical columns are public ({how}).")
    said += [used(name, use) for name, use in (data.columns or {}).items()]
    if data.rows is not None:
        said.append("Rows without a label are left out (recipe), a rule for each record by itself.")
    if data.missing:
        told = {column.name: column.filling for column in columns if column.name in data.missing}
        told |= {name: "middle of the bounds" for name, value in told.items() if value is None}
        told |= {name: one.value for name, one in data.fillings.items() if name == data.target}
        what = ", ".join(f"{name} {quoted(value)}" for name, value in told.items())
        said.append(f"The values that stand for missing ones are public (recipe): {what}.")
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
