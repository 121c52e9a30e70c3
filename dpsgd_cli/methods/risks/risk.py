"""Empirical risks for full-batch methods (clipped gradient sums and losses along a line), and the risk of any pack.

Trials are independent. `active` (int64, distinct trial numbers) limits work to some of them; None means all. Results
have rows for active trials only. Linear models, which need no forward passes, are in `linear.py`. Regularisation reads
no data and is not part of a risk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.clipping.run import Clipping, add_clipped_sums
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.tensors import Batch, Table


class Risk(ABC):
    """R trials at weights `values` (R, P), and a direction (R, P) along which they may move.

    Guarantee: one record moves a trial's `gradient_sums` by a vector of norm at most its bound, and its `line_losses`
    by numbers in [0, bound] (all of one sign), whatever the other records are.
    """

    values: Tensor

    @abstractmethod
    def start(self, values: Tensor) -> None:
        """Start at `values` (R, P), which `advance` then changes in place."""

    @abstractmethod
    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        """Return sums (A, P), over each active trial's records, of loss gradients clipped to `norms` (R,)."""

    @abstractmethod
    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        """Set the direction of active trials to `direction` (A, P), of any length."""

    @abstractmethod
    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        """Return sums (A, count), float64, of losses at values - i spacing direction for i = 0, ..., count - 1.

        Losses are clipped to `bounds` (R,); `spacing` is (R,).
        """

    @abstractmethod
    def advance(self, lengths: Tensor) -> None:
        """Subtract lengths * direction from `values`, in place; `lengths` is (R,)."""


class PackRisk(Risk):
    """Risk of any pack on all records of `table`, by forward passes; work is done for all trials, active or not."""

    def __init__(self, pack: Pack, table: Table, loss: Loss, most_rows: int) -> None:
        self.pack = pack
        self.table = table
        self.loss = loss
        self.most_rows = most_rows
        self.values = pack.values
        pack.expect(len(table))
        self.direction = torch.zeros_like(pack.values)

    def start(self, values: Tensor) -> None:
        if values is not self.pack.values:
            raise ValueError("a packed model's weights are those of its pack")
        self.direction.zero_()

    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        seen = Diagnostics(self.pack.trials, self.values.device)
        self.pack.sums.zero_()
        for rows in self.table.chunks(Batch(rows=None), self.most_rows):
            add_clipped_sums(self.pack, rows, self.loss, Clipping(norms.unsqueeze(0)), seen)
        return self.pack.sums.clone() if active is None else self.pack.sums[active]

    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        if active is None:
            self.direction.copy_(direction)
        else:
            self.direction[active] = direction

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
