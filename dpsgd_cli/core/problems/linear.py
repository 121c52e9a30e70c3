"""The empirical risk of a linear model for R trials at once, in two matrix products an iteration.

Rows are stored with the sign of their label, z = y x, so that the margin of trial r is t = z.w_r and one record's
gradient is phi'(t) z, of norm |phi'(t)| |z|: clipping to C is clamping phi'(t) to [-C/|z|, C/|z|]. All trials share
one matrix of rows; folds are a mask. Margins are kept (N, R) and follow `advance` without a further product, because
candidates on a line have margins t - a s with s = z.direction.

Not here: what is released (`methods/`), models that are not linear (`pack_risk.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsgd_cli.core.clipping import Clipping, Diagnostics
from dpsgd_cli.core.problems.losses import Logistic, MarginLoss
from dpsgd_cli.core.problems.risk import Risk

_CHUNK_ELEMENTS = 1 << 15
_ROW_ELEMENTS = 1 << 18
_LOG_LARGEST = 80.0


@dataclass(frozen=True)
class Rows:
    """Signed rows z (N, P), offsets (N,) or None (t = z.w + offset), norms |z| (N,), and held-out (N, R) or None."""

    z: Tensor
    offset: Tensor | None
    norms: Tensor
    held_out: Tensor | None = None

    @classmethod
    def load(cls, x: Tensor, y: Tensor, residual: bool, bias: bool, held_out: Tensor | None = None) -> Rows:
        """Features x (N, ...) and labels y (N,): classes 0 and 1 (or signs -1 and 1), or targets when `residual`.

        `bias` appends a constant 1. A record with a feature that is not finite becomes a record that adds nothing.
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
        if not bool(good.all()):
            out = ~good if held_out is None else held_out | ~good
            held_out = out if held_out is not None else out.contiguous()
        return cls(rows.contiguous(), offset, torch.linalg.vector_norm(rows, dim=1), held_out)

    def __len__(self) -> int:
        return self.z.shape[0]

    def shrunk(self, bound: float) -> Rows:
        """The same rows, none longer than `bound`: what a public bound says, enforced record by record."""
        factors = (bound / self.norms).clamp_(max=1.0).nan_to_num_(nan=1.0)
        return replace(self, z=self.z * factors.unsqueeze(1), norms=self.norms * factors)

    def of_trial(self, trial: int) -> Rows:
        """The rows with one trial's fold."""
        held = self.held_out
        return self if held is None or held.shape[1] == 1 else replace(self, held_out=held[:, trial : trial + 1])

    @property
    def counts(self) -> Tensor | int:
        """Records of each trial: (R,) with folds, else N. Public."""
        return len(self) if self.held_out is None else (~self.held_out).sum(dim=0)


