"""The data-independent step `bin`: every column of a table as several features, and rows of length at most 1.

A numeric column becomes cosine features, cos(pi k t) / (1 + (k / 4)^2) for k = 1, 2, ..., where t goes from 0 to 1
over the column's public bounds. A second set of cosines takes t from 0 to 1 over asinh of the column, which resolves
values near 0 finely and values far from it coarsely. Low frequencies have large amplitudes and high frequencies small
ones. So a model learns smooth shapes from little signal, and other shapes where the budget allows. This corresponds to
a Matern prior of smoothness 3/2 and length scale sqrt(3) / (4 pi), about a seventh of the distance between the bounds
(Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 4.15). A categorical column becomes a
one-hot. `integers` names columns of whole numbers; nothing else says that numbers are whole. Their numbers are rounded,
and a column of few of them becomes a one-hot. The features of a text
(`computed_columns.py`), whose squares add up to at most 1, stay as they are. With `products`, every two columns add the
products of their categories, or of their first two cosines, at half weight. Each row, with a constant 1, is divided by
the greatest length that a row can have: one public number for all rows, so that a linear model of them is additive.

With `bins` a numeric column becomes two one-hots instead of cosines: one of equal steps, and one of equal steps of
asinh. Several numbers of bins give two one-hots each. A row then holds F ones, and one more in a constant column; all
are divided by sqrt(F + 1), or by the greatest length if there is a text. `pairs` adds a one-hot for every two columns,
over both their coarse bins.

Guarantee: the L2 norm of a transformed row is at most 1, whatever the record holds, in the numbers as they are stored
(`_entry` is rounded down, `_short` divides by a little more). A linear model of such a row is a sum of cosines, or a
step function, of each column, and of products, or a step function, of each pair.

Numbers of cosines are first rounded to the nearest of the ends of equal steps, and of equal steps of asinh, between the
bounds. These points are public, and each number is rounded by itself. So a column has one of a few thousand values, and
their features are a public table. With `grid` rows are kept as codes (`engine/coded_rows.py`).

Proof for cosines: a one-hot adds at most 1 to the square of a length, cosines the sum of their squared amplitudes,
because |cos| <= 1. Products of features of two columns add the product of what these features add, times the squared
weight: sum_ij (w x_i y_j)^2 = w^2 |x|^2 |y|^2.

`data/step_settings.py` defines the settings; `rule.py` chooses how many cosines a budget pays for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dpsgd_cli.common.text_format import count, suggested
from dpsgd_cli.data.dataset import Column, Layout, Length, Step
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.step_settings import BINS, GRID, Bin
from dpsgd_cli.engine.coded_rows import CodedColumn, Coder, joined
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning.marginals import ColumnCells, Columns, Products

_MOST_FEATURES = 100_000
_FINEST = 1000
"""The unit of asinh for a column of fractions is the width of its bounds divided by this."""
_FEW = max(BINS)
"""Width of the bounds below which a declared column of whole numbers is a one-hot, not cosines."""
_CELLS = 16
"""Steps of each kind that a column of cosines is cut into for `cells`; one-hots use those of their finest bins."""
_PLACES = 8
"""Places all over a cell at which its features' second moments are taken, as if values were spread evenly in it."""
_FAST = 4
"""The frequency k at which the amplitude 1 / (1 + (k / 4)^2) has fallen to a half."""
_WEIGHT = 0.5
"""Weight of products: a model learns what columns say by themselves first."""
_PRODUCTS = 256
"""Most products of two columns; two with more categories than that have none."""
_CATEGORIES = 50
"""Most categories of a column that takes part in products: rarer ones leave too few records for each."""
_WIDEST = 1e300
"""The width of bounds must lie strictly between 1 over this and this, so that no distance is infinite."""
_OF_A_TEXT = 1 + 1e-6
"""The most that the squares of the features of a text add up to, whose length is 1 but for rounding."""
_SLACK = 2.0**-21
"""An upper bound, with slack, on what float32 adds to a length of 1: features, products and quotients are rounded."""


