"""The step `bin`: every column of a table as one-hots, a row as long as any other. It looks at no record.

A numeric column becomes two one-hots over its public bounds: of equal steps, and of equal steps of asinh, which are
fine near 0 and coarse far from it; or two for each of several numbers of bins. Coarse bins are learnt from little, fine
ones where the budget allows. A category is a one-hot of its values. A row thus holds F ones, and one more in a
constant column; all are divided by sqrt(F + 1), so that every row has the same length, 1. `pairs` adds a one-hot for
every two columns, of both their coarse bins.

Guarantee: the L2 norm of a transformed row is at most 1, whatever the record holds, in the numbers as they are stored
(`_entry` is rounded down). A linear model of such a row is additive: a step function of each column, or of each pair.

Not here: the other steps (`preprocess.py`), what their settings are (`recipe/schema/steps.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpsgd_cli.data.dataset import Column, Layout, Step, Transform
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.steps import Bin
from dpsgd_cli.wording import count, suggested

_MOST_FEATURES = 100_000
_UNTOLD = ((0.0, 1.0), (-1.0, 1.0))
"""Whole bounds that fractions have as often as whole numbers."""
_FINEST = 1000
"""Of a column of fractions, asinh is taken in units of its width over this."""


@dataclass(frozen=True)
class _OneHot:
    """One 1 for each record: where `column` of its row lies among ascending `edges`; of categories, its code."""

    column: int
    names: tuple[str, ...]
    edges: tuple[float, ...] | None

    def codes(self, x: np.ndarray) -> np.ndarray:
        """Which of `names` is 1, (N,)."""
        values = x[:, self.column]
        if self.edges is None:
            return values.astype(np.int64)
        # what is no number is sorted behind the last edge
        return np.searchsorted(self.edges, values, side="right")


class BinColumns(Step):
    """Columns as one-hots over public bounds and values. Acts on each record alone."""

    settings: Bin

    def plan(self, layout: Layout) -> Layout:
        found = self._one_hots(layout)
        columns = [
            Column(name, (0.0, 1.0), indicator=True, category=f"{number} {names[0].partition(' ')[0]}")
            for number, names in enumerate([one.names for one in found[0]] + [_joined(pair) for pair in found[1]])
            for name in names
        ]
        if len(columns) >= _MOST_FEATURES:
            raise DataError(
                f"bin: {count(len(columns), 'feature')}, but {_MOST_FEATURES} are the most; use fewer bins, or leave"
                " pairs out"
            )
        constant = Column("constant", (0.0, 1.0), indicator=True, category="constant")
        return Layout((len(columns) + 1,), (*columns, constant))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        single, pairs = self._one_hots(layout)
        width, entry = self.plan(layout).features, _entry(len(single) + len(pairs) + 1)

        def transform(x: np.ndarray) -> np.ndarray:
            out = np.zeros((len(x), width), np.float32)
            every, at = np.arange(len(x)), 0
            for one in single:
                out[every, at + one.codes(x)] = entry
                at += len(one.names)
            for one, other in pairs:
                out[every, at + one.codes(x) * len(other.names) + other.codes(x)] = entry
                at += len(one.names) * len(other.names)
            out[:, at] = entry
            return out

        return transform

    def _one_hots(self, layout: Layout) -> tuple[list[_OneHot], list[tuple[_OneHot, _OneHot]]]:
        """Those of single columns, and those of pairs, as two of coarse bins."""
        if layout.columns is None:
            raise DataError("bin: is for the columns of a table; these features are an array, or a projection")
        self._check(layout.columns)
        single = [one for at, column in enumerate(layout.columns) for one in self._of(column, at, self.settings.widths)]
        if self.settings.pairs is None:
            return single, []
        coarse = [self._of(column, at, [self.settings.pairs])[-1] for at, column in enumerate(layout.columns)]
        return single, list(itertools.combinations(coarse, 2))

    def _check(self, columns: tuple[Column, ...]) -> None:
        done = next((c.name for c in columns if c.indicator and c.marks is None), None)
        if done is not None:
            raise DataError(f"bin: {done} is the work of an earlier step; bin takes categories itself, put it first")
        open_ = [c.name for c in columns if c.numeric and c.bounds is None]
        if open_:
            raise DataError(
                f"bin: no public bounds for column{'s' * (len(open_) > 1)} {', '.join(open_)}; give data.bounds:"
                f" {{{open_[0]}: [low, high], ...}} from public knowledge, not from the data, or drop the column"
            )
        told = self.settings.integers
        names = [c.name for c in columns if c.numeric]
        for name in told if isinstance(told, list) else ():
            if name not in names:
                raise DataError(f"bin: integers names {name!r}, which is no numeric column{suggested(name, names)}")

    def _of(self, column: Column, at: int, widths: Sequence[int]) -> list[_OneHot]:
        """The one-hots of a column; the last is the better one where there is room for one only."""
        if column.values is not None:
            return [_OneHot(at, tuple(f"{column.name}={value}" for value in column.values), None)]
        if column.marks is not None:
            return [_OneHot(at, (f"{column.marks} is there", column.name), (0.5,))]
        assert column.bounds is not None
        whole = self._whole(column)
        ways = dict.fromkeys(cut(column.bounds, bins, whole) for bins in widths for cut in (_equal, _asinh))
        return [_OneHot(at, _names(column, edges), edges) for edges in ways]

    def _whole(self, column: Column) -> bool:
        """Whether a column holds whole numbers."""
        told = self.settings.integers
        if told is not None:
            return told == "all" or column.name in told
        assert column.bounds is not None
        return column.bounds not in _UNTOLD and all(float(end).is_integer() for end in column.bounds)


def _equal(bounds: tuple[float, float], bins: int, whole: bool) -> tuple[float, ...]:
    """Edges between `bins` equal steps; between whole numbers, one each where they are at most `bins`.

    >>> _equal((0, 3), 16, whole=True), _equal((0, 1), 4, whole=False)
    ((0.5, 1.5, 2.5), (0.25, 0.5, 0.75))
    """
    low, high = bounds
    if whole and high - low < bins:
        return tuple((np.arange(math.floor(low), math.ceil(high)) + 0.5).tolist())
    return _edges(low + (high - low) * np.arange(bins + 1) / bins, whole)


def _asinh(bounds: tuple[float, float], bins: int, whole: bool) -> tuple[float, ...]:
    """Edges between `bins` equal steps of asinh((x - c) / unit): c is 0 where the bounds hold it, else the end near it.

    >>> _asinh((0, 99999), 4, whole=True)
    (10.5, 223.5, 4728.5)
    """
    low, high = bounds
    if whole and high - low < bins:
        return _equal(bounds, bins, whole)
    centre = min(max(0.0, low), high)
    unit = 1.0 if whole else (high - low) / _FINEST
    first, last = math.asinh((low - centre) / unit), math.asinh((high - centre) / unit)
    return _edges(centre + unit * np.sinh(first + (last - first) * np.arange(bins + 1) / bins), whole)


def _edges(steps: np.ndarray, whole: bool) -> tuple[float, ...]:
    """The inner ends of steps; of whole numbers moved between two of them, each once."""
    inner = steps[1:-1]
    if whole:
        inner = np.floor(inner) + 0.5
        inner = inner[inner < steps[-1]]
    return tuple(np.unique(inner).tolist())


def _names(column: Column, edges: tuple[float, ...]) -> tuple[str, ...]:
    """What each bin is called: where it begins."""
    assert column.bounds is not None
    return tuple(f"{column.name} from {start:g}" for start in (column.bounds[0], *edges))


def _joined(pair: tuple[_OneHot, _OneHot]) -> tuple[str, ...]:
    return tuple(f"{one}, {other}" for one in pair[0].names for other in pair[1].names)


def _entry(ones: int) -> np.float32:
    """The largest float32 v with ones v^2 <= 1, exactly."""
    found = np.float32(1 / math.sqrt(ones))
    while ones * float(found) ** 2 > 1:
        found = np.nextafter(found, np.float32(0))
    return found
