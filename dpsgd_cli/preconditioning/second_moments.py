"""Sums of second moments of rows with norm at most 1, and their noise. Uses NumPy only, because planning loads it.

Used by `preprocess: pca`, `method.preconditioner` and `dp-least-squares`. This module enforces the bound on a row's
norm for any rows; the sensitivities are in `preconditioning/price.py`. A mean is never subtracted: that would be a
second use of the private rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

ROWS_AT_ONCE = 8192


def blocks(rows: np.ndarray, taken: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield rows (N, ...) as pieces (n, D), in order; with `taken` bool (N,), only rows where it is True."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    for start in range(0, len(flat), ROWS_AT_ONCE):
        piece = flat[start : start + ROWS_AT_ONCE]
        yield piece if taken is None else piece[taken[start : start + ROWS_AT_ONCE]]


def at_most_one(block: np.ndarray) -> np.ndarray:
    """Return rows divided by max(1, their L2 norm), in float64; a row whose norm is not finite becomes 0."""
    block = block.astype(np.float64)
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    return np.where(np.isfinite(norms), block / np.maximum(1.0, norms), 0.0)


def exactly_one(block: np.ndarray) -> np.ndarray:
    """Return rows divided by their L2 norm, in float64; a row whose norm is 0 or not finite becomes 0."""
    block = block.astype(np.float64)
    # first by the largest entry, else squares of a tiny row would underflow and its norm come out too small
    largest = np.abs(block).max(axis=1, keepdims=True)
    block = block / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    return np.where(norms > 0, block / np.where(norms > 0, norms, 1.0), 0.0)


def second_moments(pieces: Iterable[np.ndarray], features: int, exactly: bool = False) -> np.ndarray:
    """Return the sum of u u^T over all rows, where u is the row divided by max(1, its L2 norm).

    With `exactly`, u is the row divided by its norm. Pieces are (n, D); the result is float64 (D, D), symmetric, not
    centred.

    Guarantee: S = sum_i u_i u_i^T with |u_i| <= 1 for any rows, because this function divides them. S is symmetric, so
    it is a function of its upper triangle (diagonal included). With the entries off the diagonal multiplied by sqrt(2),
    that triangle is a vector whose L2 norm IS the Frobenius norm of the matrix, so `sensitivity` is its L2 sensitivity.
    """
    total = np.zeros((features, features))
    for piece in pieces:
        block = exactly_one(piece) if exactly else at_most_one(piece)
        total += block.T @ block
    return total


def as_vector(matrix: np.ndarray) -> np.ndarray:
    """Return the upper triangle of a symmetric matrix, off-diagonal entries times sqrt(2), whose L2 norm is bounded."""
    upper = np.triu_indices(len(matrix))
    return np.where(upper[0] == upper[1], 1.0, math.sqrt(2)) * matrix[upper]


def with_noise(exact: np.ndarray, noised: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return `exact` plus symmetric Gaussian noise: standard deviation s on the diagonal and s / sqrt(2) off it.

    Notation: `exact` (D, D) is from `second_moments`; `noised` adds noise to its vector (D (D + 1) / 2,) with standard
    deviation s = noise_multiplier * sensitivity(adjacency) (`noise.gaussian`).

    Guarantee: the released vector is the upper triangle with off-diagonal entries times sqrt(2). Noise of one scale on
    all of it is one Gaussian mechanism with noise multiplier z = scale / sensitivity, which is 1/(2 z^2)-zCDP (Bun and
    Steinke 2016, Proposition 1.6). The mirrored half, the eigenvectors and every projection onto them are
    post-processing. Source: Dwork, Talwar, Thakurta, Zhang 2014, Algorithm 1, which adds noise of `scale` off the
    diagonal too; the smaller noise costs nothing, because the sensitivity above holds for the weighted vector.
    """
    return from_vector(noised(as_vector(exact)))


def from_vector(vector: np.ndarray) -> np.ndarray:
    """Return the symmetric matrix of a vector from `as_vector`."""
    size = math.isqrt(2 * len(vector))
    upper = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[upper] = np.where(upper[0] == upper[1], vector, vector / math.sqrt(2))
    matrix.T[upper] = matrix[upper]
    return matrix
