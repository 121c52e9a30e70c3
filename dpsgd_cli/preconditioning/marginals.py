"""How the records of a table lie in each of its columns, with noise, and what that says of second moments.

Notation: a record has one value in each column, and the column's values are cut into cells that are public. v is the
record's row of all cells, 1 / sqrt(F) in its cell of each of the F columns and 0 elsewhere, so that |v| = 1 whatever
the record holds; V is the sum of v over the records. A column of one cell tells nothing, and is not among the F.

From V, noisy, follows a model of the mean of u u^T over records, u being a record's features divided by their length:
columns are taken to be independent, and values to be in the middle of their cells. Where that is wrong, the model is a
worse preconditioner, and no less private.

Not here: what one record moves V by (`preconditioning/price.py`), the release (`preconditioning/run.py`), the
cells of a column (`data/bins.py`). NumPy alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_TINY = 1e-30
"""No direction is divided by less."""


@dataclass(frozen=True)
class Cells:
    """A column in cells: `features` (d,) are where its features stand in a row, and `values` (G, d) what they are in
    the middle of each cell, before the row is divided by its length."""

    features: np.ndarray
    values: np.ndarray

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The cell of each row (n, D): the one whose features point most nearly the same way, int64 (n,)."""
        ways = self.values / np.maximum(np.linalg.norm(self.values, axis=1, keepdims=True), _TINY)
        return (rows[:, self.features] @ ways.T.astype(rows.dtype)).argmax(axis=1)


def counted(pieces: Iterable[np.ndarray], columns: Sequence[Cells]) -> np.ndarray:
    """V, float64 (all cells of columns of more than one,), of rows in pieces (n, D).

    Guarantee: each row adds a vector of L2 norm 1 without negative entries, because a column has one cell for any row.
    A row of zeros, which stands for no record, adds nothing, nor does one of which an entry is no finite number.
    """
    told = _told(columns)
    total = [np.zeros(len(column.values)) for column in told]
    for piece in pieces:
        rows = piece[np.isfinite(piece).all(axis=1) & (piece != 0).any(axis=1)]
        for counts, column in zip(total, told, strict=True):
            counts += np.bincount(column.of(rows), minlength=len(counts))
    return np.concatenate([np.zeros(0), *total]) / _length(told)


def model(noisy: np.ndarray, columns: Sequence[Cells], records: int, features: int) -> np.ndarray:
    """The mean of u u^T over `records`, float64 (D, D), by a noisy V: symmetric, no eigenvalue negative.

    With independent columns it is the product of means between columns; u is divided by the root of the mean square of
    a row's length, which is nearly that of every row.
    """
    told = _told(columns)
    shares = iter(np.split(noisy * (_length(told) / records), np.cumsum([len(one.values) for one in told])))
    means, within = np.zeros(features), []
    for column in columns:
        share = _nearest(next(shares)) if len(column.values) > 1 else np.ones(1)
        means[column.features] = share @ column.values
        within.append((column.values.T * share) @ column.values)
    found = np.outer(means, means)
    for column, own in zip(columns, within, strict=True):
        found[np.ix_(column.features, column.features)] = own
    return found / found.trace()


def _told(columns: Sequence[Cells]) -> list[Cells]:
    """The F columns."""
    return [column for column in columns if len(column.values) > 1]


def _length(told: Sequence[Cells]) -> float:
    """sqrt(F), the length of a record's row of zeros and ones; 1 where nothing is counted."""
    return math.sqrt(max(len(told), 1))


def _nearest(noisy: np.ndarray) -> np.ndarray:
    """The shares (G,), none negative and 1 in all, that are nearest to noisy ones.

    Source: Duchi, Shalev-Shwartz, Singer and Chandra 2008, Figure 1.

    >>> _nearest(np.array([0.9, 0.4, -0.5])).round(9).tolist()
    [0.75, 0.25, 0.0]
    """
    # beyond a billion a float would lose the 1, and noise has hidden it long before
    noisy = noisy.clip(-1e9, 1e9)
    ordered = np.sort(noisy)[::-1]
    above = (np.cumsum(ordered) - 1) / np.arange(1, len(noisy) + 1)
    return np.asarray(np.maximum(noisy - above[np.nonzero(ordered > above)[0][-1]], 0.0))
