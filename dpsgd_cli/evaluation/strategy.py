"""Public strategy matrices: what is summed over held-out records, so that noise hurts the wanted metrics least.

A held-out record has a cell: for two classes its class and the bin of its margin, for more classes the bin of its true
class's margin, for numbers the bin of its signed error. Let x be the number of records in each cell. The release is
A x + noise (`price.py`); each column of A has norm at most 1. Metrics are functions of x, estimated as x = A^-1 (A x +
noise). So a linear metric q x has noise variance s^2 q (A^T A)^-1 q^T. With M = A^T A, the strategy minimises
tr(M^-1 V) subject to M_ii <= 1, where V is the sum of q^T q / (sampling variance of q) over the workload's metrics.

The minimum satisfies M = L^-1/2 (L^1/2 V L^1/2)^1/2 L^-1/2 with L diagonal and diag(M) = 1; it is found by a fixed
point (Denisov, McMahan, Rush, Smith and Thakurta 2022, Theorem 3.2, with columns in place of rows). No record shapes a
strategy: the workload's gradients are those of public reference laws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import ndtr, ndtri

BINS = 64
"""Bins of a margin, for each of two classes."""
FINE = 128
"""Bins of the true class's margin, for more than two classes."""


def margin_edges(bins: int) -> np.ndarray:
    """Return the edges (bins + 1,) of margins, from -8 to 8, with one at 0. Outer bins also hold all margins beyond."""
    return 2 * np.sinh(np.linspace(-1, 1, bins + 1) * np.arcsinh(4))


EDGES, FINE_EDGES = margin_edges(BINS), margin_edges(FINE)
MARGINS = (EDGES[1:] + EDGES[:-1]) / 2
"""Margin (log odds) that stands for each of the 64 bins."""
LEAST_PROBABILITY = 0.01
"""Probabilities are clipped to [0.01, 0.99] in the log loss: without a bound, no noise could cover it."""
SIDE = 96
"""Bins of an error, on each side of 0."""
ERRORS = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, SIDE)])
"""Edges of absolute errors as shares of the target's range, (97,). The last bin also holds all errors beyond."""
TARGETS = 64
"""Equal bins of a target within its bounds."""
SLACK = 1 - 2.0**-40
"""Columns are scaled by this, so that rounding leaves none longer than 1."""


@dataclass(frozen=True)
class Strategy:
    """A strategy matrix (d, d), its inverse and the noise covariance (A^T A)^-1 of the cells for noise of variance 1.

    Guarantee: no column of `matrix` is longer than 1 in float64; otherwise the constructor raises ValueError.
    """

    matrix: np.ndarray
    inverse: np.ndarray
    covariance: np.ndarray

    def __post_init__(self) -> None:
        if not (np.linalg.norm(self.matrix, axis=0) <= 1).all():
            raise ValueError("a column of the strategy is longer than 1")

    @classmethod
    def minimising(cls, workload: np.ndarray) -> Strategy:
        """Return the strategy for V = `workload` (d, d), symmetric and positive semidefinite.

        A thousandth of V's trace is spread over all cells, so that no cell is hidden by noise without limit.
        """
        cells = len(workload)
        wanted = workload / workload.trace() + 1e-3 * np.eye(cells) / cells
        scale = np.diag(wanted).copy()
        for _ in range(1000):
            root = np.sqrt(scale)
            values, vectors = np.linalg.eigh(root[:, None] * wanted * root)
            found = (vectors * np.sqrt(values.clip(0))) @ vectors.T
            moved, scale = np.abs(np.diag(found) / scale - 1).max(), np.diag(found).copy()
            if moved < 1e-2:
                break
        square = found / root[:, None] / root
        values, vectors = np.linalg.eigh(square)
        matrix = (vectors * np.sqrt(values)) @ vectors.T
        matrix *= SLACK / np.linalg.norm(matrix, axis=0).max()
        inverse = np.linalg.inv(matrix)
        return cls(matrix, inverse, inverse @ inverse.T)


def reference_law(auc: float, prevalence: float, bins: int = BINS) -> np.ndarray:
    """Return the cells' probabilities (2, bins) of a calibrated model with normal scores; a public fiction.

    Margins of class c are normal with variance d^2 and mean -+ d^2 / 2 + log(prevalence / (1 - prevalence)), where
    d = sqrt(2) Phi^-1(auc): the log likelihood ratio of two normal laws.
    """
    distance = np.sqrt(2) * ndtri(auc)
    ends = np.concatenate([[-np.inf], margin_edges(bins)[1:-1], [np.inf]])
    shift = np.log(prevalence / (1 - prevalence))
    both = [
        share * np.diff(ndtr((ends - sign * distance**2 / 2 - shift) / distance))
        for sign, share in ((-1, 1 - prevalence), (1, prevalence))
    ]
    return np.array(both)


