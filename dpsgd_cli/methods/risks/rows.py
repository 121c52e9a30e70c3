"""Records of a linear model as signed rows, with a weight for each record and trial.

A record with label y in {-1, +1} becomes the row z = y x, so its margin is t = z.w for either label. Trials share one
matrix of rows and differ in weights: 0 for a record that a trial's fold holds out, 1 for one it trains on, n for n
equal records that were merged into one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_WORTH_MERGING = 1 << 16
_MOST_KEPT = 0.7
# float32 represents all integers up to here
_MOST_COUNTED = 1 << 24
_HASHED_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class SignedRows:
    """Signed rows z (N, P), offsets (N,) or None (t = z.w + offset), norms |z| (N,), and weights (N, R or 1) or None.

    Each of the first `several` rows represents more than one record.
    """

    z: Tensor
    offset: Tensor | None
    norms: Tensor
    weights: Tensor | None = None
    several: int = 0

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

    def merged(self) -> SignedRows:
        """Merge equal records into one row with the sum of their weights.

        Guarantee: every sum over records stays the same up to rounding, even if each record is clipped or bounded
        before it is added, because equal records are treated equally. Small tables, and tables with few equal records,
        are returned unchanged.
        """
        if self.offset is not None or not _WORTH_MERGING <= len(self) <= _MOST_COUNTED:
            return self
        groups, place = _groups(self.z)
        if groups > _MOST_KEPT * len(self):
            return self
        copies = torch.bincount(place, minlength=groups)
        order = copies.argsort(descending=True, stable=True)
        weights = self.z.new_ones(len(self), 1) if self.weights is None else self.weights
        summed = weights.new_zeros(groups, weights.shape[1]).index_add_(0, place, weights)[order]
        one_of_each = torch.empty_like(copies).scatter_(0, place, torch.arange(len(self), device=place.device))[order]
        return SignedRows(self.z[one_of_each], None, self.norms[one_of_each], summed, int((copies > 1).sum()))

    def all_single(self, chunk: slice) -> bool:
        """Return True if every row of `chunk` represents at most one record, so that its weights are 0 and 1."""
        return bool(chunk.start >= self.several)

    @property
    def counts(self) -> Tensor | int:
        """Number of records of each trial: (R,) with weights, else N. Public."""
        return len(self) if self.weights is None else self.weights.sum(dim=0, dtype=torch.float64).long()


def _groups(rows: Tensor) -> tuple[int, Tensor]:
    """Return the number of distinct rows and the index (N,) of each row among them.

    Exact: rows with equal hashes are compared, and if any differ, all rows count as distinct.
    """
    bits = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator).to(rows.device)
    hashes = torch.cat([(part.long() * factors).sum(dim=1) for part in bits.split(_HASHED_AT_ONCE)])
    different, place = torch.unique(hashes, return_inverse=True)
    one_of_each = torch.empty_like(different).scatter_(0, place, torch.arange(len(rows), device=rows.device))
    parts = zip(bits.split(_HASHED_AT_ONCE), one_of_each[place].split(_HASHED_AT_ONCE), strict=True)
    if not all(torch.equal(part, bits[theirs]) for part, theirs in parts):
        return len(rows), torch.arange(len(rows), device=rows.device)
    return len(different), place
