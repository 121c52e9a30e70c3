"""Preconditioners of linear models from noisy releases: post-processing of one release per trial.

Notation: A is the released matrix (D, D) of a trial. s (public) is the half-width of the interval that eigenvalues of
the noise alone fill. Eigenvalues below s count as noise, that is as 0. An eigenvalue e > s counts as
h = (e + sqrt(e^2 - s^2)) / 2, the value that noise moves to e (Benaych-Georges and Nadakuditi 2011, Theorem 2.1 for
the semicircle). With a ridge of s / 2 the root is sqrt(ridge) (h(A) + ridge)^(-1/2): symmetric, with eigenvalues in
(0, 1]. All directions below the noise have the same eigenvalue, so the root is I - cut cut^T for a `cut` of few
columns. Rows become unit(x root), on which all directions have similar weight. One learning rate and few steps are then
enough, where plain descent needs many. Marginals (`marginals.py`) give a map in blocks, and rows keep their lengths.

All trials share the rows x. They differ in the root, and in one factor per row, f = 1 / |x root|. A model with weights
W on rows unit(x root) is the model with weights root W on rows f x, because f x (root W) is the same number. So no
trial needs its own rows. Its sums are root times the sums of the rows f x. The published weights are root W, for rows
f x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.preconditioning.marginals import MapBlock

MAP = "map"
"""Name under which a model's file keeps a trial's map of rows."""
_EXACT_UP_TO = 1024
_WHOLE_UP_TO = 4096
_FIRST_ASKED = 64
_ROWS_AT_ONCE = 2048


def spread(features: int, scale: float) -> float:
    """Return the half-width of the interval that the noise's eigenvalues fill in `with_noise`; data-independent.

    The off-diagonal entries of the noise have standard deviation scale / sqrt(2), so its eigenvalues fill the interval
    of half-width scale sqrt(2 D) around 0 (Wigner's semicircle).
    """
    return scale * math.sqrt(2 * features)


def eigen(matrix: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (D,) and eigenvectors (D, D) of a noisy matrix.

    For large D they are float32: an error of 1e-6 of the largest eigenvalue is far below the noise.
    """
    exact = torch.from_numpy(matrix)
    values, vectors = torch.linalg.eigh(exact if len(matrix) <= _EXACT_UP_TO else exact.float())
    return values, vectors


def cut_of(matrix: np.ndarray, scale: float) -> Tensor:
    """Return the cut, float32 (D, K), of a matrix to which `with_noise` added noise of `scale`.

    K is the number of eigenvalues above the noise.
    """
    reach = spread(len(matrix), scale)
    values, vectors = eigen(matrix) if len(matrix) <= _WHOLE_UP_TO else _largest(matrix, reach)
    out = values > reach
    moments = (values[out] + (values[out].square() - reach**2).sqrt()) / 2
    return _cut(vectors[:, out], moments, reach / 2)


def _largest(matrix: np.ndarray, reach: float) -> tuple[Tensor, Tensor]:
    """Return at least the eigenvalues of a large matrix above `reach`, with their eigenvectors; float32.

    Usually they are few, and Lanczos iterations find them in a tenth of the time of a full decomposition. If most are
    above `reach`, or if the iterations do not converge, all eigenvalues are computed.
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


def _cut(vectors: Tensor, moments: Tensor, ridge: float) -> Tensor:
    kept = 1 - (1 + moments / ridge).rsqrt()
    return (vectors * kept.sqrt()).float().contiguous()


@dataclass(frozen=True)
class Preconditioner:
    """Preconditioner of all trials by their cuts, (D, K_r) each: root = I - cut cut^T."""

    cuts: Sequence[Tensor]

    def units(self, x: Tensor) -> Tensor:
        """Return unit(x root), (R, B, D), for rows x (R or 1, B, ...).

        Guarantee: no row has norm above 1. The possible rounding error of a float32 product is added to each norm
        before rows are divided by it (`_lengths`). A zero row stays 0; a row with NaN keeps a NaN.
        """
        flat = x.flatten(2)
        rows = flat.expand(len(self.cuts), -1, -1)
        moved = torch.stack([_moved(own, cut) for own, cut in zip(rows, self.cuts, strict=True)])
        return moved / _lengths(moved, flat).unsqueeze(-1)

    def factors(self, x: Tensor, per_trial: bool) -> Tensor:
        """Return f = 1 / |x root| for every trial and row, (R, N), for rows x (N, ...), or (R, N, ...) if `per_trial`.

        Guarantee: |f x root| <= 1, as in `units`. A row whose norm is not finite has f = 0.
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
        """Multiply the first `weights` entries of `flat` (R, P) by each trial's root and leave the rest unchanged.

        This maps weights for rows unit(x root) to weights for rows f x, and sums of rows f x to sums of unit(x root).
        """
        moved = flat.clone()
        for own, given, cut in zip(moved, flat, self.cuts, strict=True):
            own[:weights] = _moved(given[:weights].view(-1, len(cut)), cut.to(flat.dtype)).reshape(-1)
        return moved

    back = through
    """The root is symmetric."""

    @property
    def kept(self) -> list[Tensor]:
        """Tensors from which the preconditioner can be made again."""
        return list(self.cuts)

    def lengths(self, table: Table) -> Tensor:
        """Return bounds on the lengths of all rows, (1, N): 1."""
        return torch.ones(1, table.rows, dtype=torch.float64, device=table.y.device)


class BlockMap:
    """Linear maps A of all trials, as blocks: rows become x A, of any length.

    A model with weights W on rows x A is the model with weights W A^T on rows x. Sums over rows x, times A, are sums
    over rows x A.
    """

    def __init__(self, kept: Sequence[Tensor]) -> None:
        """Make the maps from `kept`: for each block its inputs (r,), outputs (c,) and matrices (R, r, c)."""
        self.kept = list(kept)
        self.blocks = list(zip(kept[::3], kept[1::3], kept[2::3], strict=True))

    @classmethod
    def of(cls, trials: Sequence[Sequence[MapBlock]], like: Tensor) -> BlockMap:
        """Return the maps of all trials, whose blocks have the same inputs and outputs, on the device of `like`."""
        kept: list[Tensor] = []
        for blocks in zip(*trials, strict=True):
            stacked = torch.from_numpy(np.stack([one.matrix for one in blocks])).to(like.device, torch.float64)
            kept += [torch.from_numpy(part).to(like.device) for part in (blocks[0].inputs, blocks[0].outputs)]
            kept.append(stacked)
        return cls(kept)

    def dense(self) -> list[np.ndarray]:
        """Return A of each trial, float32 (D, D)."""
        found = np.zeros((len(self.kept[2]), self._width, self._width), np.float32)
        for inputs, outputs, matrices in self.blocks:
            found[:, inputs.cpu().numpy()[:, None], outputs.cpu().numpy()] = matrices.cpu().numpy()
        return list(found)

    def moved(self, features: Tensor, values: Tensor, beside: Tensor) -> Tensor:
        """Return the numbers (R, G, d) at `features` (d,) of x A, float64, for G rows x.

        A row has `values` (G, d) at these features and `beside` (1, D) at all others. The features are the outputs of
        one or more blocks, which read no column but theirs and the constant.
        """
        rows, place = beside.repeat(len(values), 1), {int(feature): at for at, feature in enumerate(features)}
        rows[:, features] = values
        found = values.new_full((len(self.kept[2]), *values.shape), torch.nan)
        for inputs, outputs, matrices in self.blocks:
            if int(outputs[0]) in place:
                found[..., [place[int(feature)] for feature in outputs]] = rows[:, inputs] @ matrices
        return found

    def units(self, x: Tensor) -> Tensor:
        """Return x A, (R, B, D), for rows x (R or 1, B, ...)."""
        flat = x.flatten(2)
        moved = flat.new_empty(len(self.kept[2]), *flat.shape[1:])
        for inputs, outputs, matrices in self.blocks:
            moved[..., outputs] = flat[..., inputs] @ matrices.to(flat.dtype)
        return moved

    def through(self, flat: Tensor, weights: int) -> Tensor:
        """Return `flat` (R, P) with its first `weights` entries, weights W of rows x A, replaced by W A^T."""
        given = flat[:, :weights].unflatten(1, (-1, self._width))
        moved = torch.zeros_like(given)
        for inputs, outputs, matrices in self.blocks:
            moved.index_add_(2, inputs, given[..., outputs] @ matrices.mT.to(flat.dtype))
        return torch.cat([moved.flatten(1), flat[:, weights:]], dim=1)

    def back(self, flat: Tensor, weights: int) -> Tensor:
        """Return `flat` (R, P) with its first `weights` entries, sums S over rows x, replaced by S A."""
        given = flat[:, :weights].unflatten(1, (-1, self._width))
        return torch.cat([self.units(given).flatten(1), flat[:, weights:]], dim=1)

    @property
    def _width(self) -> int:
        return sum(len(outputs) for _, outputs, _ in self.blocks)

    def lengths(self, table: Table) -> Tensor:
        """Return the L2 norms of x A for every trial and row of `table`, float64 (R, N), no less than the exact ones.

        A sum of r products in float64 is off by at most r 2^-53 |x| |A|, with the Frobenius norm of A. Twice that is
        added. A row that is not finite has no finite norm.
        """
        rows = table.x.flatten(2 if table.per_trial else 1)
        found = torch.empty(len(self.kept[2]), rows.shape[-2], dtype=torch.float64, device=rows.device)
        size = torch.stack([matrices.square().sum(dim=(1, 2)) for *_, matrices in self.blocks]).sum(dim=0).sqrt()
        for start in range(0, found.shape[1], _ROWS_AT_ONCE):
            piece = rows[..., start : start + _ROWS_AT_ONCE, :].double()
            squares = torch.zeros(len(found), piece.shape[-2], dtype=torch.float64, device=rows.device)
            for inputs, _, matrices in self.blocks:
                squares += (piece[..., inputs] @ matrices).square().sum(dim=-1)
            hidden = torch.linalg.vector_norm(piece, dim=-1) * size.unsqueeze(1) * (rows.shape[-1] * 2.0**-52)
            found[:, start : start + piece.shape[-2]] = squares.sqrt() + hidden
        return found


def _moved(rows: Tensor, cut: Tensor) -> Tensor:
    """Return rows (n, D) times the root."""
    return rows - (rows @ cut) @ cut.T


def _lengths(moved: Tensor, rows: Tensor) -> Tensor:
    """Return L2 norms of `moved`, the product of `rows` (..., D) and a root: above 0, no less than the exact norms.

    A root has operator norm at most 1, so rounding changes a row of the product by a few machine epsilons of |row|. At
    most 3.7 were measured (20 to 2,000 features); 8 are added. Squares of tiny entries underflow: the smallest normal
    number per term bounds what that hides, and is added too.
    """
    numbers = torch.finfo(rows.dtype)
    hidden = torch.linalg.vector_norm(rows, dim=-1) * (8 * numbers.eps) + math.sqrt(rows.shape[-1] * numbers.tiny)
    return torch.linalg.vector_norm(moved, dim=-1) + hidden
