"""The empirical risk of any packed model: full-batch clipped sums, and losses along a line by forward passes.

Not here: linear models, which need no passes (`linear.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.losses import Loss
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.problems.risk import Risk
from dpsgd_cli.core.sampling import Batch
from dpsgd_cli.core.tensors import Table


class PackRisk(Risk):
    """Sums over every record of `table`; work is done for all trials, active or not."""

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
                # a loss that is not a number counts as nothing, one that is too large as the bound
                losses = torch.minimum(losses.nan_to_num(nan=0.0).clamp_min(0.0), bounds.unsqueeze(1))
                losses = losses if mask is None else torch.where(mask, losses, 0.0)
                totals[:, i] += losses.sum(dim=1, dtype=torch.float64)
        self.values.copy_(kept)
        return totals if active is None else totals[active]

    def advance(self, lengths: Tensor) -> None:
        self.values.addcmul_(self.direction, lengths.unsqueeze(1), value=-1.0)