@dataclass(frozen=True)
class _OneHot:
    """A one-hot of `column`: the 1 marks the value's bin among ascending `edges`, or the code of a category."""

    column: int
    names: tuple[str, ...]
    edges: tuple[float, ...] | None

    def codes(self, x: np.ndarray) -> np.ndarray:
        """Return the index of the feature that is 1, int (N,), among `names`."""
        values = x[:, self.column]
        if self.edges is None:
            return values.astype(np.int64)
        # NaN sorts behind the last edge
        return np.searchsorted(self.edges, values, side="right")


@dataclass(frozen=True)
class _Waves:
    """`count` cosine features of `column` over its bounds, and as many of its asinh. `whole`: of rounded numbers."""

    column: int
    name: str
    bounds: tuple[float, float]
    whole: bool
    count: int

    @property
    def amplitudes(self) -> np.ndarray:
        """1 / (1 + (k / 4)^2) for k = 1 to `count`, twice."""
        return np.tile(1 / (1 + (np.arange(1, self.count + 1) / _FAST) ** 2), 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cosine features."""
        return tuple(f"{of} wave {k}" for of in (self.name, f"asinh {self.name}") for k in range(1, self.count + 1))

    def points(self, steps: int) -> np.ndarray:
        """Return the ascending numbers within the bounds that others are rounded to, float64 (P,)."""
        low, high = self.bounds
        parts, (first, last) = np.arange(steps + 1) / steps, self._arched(np.array(self.bounds))
        centre, unit = _arc(self.bounds, self.whole)
        points = np.concatenate([low + (high - low) * parts, centre + unit * np.sinh(first + (last - first) * parts)])
        return np.unique(np.clip(np.rint(points) if self.whole else points, low, high))

    def values(self, points: np.ndarray) -> np.ndarray:
        """Return cos(pi k t) / (1 + (k / 4)^2) of points (P,), float32 (P, 2 count)."""
        k = np.arange(1, self.count + 1)
        both = []
        for moved in (points, self._arched(points)):
            part = np.clip((moved - moved[0]) / (moved[-1] - moved[0]), 0.0, 1.0)
            both.append(np.cos(math.pi * part[:, None] * k))
        return np.asarray(np.hstack(both) * self.amplitudes, np.float32)

    def _arched(self, values: np.ndarray) -> np.ndarray:
        centre, unit = _arc(self.bounds, self.whole)
        return np.arcsinh((values - centre) / unit)


@dataclass(frozen=True)
class _Part:
    """A column's features that products take: their indices, names, and the most that their squares add up to."""

    features: np.ndarray
    names: tuple[str, ...]
    square: float


class BinColumns(Step):
    """Step that turns columns into one-hots or cosines over public bounds and values. Acts on each record alone."""

    settings: Bin
    fitted_on = "nothing"

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(1.0, 0.0)

    def plan(self, layout: Layout) -> Layout:
        if self.settings.steps is not None and _texts(layout):
            raise DataError("bin: grid is for numbers and categories, and there is a text; leave grid out")
        (single, pairs), waves = self._one_hots(layout), self._waves(layout)
        texts, products = [at for text in _texts(layout) for at in text], self._products(layout)
        plain = sum(len(one.names) for part in (single, waves) for one in part) + len(texts)
        plain += sum(len(one.names) * len(other.names) for one, other in pairs)
        if plain + sum(len(one.names) * len(other.names) for one, other in products) >= _MOST_FEATURES:
            raise DataError(
                f"bin: {count(plain, 'feature')} and their products, but {_MOST_FEATURES} are the most; use"
                " fewer bins or waves, or leave pairs or products out"
            )
        columns = [
            Column(name, (0.0, 1.0), indicator=True, category=f"{number} {names[0].partition(' ')[0]}")
            for number, names in enumerate([one.names for one in single] + [_joined(pair) for pair in pairs])
            for name in names
        ]
        columns += [Column(name, (-1.0, 1.0)) for one in waves for name in one.names]
        columns += [(layout.columns or ())[at] for at in texts]
        columns += [Column(name, (-1.0, 1.0)) for pair in products for name in _joined(pair, " x ")]
        constant = Column("constant", (0.0, 1.0), indicator=True, category="constant")
        return Layout((len(columns) + 1,), (*columns, constant))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        (single, pairs), products = self._one_hots(layout), self._products(layout)
        width, texts = self.plan(layout).features, [at for text in _texts(layout) for at in text]
        entry, square = self._scale(layout)
        tables = [own for owns in self._tables(layout).values() for own in owns]

        def transform(x: np.ndarray) -> np.ndarray:
            out = np.zeros((len(x), width), np.float32)
            every, at = np.arange(len(x)), sum(len(one.names) for one in single)
            for one, other in pairs:
                first, second = one.codes(x), other.codes(x)
                chosen = np.maximum(first, 0) * len(other.names) + np.maximum(second, 0)
                out[every, at + chosen] = np.where((first < 0) | (second < 0), 0, entry)
                at += len(one.names) * len(other.names)
            for own in tables:
                out[:, own.features[0] : own.features[-1] + 1] = own.values[own.codes(x)]
                at = max(at, int(own.features[-1]) + 1)
            out[:, at : at + len(texts)] = np.clip(x[:, texts], 0.0, 1.0)
            at += len(texts)
            for left, right in products:
                both = _WEIGHT * out[:, left.features, None] * out[:, None, right.features]
                stop = at + len(left.features) * len(right.features)
                out[:, at:stop] = both.reshape(len(x), stop - at)
                at = stop
            out[:, at] = entry
            return _short(out, square)

        return transform

    def coded(self, layout: Layout) -> Coder | None:
        """Return the function from rows as read to coded rows of the same features; None without a grid."""
        if self.settings.steps is None:
            return None
        entry, square = self._scale(layout)
        own = [replace(one, values=_short(one.values, square)) for [one] in self._tables(layout).values()]
        constant = np.zeros(self.plan(layout).features, np.float32)
        constant[-1] = entry
        return Coder(tuple(joined(own)), _short(constant, square))

    def _scale(self, layout: Layout) -> tuple[np.float32, float | None]:
        """Return the entry of a one-hot, and the bound on squared lengths by whose root rows are divided, if they are.

        Rows of one-hots alone are not divided: their entry is smaller.
        """
        (single, pairs), texts = self._one_hots(layout), _texts(layout)
        ones = len(single) + len(pairs) + 1
        if self.settings.cosines is None and not texts:
            return _entry(ones), None
        square = ones + math.fsum(float(wave.amplitudes @ wave.amplitudes) for wave in self._waves(layout))
        square += math.fsum(_WEIGHT**2 * one.square * other.square for one, other in self._products(layout))
        return np.float32(1), square + _OF_A_TEXT * len(texts)

    def _tables(self, layout: Layout) -> dict[int, list[CodedColumn]]:
        """Return the features of every value of each column, before rows are divided, by the column's number.

        A column in several one-hots has a table for each. The first code of a one-hot is for none of its values.
        """
        found: dict[int, list[CodedColumn]] = {}
        entry, at = self._scale(layout)[0], 0
        (single, _), waves = self._one_hots(layout), self._waves(layout)
        for one in single:
            size = len(one.names)
            values = np.eye(size + 1, size, -1, dtype=np.float32) * entry
            own = CodedColumn(np.arange(at, at + size), values, partial(_shifted, one))
            found.setdefault(one.column, []).append(own)
            at += size
        for wave in waves:
            points = wave.points(self.settings.steps or GRID)
            own = CodedColumn(
                np.arange(at, at + 2 * wave.count), wave.values(points), partial(_nearest, points, wave.column)
            )
            found[wave.column] = [own]
            at += 2 * wave.count
        return found

    def columns(self, layout: Layout) -> Columns:
        """Return the constant and every column as cells, and products; nothing with `pairs`, which mix two columns.

        The cells of a category, or of a mark of missing values, are its values. Numeric columns have equal steps and
        equal steps of asinh, at least as fine as any one-hot, so that every feature of a one-hot is 1 in some cell. A
        text is in the cell of its largest feature, and in the first if it has none.
        """
        if self.settings.pairs is not None:
            return Columns()
        columns, tables, (entry, square) = layout.columns or (), self._tables(layout), self._scale(layout)
        unit = _short(np.array([[entry]]), square).astype(np.float64)
        found = [ColumnCells(np.array([self.plan(layout).features - 1]), unit)]
        at = sum(len(one.features) for own in tables.values() for one in own)
        for text in _texts(layout):
            found.append(ColumnCells(np.arange(at, at + len(text)), np.eye(len(text)) * unit))
            at += len(text)
        for number, own in sorted(tables.items()):

            def made(values: np.ndarray, number: int = number, own: list[CodedColumn] = own) -> np.ndarray:
                rows = np.zeros((values.size, len(columns)))
                rows[:, number] = values.ravel()
                features = np.hstack([one.values[one.codes(rows)] for one in own])
                return _short(features, square).astype(np.float64).reshape(*values.shape, features.shape[1])

            middles, places = self._places(columns[number])
            every = _short(own[0].values, square) if self._wavy(columns[number]) and not self.settings.bins else None
            features = np.concatenate([one.features for one in own])
            found.append(ColumnCells(features, made(middles), made(places), every))
        products = []
        for first, second in self._products(layout):
            both = np.arange(at, at + len(first.features) * len(second.features))
            products.append(Products(both, first.features, second.features, _WEIGHT / float(unit[0, 0])))
            at += len(both)
        return Columns(found, products)

    def additive(self, layout: Layout) -> list[np.ndarray] | None:
        """Return the indices of each column's features; None if a feature is of two columns, or of a text."""
        mixed = self.settings.pairs is not None or bool(self._products(layout)) or bool(_texts(layout))
        if mixed:
            return None
        tables, none = self._tables(layout), np.zeros(0, np.int64)
        return [
            np.concatenate([none, *(one.features for one in tables.get(number, ()))])
            for number in range(len(layout.columns or ()))
        ]

    def _products(self, layout: Layout) -> list[tuple[_Part, _Part]]:
        """Return the pairs of columns that have products: all with at most `_PRODUCTS` of them, if asked for."""
        if self.settings.products is not True:
            return []
        (single, _), waves = self._one_hots(layout), self._waves(layout)
        parts, at = dict[int, _Part](), 0
        for hot in single:
            parts[hot.column] = _Part(np.arange(at, at + len(hot.names)), hot.names, 1.0)
            at += len(hot.names)
        for wave in waves:
            slow = min(2, wave.count)
            square = float(wave.amplitudes[:slow] @ wave.amplitudes[:slow])
            parts[wave.column] = _Part(np.arange(at, at + slow), wave.names[:slow], square)
            at += 2 * wave.count
        few = [part for _, part in sorted(parts.items()) if 1 < len(part.names) <= _CATEGORIES]
        pairs = itertools.combinations(few, 2)
        return [(one, other) for one, other in pairs if len(one.names) * len(other.names) <= _PRODUCTS]

    def _places(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the middle of each cell of a column, (G,), and values all over each cell, (G, K)."""
        if column.values is not None or column.marks is not None:
            codes = np.arange(2.0 if column.values is None else len(column.values))
            return codes, codes[:, None]
        assert column.bounds is not None
        whole = self.settings.holds_whole(column.name)
        widths = self.settings.widths if self.settings.cosines is None else [_CELLS]
        edges = {edge for way in (_equal, _asinh) for width in widths for edge in way(column.bounds, width, whole)}
        ends = np.array([column.bounds[0], *sorted(edges), column.bounds[1]])
        places = ends[:-1, None] + np.diff(ends)[:, None] * (np.arange(_PLACES) + 0.5) / _PLACES
        return (ends[:-1] + ends[1:]) / 2, places

    def _waves(self, layout: Layout) -> list[_Waves]:
        """Return the cosine features of numeric columns that do not become one-hots."""
        if self.settings.cosines is None:
            return []
        return [
            _Waves(at, column.name, column.bounds, self.settings.holds_whole(column.name), self.settings.cosines)
            for at, column in enumerate(layout.columns or ())
            if column.bounds is not None and self._wavy(column)
        ]

    def _wavy(self, column: Column) -> bool:
        """Return True if a column becomes cosines: it is numeric, and not declared to hold few whole numbers."""
        if column.values is not None or column.indicator or column.bounds is None:
            return False
        return not self.settings.holds_whole(column.name) or column.bounds[1] - column.bounds[0] >= _FEW

    def _one_hots(self, layout: Layout) -> tuple[list[_OneHot], list[tuple[_OneHot, _OneHot]]]:
        """Return the one-hots of single columns, and for `pairs` the two coarse one-hots of each pair of columns."""
        if layout.columns is None:
            raise DataError("bin: is for the columns of a table; these features are an array, or a projection")
        self._check(layout.columns)
        plain = [(at, column) for at, column in enumerate(layout.columns) if not _is_text(column)]
        single = [one for at, column in plain for one in self._of(column, at, self.settings.widths)]
        if self.settings.pairs is None:
            return single, []
        coarse = [self._of(column, at, [self.settings.pairs])[-1] for at, column in plain]
        return single, list(itertools.combinations(coarse, 2))

    def _check(self, columns: tuple[Column, ...]) -> None:
        done = next((c.name for c in columns if c.indicator and c.marks is None and not _is_text(c)), None)
        if done is not None:
            raise DataError(f"bin: {done} is the work of an earlier step; bin takes categories itself, put it first")
        open_ = [c.name for c in columns if c.numeric and c.bounds is None]
        if open_:
            raise DataError(
                f"bin: no public bounds for column{'s' * (len(open_) > 1)} {', '.join(open_)}; give data.bounds:"
                f" {{{open_[0]}: [low, high], ...}} from public knowledge, not from the data, or private, or drop the"
                " column"
            )
        extreme = [c.name for c in columns if c.bounds and not 1 / _WIDEST < c.bounds[1] - c.bounds[0] < _WIDEST]
        if extreme:
            raise DataError(f"bin: the bounds of {', '.join(extreme)} are too near or too far apart to compute with")
        torn = [
            c.name
            for c in columns
            if c.numeric and self.settings.holds_whole(c.name) and any(end % 1 for end in c.bounds or ())
        ]
        if torn:
            raise DataError(f"bin: integers: the bounds of {', '.join(torn)} are no whole numbers; give whole ones")
        told = self.settings.integers
        names = [c.name for c in columns if c.numeric]
        for name in () if told == "all" else told:
            if name not in names:
                raise DataError(f"bin: integers names {name!r}, which is no numeric column{suggested(name, names)}")

    def _of(self, column: Column, at: int, widths: Sequence[int]) -> list[_OneHot]:
        """Return the one-hots of a column. The last one serves where only one is used (`pairs`)."""
        if column.values is not None:
            return [_OneHot(at, tuple(f"{column.name}={value}" for value in column.values), None)]
        if column.marks is not None:
            return [_OneHot(at, (f"{column.marks} is there", column.name), (0.5,))]
        assert column.bounds is not None
        if self.settings.cosines is not None:
            widths = [] if self._wavy(column) else [_FEW]
        whole = self.settings.holds_whole(column.name)
        ways = dict.fromkeys(cut(column.bounds, bins, whole) for bins in widths for cut in (_equal, _asinh))
        return [_OneHot(at, _names(column, edges), edges) for edges in ways]


def _is_text(column: Column) -> bool:
    return column.computed is not None and column.computed.kind == "text"


def _texts(layout: Layout) -> list[list[int]]:
    """Return the numbers of the columns of each text."""
    found: dict[str, list[int]] = {}
    for at, column in enumerate(layout.columns or ()):
        if _is_text(column):
            found.setdefault(column.source, []).append(at)
    return list(found.values())


def _equal(bounds: tuple[float, float], bins: int, whole: bool) -> tuple[float, ...]:
    """Return the edges between `bins` equal steps; one bin for each whole number if there are at most `bins`.

    >>> _equal((0, 3), 16, whole=True), _equal((0, 1), 4, whole=False)
    ((0.5, 1.5, 2.5), (0.25, 0.5, 0.75))
    """
    low, high = bounds
    if whole and high - low < bins:
        return tuple((np.arange(math.floor(low), math.ceil(high)) + 0.5).tolist())
    return _edges(low + (high - low) * np.arange(bins + 1) / bins, whole)


def _asinh(bounds: tuple[float, float], bins: int, whole: bool) -> tuple[float, ...]:
    """Return the edges between `bins` equal steps of asinh((x - c) / unit), with c and unit from `_arc`.

    >>> _asinh((0, 99999), 4, whole=True)
    (10.5, 223.5, 4728.5)
    """
    low, high = bounds
    if whole and high - low < bins:
        return _equal(bounds, bins, whole)
    centre, unit = _arc(bounds, whole)
    first, last = math.asinh((low - centre) / unit), math.asinh((high - centre) / unit)
    return _edges(centre + unit * np.sinh(first + (last - first) * np.arange(bins + 1) / bins), whole)


def _arc(bounds: tuple[float, float], whole: bool) -> tuple[float, float]:
    """Return the centre and the unit of a column's asinh. The centre is 0, clamped to the bounds."""
    low, high = bounds
    return min(max(0.0, low), high), 1.0 if whole else (high - low) / _FINEST


def _short(rows: np.ndarray, square: float | None) -> np.ndarray:
    """Return rows (N, D), float32, divided by slightly more than the root of `square`, a bound on their squared norms.

    Without it they are returned as they are.

    Guarantee: the sum of the squares of the stored numbers of a row is at most 1, in exact arithmetic. Each number is
    rounded to float32 at most four times (a cosine, its product with the weight and with another, the quotient) and the
    divisor once, by at most 2^-24 of it each: less than `_SLACK`, 8 times that.
    """
    return rows if square is None else rows / np.float32(math.sqrt(square) * (1 + _SLACK))


def _edges(steps: np.ndarray, whole: bool) -> tuple[float, ...]:
    """Return the distinct inner ends of steps, moved halfway between whole numbers if `whole`."""
    inner = steps[1:-1]
    if whole:
        inner = np.floor(inner) + 0.5
        inner = inner[inner < steps[-1]]
    return tuple(np.unique(inner).tolist())


def _nearest(points: np.ndarray, column: int, x: np.ndarray) -> np.ndarray:
    """Return the index of the nearest of ascending `points` for each row of a column; NaN is nearest to the last."""
    return np.searchsorted((points[1:] + points[:-1]) / 2, x[:, column], side="right")


def _shifted(hot: _OneHot, x: np.ndarray) -> np.ndarray:
    """Return 1 and more for the features of a one-hot, 0 for none of them."""
    return np.maximum(hot.codes(x), -1) + 1


def _names(column: Column, edges: tuple[float, ...]) -> tuple[str, ...]:
    """Return the names of bins, each after the value where it begins."""
    assert column.bounds is not None
    return tuple(f"{column.name} from {start:g}" for start in (column.bounds[0], *edges))


def _joined(pair: tuple[_OneHot | _Part, _OneHot | _Part], sign: str = ", ") -> tuple[str, ...]:
    return tuple(f"{one}{sign}{other}" for one in pair[0].names for other in pair[1].names)


def _entry(ones: int) -> np.float32:
    """Return the largest float32 v with `ones` * v^2 <= 1, exactly."""
    found = np.float32(1 / math.sqrt(ones))
    while ones * float(found) ** 2 > 1:
        found = np.nextafter(found, np.float32(0))
    return found
