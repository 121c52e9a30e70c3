"""Noisy marginal counts of a table's columns, and a model of second moments from them. Uses NumPy only.

Notation: a record has one value in each column, and each column has public cells (`data/bins.py`). F is the number of
columns with more than one cell; a column with one cell carries no information and is not counted. v is the record's
vector over all cells: 1 / sqrt(F) in its cell of each of the F columns and 0 elsewhere. So |v| = 1 for any record. V is
the sum of v over the records; its sensitivity is in `preconditioning/price.py`.

A noisy V gives a model of the mean of u u^T over records, where u is a record's feature vector divided by its norm. The
model assumes independent columns, and values in the middle of their cells. If that is wrong, the preconditioner is
worse, but equally private.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_TINY = 1e-30
"""Smallest norm by which a direction is divided."""


@dataclass(frozen=True)
class Cells:
    """Public cells of a column.

    `features` (d,): indices of its features in a row. `values` (G, d): their values in the middle of each of G cells,
    before the row is divided by its norm.
    """

    features: np.ndarray
    values: np.ndarray

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the cell of each row (n, D), int64 (n,): the one whose feature direction is nearest to the row's."""
        ways = self.values / np.maximum(np.linalg.norm(self.values, axis=1, keepdims=True), _TINY)
        return (rows[:, self.features] @ ways.T.astype(rows.dtype)).argmax(axis=1)


def counted(pieces: Iterable[np.ndarray], columns: Sequence[Cells]) -> np.ndarray:
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


def model(noisy: np.ndarray, columns: Sequence[Cells], records: int, features: int) -> np.ndarray:
    """Estimate the mean of u u^T over `records` from a noisy V: float64 (D, D), symmetric, positive semidefinite.

    With independent columns, the entries between columns are products of means. Rows are divided by their root mean
    square norm, which is close to the norm of every row.
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
    """Return the F columns with more than one cell."""
    return [column for column in columns if len(column.values) > 1]


def _length(told: Sequence[Cells]) -> float:
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
