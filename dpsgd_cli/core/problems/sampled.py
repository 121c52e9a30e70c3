"""The empirical risk of a linear model on a Poisson sample of each trial's records, drawn anew when asked.

Each record of a trial is in its sample with the same probability, independently. Work is in proportion to the sample.
Not here: what sampling does to a price (the caller charges as if every record had been seen).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.problems.losses import MarginLoss
from dpsgd_cli.core.problems.risk import Risk
from dpsgd_cli.core.problems.rows import SignedRows
from dpsgd_cli.core.sampling import PoissonSampler
from dpsgd_cli.core.streams import Streams
from dpsgd_cli.core.summing import MOST_ROWS, PRECISION, add_product
from dpsgd_cli.core.tensors import Batch


class SampledRisk(Risk):
    """Sums over the latest sample of each trial; `own` (R, M) lists a trial's rows where there are folds,
    -1 where a place is left over (`tensors.Table`).

    A trial's n-th sample is a function of its streams and n.
    """

    def __init__(
        self, rows: SignedRows, loss: MarginLoss, streams: Sequence[Streams], own: Tensor | None, size: int
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.own = own
        self.records = len(rows) if own is None else own.shape[1]
        self.samplers = [PoissonSampler([stream], self.records, size) for stream in streams]
        self.drawn = [0] * len(streams)
        self.samples: list[Tensor] = [torch.empty(0, dtype=torch.long) for _ in streams]
        self.values = torch.empty(0)
        self.direction = torch.empty(0)

    def start(self, values: Tensor) -> None:
        self.values = values
        self.direction = torch.zeros_like(values)

    def sample(self, trials: Sequence[int]) -> None:
        """Draw a new sample for each of `trials`."""
        for trial in trials:
            batch: Batch = self.samplers[trial].batch(self.drawn[trial])
            assert batch.rows is not None
            index = torch.from_numpy(batch.rows[0]).to(self.rows.z.device)
            if self.own is not None:
                index = self.own[trial][index]
                index = index[index >= 0]
            self.samples[trial] = index
            self.drawn[trial] += 1

    def state(self) -> dict[str, list[int] | list[Tensor]]:
        """How many samples each trial has drawn, and its latest, which an iteration goes on with after a resume."""
        return {"drawn": list(self.drawn), "samples": list(self.samples)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self.drawn = list(state["drawn"])
        self.samples = [sample.to(self.rows.z.device) for sample in state["samples"]]

    def _active(self, active: Tensor | None) -> list[int]:
        return list(range(len(self.samples))) if active is None else active.tolist()

    def _margins(self, trial: int) -> tuple[Tensor, Tensor]:
        """The sample's rows and margins."""
        z = self.rows.z[self.samples[trial]]
        t = z @ self.values[trial]
        return z, t if self.rows.offset is None else t + self.rows.offset[self.samples[trial]]

    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        sums = []
        for trial in self._active(active):
            z, t = self._margins(trial)
            most = norms[trial] / self.rows.norms[self.samples[trial]]
            slopes = torch.maximum(torch.minimum(self.loss.slope(t), most), -most).nan_to_num(nan=0.0)
            total = z.new_zeros(1, z.shape[1], dtype=PRECISION)
            for slope, rows in zip(slopes.split(MOST_ROWS), z.split(MOST_ROWS), strict=True):
                add_product(total, slope.unsqueeze(1), rows)
            sums.append(total)
        return torch.cat(sums)

    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        if active is None:
            self.direction.copy_(direction)
        else:
            self.direction[active] = direction

    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        totals = []
        for trial in self._active(active):
            z, t = self._margins(trial)
            lengths = spacing[trial] * torch.arange(count, device=t.device, dtype=t.dtype)
            candidates = t.unsqueeze(1) - (z @ self.direction[trial]).unsqueeze(1) * lengths
            losses = self.loss.value(candidates).nan_to_num(nan=0.0).clamp(max=float(bounds[trial]))
            totals.append(losses.sum(dim=0, dtype=torch.float64))
        return torch.stack(totals)

    def advance(self, lengths: Tensor) -> None:
        self.values.sub_(self.direction * lengths.unsqueeze(1))
