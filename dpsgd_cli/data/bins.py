"""The data-independent step `bin`: every column of a table as several features, and rows of length at most 1.

A numeric column becomes cosine features, cos(pi k t) / (1 + (k / 4)^2) for k = 1, 2, ..., where t goes from 0 to 1
over the column's public bounds. A second set of cosines takes t from 0 to 1 over asinh of the column, which resolves
values near 0 finely and values far from it coarsely. Low frequencies have large amplitudes and high frequencies small
ones. So a model learns smooth shapes from little signal, and other shapes where the budget allows. This corresponds to
a Matern prior of smoothness 3/2 and length scale sqrt(3) / (4 pi), about a seventh of the distance between the bounds
(Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, eq. 4.15). A categorical column becomes a
one-hot, and so does a column that is declared to hold few whole numbers. The features of a text
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

With `grid` numbers of cosines are first rounded to the nearest of the ends of equal steps, and of equal steps of asinh,
between the bounds. These points are public, and each number is rounded by itself. A column then has one of a few
thousand codes, and rows are kept as codes (`engine/coded_rows.py`).

Proof for cosines: a one-hot adds at most 1 to the square of a length, cosines the sum of their squared amplitudes,
because |cos| <= 1. Products of features of two columns add the product of what these features add, times the squared
weight: sum_ij (w x_i y_j)^2 = w^2 |x|^2 |y|^2.

`data/step_settings.py` defines the settings; `rule.py` chooses how many cosines a budget pays for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, suggested
from dpsgd_cli.data.dataset import Column, Layout, Length, Step
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.step_settings import BINS, Bin
from dpsgd_cli.engine.coded_rows import CodedColumn, Coder, joined
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning.marginals import Cells, Columns, Products

_MOST_FEATURES = 100_000
_UNTOLD = ((0.0, 1.0), (-1.0, 1.0))
"""Whole bounds that are as usual for fractions as for whole numbers."""
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

    @property
    def representatives(self) -> np.ndarray:
        """A value of each feature, (G,)."""
        if self.edges is None:
            return np.arange(len(self.names), dtype=np.float64)
        ends = np.array(self.edges)
        return np.append(ends[0] - 1, ends) if len(ends) else np.zeros(1)


@dataclass(frozen=True)
class _Waves:
    """Cosine features of `column` over its bounds, or of its asinh if `asinh` gives a centre and a unit."""

    column: int
    name: str
    bounds: tuple[float, float]
    asinh: tuple[float, float] | None
    count: int

    @property
    def amplitudes(self) -> np.ndarray:
        """1 / (1 + (k / 4)^2) for k = 1 to `count`."""
        return np.asarray(1 / (1 + (np.arange(1, self.count + 1) / _FAST) ** 2))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the cosine features."""
        of = self.name if self.asinh is None else f"asinh {self.name}"
        return tuple(f"{of} wave {k}" for k in range(1, self.count + 1))

    def values(self, x: np.ndarray) -> np.ndarray:
        """Return cos(pi k t) / (1 + (k / 4)^2) for k = 1 to `count`, (N, count)."""
        low, high = self.bounds
        # NaN counts as the upper bound, as it is in the last bin of a one-hot
        inside = np.clip(np.nan_to_num(x[:, self.column].astype(np.float64), nan=high), low, high)
        first, last = self._moved(low), self._moved(high)
        part = np.clip((self._moved(inside) - first) / (last - first), 0.0, 1.0)
        k = np.arange(1, self.count + 1)
        return np.asarray(np.cos(math.pi * part[:, None] * k) * self.amplitudes)

    def _moved(self, values: Any) -> Any:
        if self.asinh is None:
            return values
        centre, unit = self.asinh
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
        (single, pairs), waves = self._one_hots(layout), self._waves(layout)
        products = self._products(layout)
        width, ones = self.plan(layout).features, len(single) + len(pairs) + 1
        texts = [at for text in _texts(layout) for at in text]
        scaled = self.settings.cosines is not None or bool(texts)
        entry = np.float32(1) if scaled else _entry(ones)
        square = ones + math.fsum(float(wave.amplitudes @ wave.amplitudes) for wave in waves)
        square += math.fsum(_WEIGHT**2 * one.square * other.square for one, other in products)
        square += _OF_A_TEXT * len(_texts(layout))

        grids = self._grids(layout)

        def transform(x: np.ndarray) -> np.ndarray:
            x = _rounded(x, grids)
            out = np.zeros((len(x), width), np.float32)
            every, at = np.arange(len(x)), 0
            for one in single:
                codes = one.codes(x)
                out[every, at + np.maximum(codes, 0)] = np.where(codes < 0, 0, entry)  # below 0: none of the values
                at += len(one.names)
            for one, other in pairs:
                first, second = one.codes(x), other.codes(x)
                chosen = np.maximum(first, 0) * len(other.names) + np.maximum(second, 0)
                out[every, at + chosen] = np.where((first < 0) | (second < 0), 0, entry)
                at += len(one.names) * len(other.names)
            for wave in waves:
                out[:, at : at + wave.count] = wave.values(x)
                at += wave.count
            out[:, at : at + len(texts)] = np.clip(x[:, texts], 0.0, 1.0)
            at += len(texts)
            for left, right in products:
                both = _WEIGHT * out[:, left.features, None] * out[:, None, right.features]
                stop = at + len(left.features) * len(right.features)
                out[:, at:stop] = both.reshape(len(x), stop - at)
                at = stop
            out[:, at] = entry
            return _short(out, square) if scaled else out

        return transform

    def coded(self, layout: Layout) -> Coder | None:
        """Return the function from rows as read to coded rows of the same features; None without a grid.

        Features of a column do not depend on other columns, so the transform of one row for each code gives them.
        """
        if self.settings.steps is None:
            return None
        (single, _), grids, columns = self._one_hots(layout), self._grids(layout), layout.columns or ()
        stretches = [(number, own) for number, own in enumerate(self._stretches(layout)) if len(own)]
        hot = {one.column: one for one in single}
        # the first code of a category is for none of the values
        values = {at: grids[at] if at in grids else np.append(-1.0, hot[at].representatives) for at, _ in stretches}
        rows = np.zeros((max(map(len, values.values()), default=1), len(columns)))
        for at, own in values.items():
            rows[: len(own), at] = own
        made = self.transform(layout, None)(rows)
        codes = {at: partial(_nearest, grids[at], at) if at in grids else partial(_shifted, hot[at]) for at in values}
        found = [CodedColumn(own, made[: len(values[at]), own], codes[at]) for at, own in stretches]
        constant = np.zeros_like(made[0])
        constant[-1] = made[0, -1]
        return Coder(tuple(joined(found)), constant)

    def _grids(self, layout: Layout) -> dict[int, np.ndarray]:
        """Return, by the number of each column of cosines, the ascending points that its numbers are rounded to."""
        if self.settings.steps is None:
            return {}
        parts = np.arange(self.settings.steps + 1) / self.settings.steps
        found = {}
        for at, column in enumerate(layout.columns or ()):
            if self._wavy(column):
                assert column.bounds is not None
                (low, high), whole = column.bounds, self._whole(column)
                centre, unit = _arc(column.bounds, whole)
                first, last = np.arcsinh((low - centre) / unit), np.arcsinh((high - centre) / unit)
                points = np.concatenate(
                    [low + (high - low) * parts, centre + unit * np.sinh(first + (last - first) * parts)]
                )
                found[at] = np.unique(np.clip(np.rint(points) if whole else points, low, high))
        return found

    def columns(self, layout: Layout) -> Columns:
        """Return the constant and every column as cells, and products; nothing with `pairs`, which mix two columns.

        The cells of a category, or of a mark of missing values, are its values. Numeric columns have equal steps and
        equal steps of asinh, at least as fine as any one-hot, so that every feature of a one-hot is 1 in some cell. A
        text is in the cell of its largest feature, and in the first if it has none.
        """
        if self.settings.pairs is not None:
            return Columns()
        transform, columns = self.transform(layout, None), layout.columns or ()
        constant = self.plan(layout).features - 1
        rows = transform(np.zeros((1, len(columns)))).astype(np.float64)
        found = [Cells(np.array([constant]), rows[:, [constant]])]
        stretches = self._stretches(layout)
        at = sum(map(len, stretches))
        for text in _texts(layout):
            found.append(Cells(np.arange(at, at + len(text)), np.eye(len(text)) * rows[0, constant]))
            at += len(text)
        own = {at: self._places(column) for at, column in enumerate(columns) if len(stretches[at])}
        # features of a column do not depend on other columns, so one table serves them all
        rows = np.zeros(
            (max((middles.size + places.size for middles, places in own.values()), default=0), len(columns))
        )
        for at, (middles, places) in own.items():
            rows[: middles.size + places.size, at] = np.concatenate([middles, places.ravel()])
        made = transform(rows).astype(np.float64)
        for at, (middles, places) in own.items():
            features, end = stretches[at], middles.size + places.size
            spread = made[middles.size : end, features].reshape(*places.shape, len(features))
            found.append(Cells(features, made[: middles.size, features], spread))
        products, at = [], found[0].features[0] - sum(len(a.names) * len(b.names) for a, b in self._products(layout))
        for first, second in self._products(layout):
            both = np.arange(at, at + len(first.features) * len(second.features))
            products.append(Products(both, first.features, second.features, _WEIGHT / float(found[0].values[0, 0])))
            at += len(both)
        return Columns(found, products)

    def additive(self, layout: Layout) -> list[np.ndarray] | None:
        """Return the indices of each column's features; None if a feature is of two columns, or of a text."""
        mixed = self.settings.pairs is not None or bool(self._products(layout)) or bool(_texts(layout))
        return None if mixed else self._stretches(layout)

    def _stretches(self, layout: Layout) -> list[np.ndarray]:
        """Return the indices of each column's own features, ascending."""
        (single, _), waves = self._one_hots(layout), self._waves(layout)
        stretches: list[list[int]] = [[] for _ in layout.columns or ()]
        at = 0
        for number, width in [(one.column, len(one.names)) for one in single] + [(w.column, w.count) for w in waves]:
            stretches[number] += range(at, at + width)
            at += width
        return [np.array(own, np.int64) for own in stretches]

    def _products(self, layout: Layout) -> list[tuple[_Part, _Part]]:
        """Return the pairs of columns that have products: all with at most `_PRODUCTS` of them, if asked for."""
        if self.settings.products is not True:
            return []
        (single, _), waves = self._one_hots(layout), self._waves(layout)
        parts: list[_Part] = []
        for number, features in enumerate(self._stretches(layout)):
            hot = next((one.names for one in single if one.column == number), None)
            wave = next((one for one in waves if one.column == number), None)
            if wave is not None:
                slow = min(2, wave.count)
                square = float(wave.amplitudes[:slow] @ wave.amplitudes[:slow])
                parts.append(_Part(features[:slow], wave.names[:slow], square))
            elif hot is not None:
                parts.append(_Part(features[: len(hot)], hot, 1.0))
        pairs = itertools.combinations([part for part in parts if 1 < len(part.names) <= _CATEGORIES], 2)
        return [(one, other) for one, other in pairs if len(one.names) * len(other.names) <= _PRODUCTS]

    def _places(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Return the middle of each cell of a column, (G,), and values all over each cell, (G, K)."""
        if column.values is not None or column.marks is not None:
            codes = np.arange(2.0 if column.values is None else len(column.values))
            return codes, codes[:, None]
        assert column.bounds is not None
        whole, steps = self._whole(column), max(self.settings.widths) if self.settings.cosines is None else _CELLS
        edges = {edge for way in (_equal, _asinh) for edge in way(column.bounds, steps, whole)}
        ends = np.array([column.bounds[0], *sorted(edges), column.bounds[1]])
        places = ends[:-1, None] + np.diff(ends)[:, None] * (np.arange(_PLACES) + 0.5) / _PLACES
        return (ends[:-1] + ends[1:]) / 2, np.round(places) if whole else places

    def _waves(self, layout: Layout) -> list[_Waves]:
        """Return the cosine features of numeric columns that do not become one-hots."""
        found = []
        for at, column in enumerate(layout.columns or ()):
            if self.settings.cosines is not None and self._wavy(column):
                assert column.bounds is not None
                arc = _arc(column.bounds, self._whole(column))
                found += [_Waves(at, column.name, column.bounds, of, self.settings.cosines) for of in (None, arc)]
        return found

    def _wavy(self, column: Column) -> bool:
        """Return True if a column becomes cosines: it is numeric, and not declared to hold few whole numbers."""
        if column.values is not None or column.indicator or column.bounds is None:
            return False
        low, high = column.bounds
        return self.settings.integers is None or not self._whole(column) or high - low >= _FEW

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
        told = self.settings.integers
        names = [c.name for c in columns if c.numeric]
        for name in told if isinstance(told, list) else ():
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
        whole = self._whole(column)
        ways = dict.fromkeys(cut(column.bounds, bins, whole) for bins in widths for cut in (_equal, _asinh))
        return [_OneHot(at, _names(column, edges), edges) for edges in ways]

    def _whole(self, column: Column) -> bool:
        """Return True if a column holds whole numbers, by `integers` or else by its bounds."""
        told = self.settings.integers
        if told is not None:
            return told == "all" or column.name in told
        assert column.bounds is not None
        return column.bounds not in _UNTOLD and all(float(end).is_integer() for end in column.bounds)


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


def _short(rows: np.ndarray, square: float) -> np.ndarray:
    """Return rows (N, D), float32, divided by slightly more than the root of `square`, a bound on their squared norms.

    Guarantee: the sum of the squares of the stored numbers of a row is at most 1, in exact arithmetic. Each number is
    rounded to float32 at most four times (a cosine, its product with the weight and with another, the quotient) and the
    divisor once, by at most 2^-24 of it each: less than `_SLACK`, 8 times that.
    """
    return rows / np.float32(math.sqrt(square) * (1 + _SLACK))


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


def _rounded(x: np.ndarray, grids: dict[int, np.ndarray]) -> np.ndarray:
    """Return rows with the numbers of columns that have points in `grids` rounded to them."""
    if not grids:
        return x
    x = x.astype(np.float64)
    for at, points in grids.items():
        x[:, at] = points[_nearest(points, at, x)]
    return x


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
