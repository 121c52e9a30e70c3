"""Sums of second moments of rows at unit norm, and their noise. NumPy alone, because planning loads this file.

Used by `preprocess: pca`, by `method.preconditioner` and by `dp-least-squares`: the bound on a row's norm is enforced
here, whatever the rows were, and the sensitivities stand in `preconditioning/price.py`. A mean is never subtracted: it
would be a second use of the private rows.

Not here: charging it (`accounting/`, `training/start.py`), what is made of the noisy matrix (`maps.py`,
`data/pca.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

ROWS_AT_ONCE = 8192


def blocks(rows: np.ndarray, taken: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Rows (N, ...) as pieces (n, D), in order; where `taken` bool (N,) is given, only rows where it is True."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    for start in range(0, len(flat), ROWS_AT_ONCE):
        piece = flat[start : start + ROWS_AT_ONCE]
        yield piece if taken is None else piece[taken[start : start + ROWS_AT_ONCE]]


def at_most_one(block: np.ndarray) -> np.ndarray:
    """Rows divided by max(1, their L2 norm), in float64; one of which the norm is no finite number becomes 0."""
    block = block.astype(np.float64)
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    return np.where(np.isfinite(norms), block / np.maximum(1.0, norms), 0.0)


def exactly_one(block: np.ndarray) -> np.ndarray:
    """Rows divided by their L2 norm, in float64; one of which that is 0, or no finite number, becomes 0."""
    block = block.astype(np.float64)
    # first by the largest entry, or squares would vanish and a tiny row be divided by too little
    largest = np.abs(block).max(axis=1, keepdims=True)
    block = block / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    return np.where(norms > 0, block / np.where(norms > 0, norms, 1.0), 0.0)


def second_moments(pieces: Iterable[np.ndarray], features: int, exactly: bool = False) -> np.ndarray:
    """The sum of u u^T over all rows, u being the row divided by max(1, its L2 norm), or `exactly` by that norm.

    Notation: pieces are (n, D); the result is float64 (D, D), symmetric. Not centred.

    Guarantee: S = sum_i u_i u_i^T with |u_i| <= 1 whatever the rows were, because the division happens here. S is
    symmetric, so it is a function of its upper triangle (diagonal included). With the entries off the diagonal
    multiplied by sqrt(2), that triangle is a vector whose L2 norm IS the Frobenius norm of the whole, so `sensitivity`
    is its L2 sensitivity.
    """
    total = np.zeros((features, features))
    for piece in pieces:
        block = exactly_one(piece) if exactly else at_most_one(piece)
        total += block.T @ block
    return total


def as_vector(matrix: np.ndarray) -> np.ndarray:
    """The upper triangle of a symmetric matrix, entries off the diagonal times sqrt(2): what a sensitivity bounds."""
    upper = np.triu_indices(len(matrix))
    return np.where(upper[0] == upper[1], 1.0, math.sqrt(2)) * matrix[upper]


def with_noise(exact: np.ndarray, noised: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`exact` plus symmetric Gaussian noise: of one standard deviation on the diagonal, 1 / sqrt(2) of that off it.

    Notation: exact (D, D) from `second_moments`; `noised` gives its vector (D (D + 1) / 2,) back with noise
    (`noise.gaussian`), whose standard deviation is noise_multiplier * sensitivity(adjacency).

    Guarantee: the released vector is the upper triangle with off-diagonal entries times sqrt(2); noise of
    one scale on all of it is one Gaussian mechanism with noise multiplier z = scale / sensitivity, which is
    1/(2 z^2)-zCDP (Bun and Steinke 2016, Proposition 1.6). The mirrored half, the eigenvectors and every projection
    onto them are post-processing. Source: Dwork, Talwar, Thakurta, Zhang 2014, Algorithm 1, which adds `scale` off the
    diagonal too; the factor is free, because the sensitivity above holds for the weighted vector.
    """
    return from_vector(noised(as_vector(exact)))


def from_vector(vector: np.ndarray) -> np.ndarray:
    """Inverse of `as_vector`."""
    size = math.isqrt(2 * len(vector))
    upper = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper] = np.where(upper[0] == upper[1], vector, vector / math.sqrt(2))
    matrix.T[upper] = matrix[upper]
    return matrix
