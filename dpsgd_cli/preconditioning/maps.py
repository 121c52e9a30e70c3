"""What noisy second moments make of the rows of a linear model: post-processing of one release a trial.

Notation: A is the released matrix of a trial (D, D), s how far noise alone spreads its eigenvalues (public). Those
below s are taken for noise, and count as 0. One of e > s counts as h = (e + sqrt(e^2 - s^2)) / 2, of which noise makes
e (Benaych-Georges and Nadakuditi 2011, Theorem 2.1 for the semicircle). With a ridge of s / 2 the root is
sqrt(ridge) (h(A) + ridge)^(-1/2), symmetric, with eigenvalues in (0, 1]; because all that noise hides counts alike, it
is I - cut cut^T for a `cut` of few columns. Of a model of second moments (`preconditioning/marginals.py`), whose noise
does not spread over all directions, the ridge is given (`cut_by`). Rows become unit(x root), on which all directions
weigh alike: one learning rate and few steps do where plain descent needs many.

All trials share the rows x. What differs from trial to trial is the root, and one factor a row, f = 1 / |x root|: a
model with weights W on rows unit(x root) is the model with weights root W on rows f x, because f x (root W) is the same
number. So no trial holds rows of its own, its sums are root times the sums of the rows f x, and what is published is
root W, to be used on rows f x.

Not here: the release (`second_moments.py`, `preconditioning/marginals.py`), when it is made (`preconditioning/run.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_EXACT_UP_TO = 1024
_WHOLE_UP_TO = 4096
_FIRST_ASKED = 64
_ROWS_AT_ONCE = 2048


def spread(features: int, scale: float) -> float:
    """How far from 0 noise alone puts the eigenvalues of a matrix that `with_noise` made: public, of no record.

    The noise's off-diagonal entries have standard deviation scale / sqrt(2), so its eigenvalues fill the interval of
    half-width scale sqrt(2 D) (Wigner's semicircle).
    """
    return scale * math.sqrt(2 * features)


def eigen(matrix: np.ndarray) -> tuple[Tensor, Tensor]:
    """Eigenvalues (D,) and eigenvectors (D, D) of a noisy matrix.

    In float32 where D is large: an error of 1e-6 of the largest eigenvalue is far below what noise does.
    """
    exact = torch.from_numpy(matrix)
    values, vectors = torch.linalg.eigh(exact if len(matrix) <= _EXACT_UP_TO else exact.float())
    return values, vectors


def cut_of(matrix: np.ndarray, scale: float) -> Tensor:
    """The cut of a matrix to which `with_noise` added noise of `scale`; float32 (D, as many as stand out of noise)."""
    reach = spread(len(matrix), scale)
    values, vectors = eigen(matrix) if len(matrix) <= _WHOLE_UP_TO else _largest(matrix, reach)
    out = values > reach
    moments = (values[out] + (values[out].square() - reach**2).sqrt()) / 2
    return _cut(vectors[:, out], moments, reach / 2)


def _largest(matrix: np.ndarray, reach: float) -> tuple[Tensor, Tensor]:
    """The eigenvalues of a large matrix that are beyond `reach`, and some more, with their eigenvectors; float32.

    They are few, so Lanczos iterations find them in a tenth of the time that all of them take. All are asked for where
    most are beyond it, or where the iterations do not converge.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    single, asked = matrix.astype(np.float32), _FIRST_ASKED
    while asked < len(single):
        try:
            values, vectors = eigsh(single, asked, which="LA", v0=np.ones(len(single), np.float32))
        except ArpackNoConvergence:
            break
        if values.min() <= reach:
            return torch.from_numpy(values), torch.from_numpy(vectors)
        asked *= 4
    return eigen(matrix)


def cut_by(model: np.ndarray, ridge: float) -> Tensor:
    """The cut of a model (D, D) of the mean second moments: sqrt(ridge) (model + ridge)^(-1/2) = I - cut cut^T.

    float32 (D, as many as matter): what is below a hundredth of the ridge counts as 0. The decomposition is in float64:
    a model has no noise on the whole matrix, so many eigenvalues may be alike, with which float32 does not end.
    """
    values, vectors = torch.linalg.eigh(torch.from_numpy(model))
    out = values > ridge / 100
    return _cut(vectors[:, out], values[out], ridge)


def _cut(vectors: Tensor, moments: Tensor, ridge: float) -> Tensor:
    kept = 1 - (1 + moments / ridge).rsqrt()
    return (vectors * kept.sqrt()).float().contiguous()


@dataclass(frozen=True)
class Preconditioner:
    """The cuts of all trials, (D, K_r) each: root = I - cut cut^T."""

    cuts: Sequence[Tensor]

    def units(self, x: Tensor) -> Tensor:
        """unit(x root), (R, B, D), of rows x (R or 1, B, ...).

        Guarantee: no row is longer than 1. What a float32 product can have lost of a length is added to it before rows
        are divided by it (`_lengths`). A row of length 0 stays 0, one with an entry that is no number keeps one.
        """
        flat = x.flatten(2)
        rows = flat.expand(len(self.cuts), -1, -1)
        moved = torch.stack([_moved(own, cut) for own, cut in zip(rows, self.cuts, strict=True)])
        return moved / _lengths(moved, flat).unsqueeze(-1)

    def factors(self, x: Tensor, per_trial: bool) -> Tensor:
        """f = 1 / |x root| for every trial and row, (R, N), of shared rows x (N, ...), or (R, N, ...) `per_trial`.

        Guarantee: |f x root| <= 1, as of `units`. A row that is so long that its length is no number has f = 0.
        """
        found = x.new_empty(len(self.cuts), x.shape[1] if per_trial else len(x))
        for trial, cut in enumerate(self.cuts):
            rows = (x[trial] if per_trial else x).flatten(1)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                piece = rows[start : start + _ROWS_AT_ONCE]
                lengths = _lengths(_moved(piece, cut), piece)
                found[trial, start : start + len(piece)] = torch.where(torch.isfinite(lengths), 1 / lengths, 0.0)
        return found

    def through(self, flat: Tensor, weights: int) -> Tensor:
        """The weights of every trial, the first so many numbers of `flat` (R, P), times its root; the rest as it is.

        From weights on rows unit(x root) to weights on rows f x; and from sums of the rows f x to those of the former.
        """
        moved = flat.clone()
        for own, given, cut in zip(moved, flat, self.cuts, strict=True):
            own[:weights] = _moved(given[:weights].view(-1, len(cut)), cut.to(flat.dtype)).reshape(-1)
        return moved


def _moved(rows: Tensor, cut: Tensor) -> Tensor:
    """Rows (n, D) times the root."""
    return rows - (rows @ cut) @ cut.T


def _lengths(moved: Tensor, rows: Tensor) -> Tensor:
    """L2 norms of `moved`, the product of `rows` (..., D) and a root, at least those of the exact product; above 0.

    A root is no longer than 1, so what rounding does to a row of the product is a few machine epsilons of |row|: at
    most 3.7 were seen (20 to 2,000 features), 8 are added. Of
    tiny rows the squares vanish: one least number a term is what that can have hidden.
    """
    numbers = torch.finfo(rows.dtype)
    hidden = torch.linalg.vector_norm(rows, dim=-1) * (8 * numbers.eps) + math.sqrt(rows.shape[-1] * numbers.tiny)
    return torch.linalg.vector_norm(moved, dim=-1) + hidden
