"""Principal directions of a noisy covariance, and the whitening of projections onto them: post-processing.

`preconditioning/second_moments.py` computes the covariance and its noise.
"""

from __future__ import annotations

import numpy as np


def whitening(matrix: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Return factors (components,) that make the second moments of projected features equal and keep their sum.

    Notation: S is `matrix`; `axes` (D, components) are its `directions`; the second moment along axis k is v_k^T S v_k.
    The factors depend on the released matrix alone, so they cost no privacy. Moments below 1e-6 of the largest are
    raised to that. Without any positive moment all factors are 1.
    """
    moments = np.einsum("ik,ij,jk->k", axes, matrix, axes, optimize=True)
    largest = moments.max()
    if not largest > 0:
        return np.ones(len(moments))
    moments = np.maximum(moments, 1e-6 * largest)
    return np.asarray(np.sqrt(moments.mean() / moments))


def directions(matrix: np.ndarray, components: int) -> np.ndarray:
    """Return the `components` leading eigenvectors of a symmetric (D, D) matrix, as columns (D, components).

    Each is signed so that its entry of largest absolute value is positive: equal matrices give equal projections.
    """
    from scipy.linalg import eigh

    size = len(matrix)
    _, vectors = eigh(matrix, subset_by_index=[size - components, size - 1])
    return signed(vectors[:, ::-1])


def signed(vectors: np.ndarray) -> np.ndarray:
    """Return columns (D, K), each with the sign that makes its entry of largest absolute value positive."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return np.asarray(vectors * np.sign(largest))
