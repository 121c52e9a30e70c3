"""Empirical risks for full-batch methods: clipped gradient sums, and losses along a line, for R trials at once.

Trials are independent. `active` (int64, distinct trial numbers) limits work to some of them; None means all. Results
have rows for active trials only. Regularisation reads no data and is not part of a risk.

`PackRisk` takes any model through forward passes.

`LinearRisk` takes two matrix products per iteration. The margin of trial r is t = z.w_r (`rows.py`). One record's
gradient is phi'(t) z, of norm |phi'(t)| |z|. So clipping to C means clamping phi'(t) to [-C/|z|, C/|z|]. All trials
share one matrix of rows; weights encode folds and merged equal records. Margins (N, R) are stored, and `advance`
updates them without another product: on a line, margins are t - a s with s = z.direction.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine.losses import Logistic, Loss, MarginLoss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION, add_product
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.methods.risks.rows import SignedRows

# by type of device: chunks should fit a CPU's cache, while a GPU is faster with few large ones
_CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
_ROW_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 30}
_LOG_LARGEST = 80.0
# largest log of a product in float64
_LARGEST_LOG = 700.0
_FAR = 1e30


class Risk(ABC):
    """R trials at weights `values` (R, P), and a direction (R, P) along which they may move.

    Guarantee: one record moves a trial's `gradient_sums` by a vector of norm at most its bound, and its `line_losses`
    by numbers in [0, bound] (all of one sign), whatever the other records are.
    """

    values: Tensor
    direction: Tensor

    def start(self, values: Tensor) -> None:
        """Start at `values` (R, P), which `advance` then changes in place."""
        self.values = values
        self.direction = torch.zeros_like(values)

    @abstractmethod
    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        """Return sums (A, P), over each active trial's records, of loss gradients clipped to `norms` (R,)."""

    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        """Set the direction of active trials to `direction` (A, P), of any length."""
        self.direction[slice(None) if active is None else active] = direction

    @abstractmethod
    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        """Return sums (A, count), float64, of losses at values - i spacing direction for i = 0, ..., count - 1.

        Losses are clipped to `bounds` (R,); `spacing` is (R,).
        """

    def advance(self, lengths: Tensor) -> None:
        """Subtract lengths * direction from `values`, in place; `lengths` is (R,)."""
        self.values.sub_(self.direction * lengths.unsqueeze(1))


class PackRisk(Risk):
    """Risk of any pack on all records of `table`, by forward passes; work is done for all trials, active or not.

    Its `values` are the pack's own.
    """

    def __init__(self, pack: Pack, table: Table, loss: Loss, most_rows: int) -> None:
        self.pack = pack
        self.table = table
        self.loss = loss
        self.most_rows = most_rows
        pack.expect(len(table))
        self.start(pack.values)

    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        seen = Diagnostics(self.pack.trials, self.values.device)
        self.pack.sums.zero_()
        for rows in self.table.chunks(Batch(rows=None), self.most_rows):
            add_clipped_sums(self.pack, rows, self.loss, Clipping(norms.unsqueeze(0)), seen)
        return self.pack.sums.clone() if active is None else self.pack.sums[active]

    @torch.no_grad()
    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        kept = self.values.clone()
        totals = torch.zeros(self.pack.trials, count, dtype=torch.float64, device=self.values.device)
        for i in range(count):
            torch.addcmul(kept, self.direction, (spacing * i).unsqueeze(1), value=-1.0, out=self.values)
            for x, y, mask in self.table.chunks(Batch(rows=None), self.most_rows):
                losses = self.loss(self.pack(x), y.expand(self.pack.trials, -1))
                # NaN counts as 0, a loss above the bound as the bound
                losses = torch.minimum(losses.nan_to_num(nan=0.0).clamp_min(0.0), bounds.unsqueeze(1))
                losses = losses if mask is None else torch.where(mask, losses, 0.0)
                totals[:, i] += losses.sum(dim=1, dtype=torch.float64)
        self.values.copy_(kept)
        return totals if active is None else totals[active]

    def advance(self, lengths: Tensor) -> None:
        self.values.addcmul_(self.direction, lengths.unsqueeze(1), value=-1.0)