class LinearRisk(Risk):
    """Sums of one margin loss over `rows`, for as many trials as the weights have."""

    def __init__(self, rows: Rows, loss: MarginLoss) -> None:
        self.rows = rows
        self.loss = loss
        self.values = torch.empty(0)
        self.margins = torch.empty(0)
        self.along = torch.empty(0)
        self.direction = torch.empty(0)

    def start(self, values: Tensor) -> None:
        self.values = values
        self.margins = self._margins(values)
        self.along = torch.zeros_like(self.margins)
        self.direction = torch.zeros_like(values)

    def _margins(self, values: Tensor) -> Tensor:
        margins = self.rows.z @ values.T
        return margins if self.rows.offset is None else margins.add_(self.rows.offset.unsqueeze(1))

    def _chunks(self, trials: int) -> Iterator[slice]:
        # numbers of a chunk, and its rows, are to stay in cache between two passes over them
        size = max(256, min(_CHUNK_ELEMENTS // max(1, trials), _ROW_ELEMENTS // self.rows.z.shape[1]))
        for start in range(0, len(self.rows), size):
            yield slice(start, min(start + size, len(self.rows)))

    def _part(self, kept: Tensor, chunk: slice, active: Tensor | None) -> Tensor:
        part = kept[chunk]
        return part if active is None else part.index_select(1, active)

    def _mask(self, chunk: slice, active: Tensor | None) -> Tensor | None:
        held = self.rows.held_out
        if held is None:
            return None
        part = held[chunk]
        return part if active is None or part.shape[1] == 1 else part.index_select(1, active)

    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        trials = self.margins.shape[1] if active is None else len(active)
        norms = norms if active is None else norms.index_select(0, active)
        sums = self.rows.z.new_zeros(trials, self.rows.z.shape[1])
        bound = _shared(norms)
        for chunk in self._chunks(trials):
            slopes = self.loss.slope(self._part(self.margins, chunk, active))
            self._clip(slopes, chunk, bound)
            mask = self._mask(chunk, active)
            if mask is not None:
                slopes.masked_fill_(mask, 0.0)
            sums.addmm_(slopes.T, self.rows.z[chunk])
        return sums

    def gradient_sums_at(self, values: Tensor, norms: Tensor, seen: Diagnostics | None = None) -> Tensor:
        """`gradient_sums` (R, P) at any `values` (R, P), without standing there: both products in one pass.

        NON-PRIVATE sums go to `seen`, if given.
        """
        sums = torch.zeros_like(values)
        bound = _shared(norms)
        for chunk in self._chunks(len(values)):
            rows = self.rows.z[chunk]
            t = rows @ values.T
            if self.rows.offset is not None:
                t += self.rows.offset[chunk].unsqueeze(1)
            slopes = self.loss.slope(t)
            mask = self._mask(chunk, None)
            if seen is not None:
                self._diagnose(seen, (t, slopes, chunk), norms)
            self._clip(slopes, chunk, bound)
            if mask is not None:
                slopes.masked_fill_(mask, 0.0)
            sums.addmm_(slopes.T, rows)
        return sums

    def _diagnose(self, seen: Diagnostics, at: tuple[Tensor, Tensor, slice], norms: Tensor) -> None:
        t, slopes, chunk = at
        squares = (slopes * self.rows.norms[chunk].unsqueeze(1)).square().T.unsqueeze(0)
        mask = self._mask(chunk, None)
        present = None if mask is None else (~mask).T.expand(t.shape[1], -1)
        clipping = None if bool(torch.isinf(norms).any()) else Clipping(norms.unsqueeze(0))
        seen.add(self.loss.value(t).T, None if clipping is None else squares, present, clipping)

    def _clip(self, slopes: Tensor, chunk: slice, bound: Tensor) -> None:
        """Clamp slopes (n, A) in place to bound / |z|; `bound` is (1,) or (A,). A slope that is not a number is 0."""
        most = (bound / self.rows.norms[chunk].unsqueeze(1)).clamp_(max=torch.finfo(slopes.dtype).max)
        torch.minimum(torch.maximum(slopes, -most, out=slopes), most, out=slopes).nan_to_num_(nan=0.0)

    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        if active is None:
            self.direction.copy_(direction)
            torch.mm(self.rows.z, direction.T, out=self.along)
            return
        self.direction[active] = direction
        self.along.index_copy_(1, active, self.rows.z @ direction.T)

    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        if active is not None:
            spacing, bounds = spacing[active], bounds[active]
        evaluate = self._logistic_line if isinstance(self.loss, Logistic) else self._line
        totals = torch.zeros(count, len(spacing), dtype=torch.float64, device=spacing.device)
        for chunk in self._chunks(len(spacing)):
            t, s = self._part(self.margins, chunk, active), self._part(self.along, chunk, active)
            evaluate((t, s * spacing, self._mask(chunk, active)), bounds, totals)
        return totals.T

    def _line(self, where: tuple[Tensor, Tensor, Tensor | None], bounds: Tensor, totals: Tensor) -> None:
        t, s, mask = where
        for i in range(len(totals)):
            losses = self.loss.value(torch.sub(t, s, alpha=i)).nan_to_num_(nan=0.0)
            losses = torch.minimum(losses, bounds, out=losses)
            if mask is not None:
                losses.masked_fill_(mask, 0.0)
            totals[i] += losses.sum(dim=0, dtype=torch.float64)

    def _logistic_line(self, where: tuple[Tensor, Tensor, Tensor | None], bounds: Tensor, totals: Tensor) -> None:
        """e^(-t + i s) by repeated multiplication, and the log of a product instead of a sum of logs.

        Each record contributes log(min(1 + e^(-t + i s), e^bound)), which is in [0, bound] whatever the rounding.
        """
        t, s, mask = where
        odds = t.neg().clamp_(-_LOG_LARGEST, _LOG_LARGEST).exp_().nan_to_num_(nan=0.0)
        if mask is not None:
            odds.masked_fill_(mask, 0.0)
        ratio = s.clamp(-_LOG_LARGEST, _LOG_LARGEST).exp_().nan_to_num_(nan=1.0)
        largest = float(bounds.max())
        folds = 0 if largest > _LOG_LARGEST else min(4, int(math.log2(_LOG_LARGEST / largest)))
        ceiling = bounds.exp()
        factors = torch.empty_like(odds)
        for i in range(len(totals)):
            torch.minimum(torch.add(odds, 1.0, out=factors), ceiling, out=factors)
            totals[i] += _log_of_product(factors, folds)
            odds.mul_(ratio)

    def advance(self, lengths: Tensor) -> None:
        self.values.sub_(self.direction * lengths.unsqueeze(1))
        self.margins.addcmul_(self.along, lengths, value=-1.0)

    def misses(self, values: Tensor) -> Tensor:
        """How many of a trial's records have t <= 0 at `values` (A, P); (A,) float64. One record counts at most 1."""
        missed = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        for chunk in self._chunks(len(values)):
            wrong = (self.rows.z[chunk] @ values.T) <= 0
            mask = self._mask(chunk, None)
            missed += (wrong if mask is None else wrong & ~mask).sum(dim=0)
        return missed

    def loss_sums(self, values: Tensor, held_out: bool = False) -> Tensor:
        """Sums (R,), float64, of unclipped losses over a trial's records (or over those held out). NON-PRIVATE."""
        return self.totals(values, held_out)[0]

    def totals(self, values: Tensor, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Sums (R,), float64, of losses and of hits (t > 0; for residuals |t|) at `values` (R, P). NON-PRIVATE."""
        losses = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        hits = torch.zeros_like(losses)
        for chunk in self._chunks(len(values)):
            t = self.rows.z[chunk] @ values.T
            if self.rows.offset is not None:
                t += self.rows.offset[chunk].unsqueeze(1)
            value, hit = self.loss.value(t), t.abs() if self.loss.residual else (t > 0).to(t)
            mask = self._mask(chunk, None)
            if mask is not None:
                mask = ~mask if held_out else mask
                value, hit = value.masked_fill(mask, 0.0), hit.masked_fill(mask, 0.0)
            losses += value.sum(dim=0, dtype=torch.float64)
            hits += hit.sum(dim=0, dtype=torch.float64)
        return losses, hits


def _shared(norms: Tensor) -> Tensor:
    """(1,) when all trials clip at the same norm, which then broadcasts faster."""
    return norms[:1] if bool((norms == norms[0]).all()) else norms


def _log_of_product(factors: Tensor, folds: int) -> Tensor:
    """Sum of logs down the columns of `factors` (n, A), multiplying 2^folds of them before each log; (A,) float64."""
    total = torch.zeros(factors.shape[1], dtype=torch.float64, device=factors.device)
    for _ in range(folds):
        half = len(factors) // 2
        if len(factors) % 2:
            total += factors[-1].double().log()
        factors = factors[:half] * factors[half : 2 * half]
    return total + factors.log().sum(dim=0, dtype=torch.float64)
