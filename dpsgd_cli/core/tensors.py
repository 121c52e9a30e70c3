"""Data on the training device, and how a batch of row numbers becomes inputs and labels.

Not here: reading or preprocessing (`data/`), which rows a step sees (`sampling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.core.sampling import Batch

Rows = tuple[Tensor, Tensor, Tensor | None]


def sent(here: Tensor, device: torch.device) -> Tensor:
    """The host's `here` on `device`; where that is a GPU, the host goes on while it travels."""
    # torch does not use pinned memory again before the copy from it is over
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


@dataclass(frozen=True)
class Table:
    """Inputs (N, ...) shared by all trials, or (R, N, ...) when `per_trial`; labels (N,).

    With folds, `held_out` (N, R) marks the rows that a trial does not train on, and `own` (R, M) lists those it does:
    M for every trial. All work on batches then sees each trial's own M records.
    """

    x: Tensor
    y: Tensor
    per_trial: bool
    held_out: Tensor | None = None
    own: Tensor | None = None

    @classmethod
    def load(cls, x: np.ndarray, y: np.ndarray, per_trial: bool, device: torch.device, dtype: torch.dtype) -> Table:
        labels = torch.from_numpy(np.ascontiguousarray(y)).to(device)
        labels = labels.to(dtype) if labels.is_floating_point() else labels
        return cls(torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype), labels, per_trial)

    def with_folds(self, held_out: Tensor) -> Table:
        """The same rows, of which trial r trains on those where `held_out` (N, R) is False; as many in every trial."""
        held_out = held_out.to(self.y.device)
        own = torch.stack([(~column).nonzero().squeeze(1) for column in held_out.T])
        return replace(self, held_out=held_out, own=own)

    def __len__(self) -> int:
        """Records that a trial trains on; public."""
        return self.rows if self.own is None else self.own.shape[1]

    @property
    def rows(self) -> int:
        """Rows of the matrix, held-out ones included."""
        return self.y.shape[0]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""
        return tuple(self.x.shape[2:] if self.per_trial else self.x.shape[1:])

    def every(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1 for all trials: inputs (R or 1, B, ...), labels (1, B), a mask (R, B) with folds."""
        x = self.x[:, start:stop] if self.per_trial else self.x[None, start:stop]
        mask = None if self.held_out is None else ~self.held_out[start:stop].T
        return x, self.y[None, start:stop], mask

    def chunks(self, batch: Batch, most: int) -> Iterator[Rows]:
        """The batch in pieces of at most `most` rows a trial."""
        if batch.rows is None:
            first, last = batch.span or (0, self.rows)
            for start in range(first, last, most):
                yield self.every(start, min(start + most, last))
            return
        for start in range(0, batch.rows.shape[1], most):
            rows = torch.as_tensor(batch.rows[:, start : start + most], device=self.y.device)
            mask = None if batch.mask is None else batch.mask[:, start : start + most]
            yield *self._gather(rows), None if mask is None else torch.as_tensor(mask, device=self.y.device)

    def numbers(self, batch: Batch, start: int, stop: int) -> Tensor:
        """Row numbers (R or 1, B) of the piece start..stop-1 of a batch, on the training device."""
        if batch.rows is None:
            first = start + (batch.span or (0, 0))[0]
            return torch.arange(first, first + stop - start, device=self.y.device)[None]
        return torch.as_tensor(batch.rows[:, start:stop], device=self.y.device)

    def _gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.own is not None:
            rows = self.own.gather(1, rows)
        flat = rows.reshape(-1)
        y = self.y.index_select(0, flat).view(rows.shape)
        x = self.x
        if self.per_trial:
            offsets = torch.arange(x.shape[0], device=rows.device).unsqueeze(1) * self.rows
            x, flat = x.flatten(0, 1), (rows + offsets).reshape(-1)
        return x.index_select(0, flat).view(*rows.shape, *self.input_shape), y
