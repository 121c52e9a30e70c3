"""Noisy marginal counts of a table's columns, and the linear map from them that scales features. Uses NumPy only.

Notation: a record has one value in each column, and each column has public cells (`data/bins.py`). F is the number of
columns with more than one cell; a column with one cell carries no information and is not counted. v is the record's
vector over all cells: 1 / sqrt(F) in its cell of each of the F columns and 0 elsewhere. So |v| = 1 for any record. V is
the sum of v over the records; its sensitivity is in `preconditioning/price.py`.

All else is post-processing of a noisy V. With shares p of a column's cells, its features have a mean m and a
covariance C. The map moves the column's features by -m and multiplies them by (C / t + ridge)^(-1/2), where t is the
sum of all variances. Products of features of two columns are treated alike: if columns are independent, the products of
centred features have covariance C x C' (Kronecker), mean 0, and no covariance with features of single columns. So the
map has a block for each column and for each pair, and no matrix of all features is needed. If columns depend on each
other, or values are not in the middle of their cells, the map is worse, but equally private.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpsgd_cli.engine.coded_rows import CodedRows

_ROWS_AT_ONCE = 1 << 16
_NEAR = 1e-5
"""Difference of two scores, of features of length 1 at most, that rounding in float32 may turn around."""
_TINY = 1e-30
"""Smallest norm by which a direction is divided."""


@dataclass(frozen=True)
class ColumnCells:
    """Public cells of a column.

    `features` (d,): indices of its features in a row. `values` (G, d): their values in the middle of each of G cells.
    `spread` (G, K, d): their values at K places all over each cell; without it, those in the middle alone. `every`
    (P, d), float32: their values for each value that the column can have; without it, those of `spread`.
    """

    features: np.ndarray
    values: np.ndarray
    spread: np.ndarray | None = None
    every: np.ndarray | None = None

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the cell of each row (n, D), int64 (n,): the one whose feature direction is nearest to the row's."""
        return self.nearest(rows[:, self.features])

    def nearest(self, features: np.ndarray) -> np.ndarray:
        """Return the cell, int64 (n,), of rows whose features of this column are `features` (n, d)."""
        return self._scores(features).argmax(axis=1)

    def _scores(self, features: np.ndarray) -> np.ndarray:
        ways = self.values / np.maximum(np.linalg.norm(self.values, axis=1, keepdims=True), _TINY)
        return features @ ways.T.astype(features.dtype)

    def greatest(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the largest entries of a function from features (n, d) to numbers (n, m), for each cell, (G, m).

        They are over all values that the column can have in a cell, and at least 0. A value that is between two cells
        but for rounding counts in both. In a cell that no value is in they are 0.
        """
        own = self.values if self.spread is None else self.spread.reshape(-1, len(self.features))
        own = own if self.every is None else self.every
        scores, found = self._scores(own), function(own.astype(np.float64))
        inside = scores >= scores.max(axis=1, keepdims=True) - _NEAR
        return np.stack([found[one].max(axis=0, initial=0.0) for one in inside.T])


@dataclass(frozen=True)
class Products:
    """Features of a pair of columns: `factor` times each feature in `first` times each in `second`, row by row.

    `features` (d d',): indices of the products. `first` (d,), `second` (d',): indices of the features of the columns.
    """

    features: np.ndarray
    first: np.ndarray
    second: np.ndarray
    factor: float


@dataclass(frozen=True)
class Columns:
    """Columns that features consist of: their cells, and the products of features of two columns.

    The first column with one cell is the constant; without one, no feature is moved by its mean.
    """

    cells: Sequence[ColumnCells] = ()
    products: Sequence[Products] = ()


_Bound = Callable[[Callable[[np.ndarray], np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class MapBlock:
    """Part of a linear map z = x A: A[inputs][:, outputs] = matrix, and A[others, outputs] = 0.

    `inputs` (r,), `outputs` (c,): indices, public. `matrix` (r, c), float64.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    matrix: np.ndarray


def counted(pieces: Iterable[np.ndarray], columns: Sequence[ColumnCells]) -> np.ndarray:
    """Return V, float64, over all cells of columns with more than one cell, for rows in pieces (n, D).

    Guarantee: each row adds a vector of L2 norm 1 with entries of at least 0, because any row is in exactly one cell of
    a column. A row of zeros (an empty place) adds nothing, nor does a row with an entry that is not finite.
    """
    told = _told(columns)
    total = [np.zeros(len(column.values)) for column in told]
    for piece in pieces:
        rows = piece[np.isfinite(piece).all(axis=1) & (piece != 0).any(axis=1)]
        for counts, column in zip(total, told, strict=True):
            counts += np.bincount(column.of(rows), minlength=len(counts))
    return np.concatenate([np.zeros(0), *total]) / _length(told)


def counted_codes(coded: CodedRows, columns: Sequence[ColumnCells]) -> np.ndarray:
    """Return V as `counted` does, for rows that are kept as codes: every row with a code is in that code's cell.

    Guarantee: as there. A coded row is finite, and it is not zero, as it has a constant.
    """
    told, of_codes = _told(columns), _counts_of(coded)
    counts = []
    for column in told:
        held, (number, own) = (
            int(column.features[0]),
            next((number, own) for number, own in enumerate(coded.columns) if int(column.features[0]) in own.features),
        )
        places = int((own.features == held).argmax()) + np.arange(len(column.features))
        cells = column.nearest(own.values[:, places])
        counts.append(np.bincount(cells, weights=of_codes[number], minlength=len(column.values)))
    return np.concatenate([np.zeros(0), *counts]) / _length(told)


def _counts_of(coded: CodedRows) -> list[np.ndarray]:
    """Return how many rows have each code of each column. Whole numbers below 2^53: the sums are exact."""
    totals = [np.zeros(len(column.values)) for column in coded.columns]
    for start in range(0, len(coded), _ROWS_AT_ONCE):
        codes = coded.by_column(start, min(start + _ROWS_AT_ONCE, len(coded)))
        for total, own in zip(totals, codes, strict=True):
            total += np.bincount(own, minlength=len(total))
    return totals


def scaling(noisy: np.ndarray, columns: Columns, records: int, ridge: float) -> list[MapBlock]:
    """Return the map that a noisy V of `records` records gives, as blocks with all D features as outputs.

    Guarantee: let p be the shares of cells that V gives, projected onto the simplex. The mean square length of rows
    with these shares is at most 1, whatever values the records have in their cells, if columns that have products are
    independent. (A text counts as one of its buckets.) Proof: a row's square length is the sum of those of its blocks.
    That of a column's block is a function of the column's value, and the sum over cells of p times its largest value in
    the cell is computed from a table of all values. That of a pair's block is a sum over two directions i and j of
    s_ij^2 u_i^2 v_j^2, where u follows from one column and v from the other, so the mean is at most the sum of s_ij^2
    times the bounds on the means of u_i^2 and v_j^2. All is divided by the root of the sum of these bounds.

    Single rows are longer where their values are rare: up to 1 / sqrt(p) for a cell of share p.
    """
    told = _told(columns.cells)
    pieces = np.split(noisy * (_length(told) / records), np.cumsum([len(one.values) for one in told])[:-1])
    shares = iter([_nearest(piece) for piece in pieces] if told else [])
    constant = next((one for one in columns.cells if len(one.values) == 1), None)
    known = [(one, next(shares) if len(one.values) > 1 else np.ones(1)) for one in columns.cells]
    of_feature = {int(feature): column for column in known for feature in column[0].features}

    def spread(features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, _Bound]:
        """Return the means (d,), variances (d,) and directions (d, d) of features of one column.

        The function bounds the means of functions of squares along these directions, from (n, d) to (n, m): (m,).
        """
        cells, share = of_feature[int(features[0])]
        own, places = np.isin(cells.features, features), cells.values[:, None] if cells.spread is None else cells.spread
        values, even = places[..., own].reshape(-1, len(features)), np.repeat(share / places.shape[1], places.shape[1])
        mean = even @ values if constant is not None else np.zeros(len(features))
        variances, basis = np.linalg.eigh((values.T * even) @ values - np.outer(mean, mean))

        def bound(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            return np.asarray(share @ cells.greatest(lambda every: function(np.square((every[:, own] - mean) @ basis))))

        return mean, np.maximum(variances, 0.0), basis, bound

    one = np.zeros(0, np.int64) if constant is None else constant.features
    unit = 1.0 if constant is None else float(constant.values[0, 0])
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, _Bound]] = []
    for cells in columns.cells:
        if cells is constant:
            own = np.array([unit**2])
            parts.append((one, one, np.zeros((0, 1)), np.ones((1, 1)), own, partial(_applied, own)))
            continue
        mean, own, basis, bound = spread(cells.features)
        shift = -mean[None] / unit if len(one) else np.zeros((0, len(mean)))
        parts.append((np.concatenate([cells.features, one]), cells.features, shift, basis, own, bound))
    for pair in columns.products:
        (mean, own, basis, bound), (other_mean, other, other_basis, other_bound) = map(
            spread, (pair.first, pair.second)
        )
        # factor (a - mean) (b - other mean), written as sums of the features that a row has
        by_first = -pair.factor * np.kron(np.eye(len(mean)), other_mean)
        by_second = -pair.factor * np.kron(mean, np.eye(len(other_mean)))
        both = pair.factor * np.kron(mean, other_mean)[None] / unit
        shift = np.vstack([by_first, by_second, both if len(one) else both[:0]])
        inputs = np.concatenate([pair.features, pair.first, pair.second, one])
        variances = pair.factor**2 * np.kron(own, other)
        squares = pair.factor**2 * np.kron(bound(np.asarray), other_bound(np.asarray))
        parts.append((inputs, pair.features, shift, np.kron(basis, other_basis), variances, partial(_applied, squares)))
    total = math.fsum(np.concatenate([own for *_, own, _ in parts]))
    scales = [(own / total + ridge) ** -0.5 for *_, own, _ in parts]

    def longest(scale: np.ndarray, bound: _Bound) -> float:
        return float(bound(lambda squares: squares @ np.square(scale)[:, None])[0])

    length = math.sqrt(math.fsum(longest(scale, bound) for scale, (*_, bound) in zip(scales, parts, strict=True)))
    blocks = []
    for scale, (inputs, outputs, shift, basis, *_) in zip(scales, parts, strict=True):
        # symmetric, so that it does not depend on the signs of directions, nor on their order
        root = (basis * (scale / length)) @ basis.T
        blocks.append(MapBlock(inputs, outputs, np.vstack([root, shift @ root])))
    return blocks


def _applied(squares: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return a linear function of squares (d,)."""
    return function(squares)


def _told(columns: Sequence[ColumnCells]) -> list[ColumnCells]:
    """Return the F columns with more than one cell."""
    return [column for column in columns if len(column.values) > 1]


def _length(told: Sequence[ColumnCells]) -> float:
    """Return sqrt(F), the norm of a record's vector of zeros and ones; 1 if no column is counted."""
    return math.sqrt(max(len(told), 1))


def _nearest(noisy: np.ndarray) -> np.ndarray:
    """Project noisy shares (G,) onto the probability simplex.

    Source: Duchi, Shalev-Shwartz, Singer and Chandra 2008, Figure 1.

    >>> _nearest(np.array([0.9, 0.4, -0.5])).round(9).tolist()
    [0.75, 0.25, 0.0]
    """
    # beyond a billion a float loses the 1, which noise hides long before
    noisy = noisy.clip(-1e9, 1e9)
    ordered = np.sort(noisy)[::-1]
    above = (np.cumsum(ordered) - 1) / np.arange(1, len(noisy) + 1)
    return np.asarray(np.maximum(noisy - above[np.nonzero(ordered > above)[0][-1]], 0.0))
