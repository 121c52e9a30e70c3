"""Principal directions of a noisy covariance, and how far the projections onto them are whitened: post-processing.

Not here: the covariance and its noise (`preconditioning/second_moments.py`), when it is released and charged
(`preparation.py`).
"""

from __future__ import annotations

import numpy as np


def whitening(matrix: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Factors (components,) that give every projected feature the same second moment, and all together the old sum.

    Notation: axes (D, components) from `directions` of `matrix`; the second moment along axis k is v_k^T S v_k.
    Computed from the released matrix alone, so it costs nothing. Moments below 1e-6 of the largest count as that;
    without any positive moment all factors are 1.
    """
    moments = np.einsum("ik,ij,jk->k", axes, matrix, axes, optimize=True)
    largest = moments.max()
    if not largest > 0:
        return np.ones(len(moments))
    moments = np.maximum(moments, 1e-6 * largest)
    return np.asarray(np.sqrt(moments.mean() / moments))


def directions(matrix: np.ndarray, components: int) -> np.ndarray:
    """The `components` leading eigenvectors of a symmetric (D, D) matrix, as columns (D, components).

    Each is signed so that its largest entry is positive: equal matrices give equal projections.
    """
    from scipy.linalg import eigh

    size = len(matrix)
    _, vectors = eigh(matrix, subset_by_index=[size - components, size - 1])
    return signed(vectors[:, ::-1])


def signed(vectors: np.ndarray) -> np.ndarray:
    """Columns (D, K), each with the sign that makes its largest entry positive."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return np.asarray(vectors * np.sign(largest))
