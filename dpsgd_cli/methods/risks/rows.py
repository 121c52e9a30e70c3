"""Records of a linear model as signed rows, with a weight for each record and trial.

A record with label y in {-1, +1} becomes the row z = y x, so its margin is t = z.w for either label. Trials share one
matrix of rows and differ in weights: 0 for a record that a trial's fold holds out, 1 for one it trains on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SignedRows:
    """Signed rows z (N, P), offsets (N,) or None (t = z.w + offset), norms |z| (N,), weights (N, R or 1) or None."""

    z: Tensor
    offset: Tensor | None
    norms: Tensor
    weights: Tensor | None = None

    @classmethod
    def load(cls, x: Tensor, y: Tensor, residual: bool, bias: bool, held_out: Tensor | None = None) -> SignedRows:
        """Build signed rows from features x (N, ...) and labels y (N,).

        Labels are classes 0 and 1 (or signs -1 and 1), or targets if `residual`. `bias` appends a constant 1.
        `held_out` (N, R) marks the records that a trial does not train on. A record with a feature that is not finite
        adds nothing.
        """
        rows = x.flatten(1)
        if bias:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        good = torch.isfinite(rows).all(dim=1, keepdim=True)
        rows = torch.where(good, rows, 0.0)
        if residual:
            offset = -y.to(rows)
        elif y.is_floating_point():
            offset, rows = None, rows * y.sign().to(rows).unsqueeze(1)
        else:
            offset, rows = None, rows * ((y > 0).to(rows) * 2 - 1).unsqueeze(1)
        weights = None if held_out is None else (~held_out).to(rows)
        if not bool(good.all()):
            weights = good.to(rows) if weights is None else weights * good
        return cls(rows.contiguous(), offset, torch.linalg.vector_norm(rows, dim=1), weights)

    def __len__(self) -> int:
        return self.z.shape[0]

    def shrunk(self, bound: float) -> SignedRows:
        """Return the rows with norms clipped to the public `bound`, each record by itself."""
        factors = (bound / self.norms).clamp_(max=1.0).nan_to_num_(nan=1.0)
        return replace(self, z=self.z * factors.unsqueeze(1), norms=self.norms * factors)

    def exact(self) -> SignedRows:
        """Return the rows in float64."""
        z, offset = self.z.double(), None if self.offset is None else self.offset.double()
        return replace(self, z=z, offset=offset, norms=torch.linalg.vector_norm(z, dim=1))

    def of_trial(self, trial: int) -> SignedRows:
        """Return the rows with one trial's weights."""
        weights = self.weights
        return self if weights is None or weights.shape[1] == 1 else replace(self, weights=weights[:, [trial]])

    @property
    def counts(self) -> Tensor | int:
        """Number of records of each trial: (R,) with weights, else N. Public."""
        return len(self) if self.weights is None else self.weights.sum(dim=0, dtype=torch.float64).long()