def _weighed(law: np.ndarray, queries: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sum of q^T q / (sampling variance of q) over queries with a mean of 0 under `law`."""
    total = np.zeros((law.size, law.size))
    for query in queries:
        q = query.ravel() - (law * query).sum()
        variance = (law.ravel() * q**2).sum()
        if variance > 1e-3:
            total += np.outer(q, q) / variance
    return total


def _failing(law: np.ndarray, edges: Iterable[np.ndarray]) -> np.ndarray:
    """Return the same for counts above an edge, D = N(edge) - .9 n, whose mean is not 0.

    Each noise deviation has to be small, also at edges that nearly all records pass: one failing edge there would
    include everything. So no edge counts as more certain than a variance of .02.
    """
    total = np.zeros((law.size, law.size))
    for edge in edges:
        q = edge.ravel() - 0.9
        total += np.outer(q, q) / max((law.ravel() * q**2).sum(), 0.02)
    return total


def _losses(edges: np.ndarray) -> np.ndarray:
    second = 1 / (1 + np.exp(-(edges[1:] + edges[:-1]) / 2))
    return -np.log(np.clip([1 - second, second], LEAST_PROBABILITY, 1 - LEAST_PROBABILITY))


_SECOND = 1 / (1 + np.exp(-MARGINS))
LOSSES = _losses(EDGES)
"""Log loss of each cell (2, 64) of two classes, from clipped probabilities."""
FINE_LOSSES = np.repeat(_losses(FINE_EDGES)[1:], 2, axis=0)
"""Log loss of each cell (2, 128) of more classes."""
SQUARES = (np.array([[0.0], [1.0]]) - _SECOND) ** 2
"""Brier score of each cell (2, 64)."""
RIGHT = np.repeat([[1.0, 0.0], [0.0, 1.0]], BINS // 2, axis=1)
"""Whether a record of a cell is predicted right (2, 64). A margin of exactly 0 predicts the first class."""


@cache
def for_two_classes() -> Strategy:
    """Return the strategy of cells (class, bin of the margin of the second class): 128 cells, class by class.

    The workload is accuracy, balanced accuracy, log loss, Brier score, AUC and counts above edges, at AUC
    .65, .8 and .95 and prevalence .5 and .15.
    """
    total = np.zeros((2 * BINS, 2 * BINS))
    for auc in (0.65, 0.8, 0.95):
        for prevalence in (0.5, 0.15):
            law = reference_law(auc, prevalence)
            given = law / law.sum(axis=1, keepdims=True)
            recall = (given * RIGHT).sum(axis=1, keepdims=True)
            below = np.cumsum(given[0]) - given[0] / 2
            above = 1 - np.cumsum(given[1]) + given[1] / 2
            ranked = np.array([above, below]) - auc
            balanced = (RIGHT - recall) / law.sum(axis=1, keepdims=True)
            of_law = [RIGHT, LOSSES, SQUARES, balanced, ranked / law.sum(axis=1, keepdims=True)]
            total += _weighed(law, of_law) + 0.02 * _weighed(law, (conforming(edge) for edge in range(BINS + 1)))
    return Strategy.minimising(total)


def conforming(edge: int) -> np.ndarray:
    """Return which cells (2, 64) hold records whose true class has a margin of at least edge number `edge`."""
    found = np.zeros((2, BINS))
    found[1, edge:] = 1
    found[0, : BINS - edge] = 1
    return found


@cache
def for_many_classes() -> Strategy:
    """Return the strategy of cells (predicted right or not, bin of the true class's margin): 256 cells.

    The margin of class y is log(p_y / (1 - p_y)). The workload is accuracy, log loss and counts above edges.
    The laws are those of two classes, with the first class as "predicted wrong".
    """
    total = np.zeros((2 * FINE, 2 * FINE))
    right = np.repeat([[0.0], [1.0]], FINE, axis=1)
    for accuracy in (0.5, 0.7, 0.9):
        law = reference_law(0.9, accuracy, FINE)
        total += _weighed(law, [right, FINE_LOSSES]) + 0.1 * _failing(law, map(reaching, range(1, FINE + 1)))
    return Strategy.minimising(total)


def reaching(edge: int) -> np.ndarray:
    """Return which cells (2, 128) hold records whose true class has a margin of at least fine edge number `edge`."""
    return np.repeat((np.arange(FINE) >= edge)[None].astype(float), 2, axis=0)


@cache
def for_errors() -> Strategy:
    """Return the strategy of cells of signed errors: 96 bins below 0, from the largest, and 96 above.

    The workload is the shares of errors beyond each edge, on each side, and the edges of intervals, for errors with a
    normal law whose standard deviation is .02, .1 and .3 of the target's range.
    """
    total = np.zeros((2 * SIDE, 2 * SIDE))
    number = np.arange(2 * SIDE)
    sided = [(number < edge).astype(float) for edge in range(1, 2 * SIDE)]
    for deviation in (0.02, 0.1, 0.3):
        half = np.diff(ndtr(np.concatenate([ERRORS[:-1], [np.inf]]) / deviation))
        law = np.concatenate([half[::-1], half])
        total += 0.3 * _weighed(law, sided) + _failing(law, map(within, range(1, SIDE + 1)))
    return Strategy.minimising(total)


def within(edge: int) -> np.ndarray:
    """Return which cells (192,) hold records with an absolute error below `ERRORS[edge]`."""
    return (np.abs(np.arange(2 * SIDE) - SIDE + 0.5) < edge).astype(float)


@cache
def for_targets() -> Strategy:
    """Return the strategy of 64 cells of targets; the workload is the share below each edge less one half."""
    return Strategy.minimising(sum(np.outer(q, q) for q in np.tri(TARGETS - 1, TARGETS) - 0.5))  # type: ignore[arg-type]