class LinearRisk(Risk):
    """Risk of one margin loss over `rows`, for all trials of the weights."""

    def __init__(self, rows: SignedRows, loss: MarginLoss) -> None:
        self.rows = rows
        self.loss = loss

    def start(self, values: Tensor) -> None:
        super().start(values)
        self.margins = self._margins_at(values, slice(None))
        self.along = torch.zeros_like(self.margins)

    def _chunks(self, trials: int) -> Iterator[slice]:
        kind = "cuda" if self.rows.z.is_cuda else "cpu"
        size = min(_CHUNK_ELEMENTS[kind] // max(1, trials), _ROW_ELEMENTS[kind] // self.rows.z.shape[1])
        size = min(MOST_ROWS, max(256, size // 16 * 16))
        for start in range(0, len(self.rows), size):
            yield slice(start, min(start + size, len(self.rows)))

    def _part(self, kept: Tensor, chunk: slice, active: Tensor | None) -> Tensor:
        part = kept[chunk]
        return part if active is None else part.index_select(1, active)

    def _weights(self, chunk: slice, active: Tensor | None = None) -> Tensor | None:
        if self.rows.weights is None:
            return None
        part = self.rows.weights[chunk]
        return part if active is None or part.shape[1] == 1 else part.index_select(1, active)

    def _margins_at(self, values: Tensor, chunk: slice) -> Tensor:
        """Return the margins (n, R) of a chunk's rows at `values` (R, P)."""
        margins = self.rows.z[chunk] @ values.T
        return margins if self.rows.offset is None else margins.add_(self.rows.offset[chunk].unsqueeze(1))

    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        trials = self.margins.shape[1] if active is None else len(active)
        norms = norms if active is None else norms.index_select(0, active)
        return self._sums(trials, norms, lambda chunk: self._part(self.margins, chunk, active), active)

    def gradient_sums_at(self, values: Tensor, norms: Tensor, seen: Diagnostics | None = None) -> Tensor:
        """Return `gradient_sums` (R, P) at any `values` (R, P), with both products in one pass; no state changes.

        NON-PRIVATE sums go to `seen`, if given; it counts records one by one, so rows must not be merged then.
        """
        return self._sums(len(values), norms, lambda chunk: self._margins_at(values, chunk), seen=seen)

    def _sums(
        self,
        trials: int,
        norms: Tensor,
        margins: Callable[[slice], Tensor],
        active: Tensor | None = None,
        seen: Diagnostics | None = None,
    ) -> Tensor:
        """Return sums (A, P), over all rows, of slopes at a chunk's `margins` (n, A), clipped, times the rows."""
        sums = self.rows.z.new_zeros(trials, self.rows.z.shape[1], dtype=PRECISION)
        bound = _shared(norms)
        for chunk in self._chunks(trials):
            t = margins(chunk)
            slopes = self.loss.slope(t)
            if seen is not None:
                self._diagnose(seen, (t, slopes, chunk), norms)
            self._clip(slopes, chunk, bound)
            add_product(sums, slopes, self.rows.z[chunk], self._weights(chunk, active))
        return sums

    def _diagnose(self, seen: Diagnostics, at: tuple[Tensor, Tensor, slice], norms: Tensor) -> None:
        t, slopes, chunk = at
        squares = (slopes * self.rows.norms[chunk].unsqueeze(1)).square().T.unsqueeze(0)
        weights = self._weights(chunk)
        present = None if weights is None else (weights > 0).T.expand(t.shape[1], -1)
        clipping = None if bool(torch.isinf(norms).any()) else Clipping(norms.unsqueeze(0))
        seen.add(self.loss.value(t).T, None if clipping is None else squares, present, clipping)

    def _clip(self, slopes: Tensor, chunk: slice, bound: Tensor) -> None:
        """Clamp slopes (n, A) in place to bound / |z| in size; `bound` is (1,) or (A,). NaN becomes 0."""
        most = (bound / self.rows.norms[chunk].unsqueeze(1)).clamp_(max=torch.finfo(slopes.dtype).max)
        torch.minimum(torch.maximum(slopes, -most, out=slopes), most, out=slopes).nan_to_num_(nan=0.0)

    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        super().aim(direction, active)
        if active is None:
            torch.mm(self.rows.z, direction.T, out=self.along)
        else:
            self.along.index_copy_(1, active, self.rows.z @ direction.T)

    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        if active is not None:
            spacing, bounds = spacing[active], bounds[active]
        evaluate = self._logistic_line if isinstance(self.loss, Logistic) else self._line
        totals = torch.zeros(count, len(spacing), dtype=torch.float64, device=spacing.device)
        bound = _shared(bounds)
        for chunk in self._chunks(len(spacing)):
            t, s = self._part(self.margins, chunk, active), self._part(self.along, chunk, active)
            evaluate((t, s * spacing, self._weights(chunk, active)), bound, totals, self.rows.all_single(chunk))
        return totals.T

    def _line(self, where: tuple[Tensor, Tensor, Tensor | None], bound: Tensor, totals: Tensor, single: bool) -> None:
        t, s, weights = where
        # so that no difference is NaN
        t, s = t.clamp(-_FAR, _FAR).nan_to_num_(nan=0.0), s.clamp(-_FAR, _FAR).nan_to_num_(nan=0.0)
        for i in range(len(totals)):
            losses = _at_most(self.loss.value(torch.sub(t, s, alpha=i)), bound, least=0.0)
            if single and weights is not None:
                losses.mul_(weights)
            totals[i] += _weighted_sum(losses, None if single else weights)

    def _logistic_line(
        self, where: tuple[Tensor, Tensor, Tensor | None], bound: Tensor, totals: Tensor, single: bool
    ) -> None:
        """Add logistic losses on a line to `totals`, with e^(-t + i s) by repeated multiplication.

        If weights are 0 and 1, it takes the log of a product instead of a sum of logs. Each record contributes
        log(min(1 + e^(-t + i s), e^bound)), which is in [0, bound] for any rounding.
        """
        t, s, weights = where
        odds = t.clamp(-_LOG_LARGEST, _LOG_LARGEST).neg_().exp_().nan_to_num_(nan=0.0)
        if weights is not None and single:
            odds.mul_(weights)
        ratio = s.clamp(-_LOG_LARGEST, _LOG_LARGEST).exp_().nan_to_num_(nan=1.0)
        largest = float(bound.max())
        folds = 0 if largest > _LARGEST_LOG else min(6, int(math.log2(_LARGEST_LOG / largest)))
        ceiling = bound.exp().clamp_(max=torch.finfo(t.dtype).max)
        factors = torch.empty_like(odds)
        for i in range(len(totals)):
            _at_most(torch.add(odds, 1.0, out=factors), ceiling)
            if single or weights is None:
                totals[i] += _log_of_product(factors, folds)
            else:
                totals[i] += _weighted_sum(factors.log_(), weights)
            odds.mul_(ratio)

    def advance(self, lengths: Tensor) -> None:
        super().advance(lengths)
        self.margins.addcmul_(self.along, lengths, value=-1.0)

    def misses(self, values: Tensor) -> Tensor:
        """Return the number of records with t <= 0 at `values` (A, P), for each trial; (A,) float64, sensitivity 1."""
        missed = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        for chunk in self._chunks(len(values)):
            missed += _weighted_sum(self._margins_at(values, chunk) <= 0, self._weights(chunk))
        return missed

    def loss_sums(self, values: Tensor) -> Tensor:
        """Return sums (R,), float64, of unclipped losses over each trial's records at `values` (R, P). NON-PRIVATE."""
        losses = torch.zeros(len(values), dtype=torch.float64, device=values.device)
        for chunk in self._chunks(len(values)):
            value, weights = self.loss.value(self._margins_at(values, chunk)), self._weights(chunk)
            if weights is not None:
                value = torch.where(weights > 0, value * weights, 0.0)
            losses += value.sum(dim=0, dtype=torch.float64)
        return losses


def _shared(norms: Tensor) -> Tensor:
    """Return `norms` as (1,) if all trials clip at the same norm, which broadcasts faster; unchanged on a GPU."""
    return norms[:1] if not norms.is_cuda and bool((norms == norms[0]).all()) else norms


def _weighted_sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return sums (A,), float64, of `values` (n, A) times `weights` (n, A or 1); weights may be large counts."""
    return values.sum(dim=0, dtype=PRECISION) if weights is None else (values.to(PRECISION) * weights).sum(dim=0)


def _at_most(values: Tensor, bound: Tensor, least: float | None = None) -> Tensor:
    """Clamp `values` (n, A) in place to at most `bound`, (1,) or (A,), and to at least `least`."""
    if len(bound) > 1 or values.is_cuda:
        return torch.minimum(values if least is None else values.clamp_(min=least), bound, out=values)
    return values.clamp_(min=least, max=float(bound))


def _log_of_product(factors: Tensor, folds: int) -> Tensor:
    """Return the sum of logs of each column of `factors` (n, A), with products of 2^folds factors before each log.

    The result is (A,) float64. All steps are float64, because a product's rounding depends on the records in it.
    """
    (rows, columns), group = factors.shape, 1 << folds
    whole = rows - rows % group
    products = factors[:whole].view(group, whole // group, columns).prod(dim=0, dtype=PRECISION)
    total = products.log_().sum(dim=0)
    return total if whole == rows else total + factors[whole:].to(PRECISION).log_().sum(dim=0)
