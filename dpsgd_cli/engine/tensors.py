"""Tables of examples on the training device, and batches of row numbers that select inputs and labels from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.errors import RunError

Examples = tuple[Tensor, Tensor, Tensor | None]
"""Inputs (R or 1, B, ...), labels (R or 1, B, ...), and a mask (R, B) or None; a 1 is for rows that all trials share.

For users (`users/run.py`): m B inputs, and labels (R or 1, B, m).
"""


@dataclass(frozen=True)
class Batch:
    """Row numbers of one step: `rows` is int64 (R, B); `mask` is bool (R, B), False for padding.

    If `rows` is None, the batch is every record for all trials, or those of `span` (first, one past the last). If
    `mask` is None, there is no padding.
    """

    rows: np.ndarray | torch.Tensor | None
    mask: np.ndarray | torch.Tensor | None = None
    span: tuple[int, int] | None = None


def to_device(here: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the host tensor `here` on `device`; a copy to a GPU is asynchronous."""
    # torch does not reuse pinned memory before the copy from it is finished
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def to_host(there: Tensor) -> Tensor:
    """Return a copy of a tensor on the host: what is kept of training between epochs takes no memory of a GPU.

    From a GPU it goes to pinned memory, which torch keeps for the next copies. The copy is whole when this returns.
    """
    if not there.is_cuda:
        return there.detach().to("cpu", copy=True)
    here = torch.empty(there.shape, dtype=there.dtype).pin_memory().copy_(there.detach(), non_blocking=True)
    torch.cuda.synchronize(there.device)
    return here


@dataclass(frozen=True)
class Table:
    """Examples of all trials: inputs (N, ...), or (R, N, ...) if `per_trial`, and labels (N,) or (N, ...).

    Inputs are floats, or int64 where they are tokens: these are never rounded.

    A table has a public number of places, at least its number of rows. Samplers draw from places and count places, as
    if all of them were filled; a place without a row adds nothing. `places` is that number if it is not N. With folds,
    `held_out` (N, R) marks the rows that a trial does not train on. `own` (R, M) then lists the rows that it trains on,
    with the same number M of places for every trial, -1 for an empty place. Each trial multiplies the rows by `factors`
    (R, N).
    """

    x: Tensor
    y: Tensor
    per_trial: bool
    held_out: Tensor | None = None
    own: Tensor | None = None
    places: int | None = None
    filled: bool = True
    factors: Tensor | None = None

    @classmethod
    def load(cls, x: np.ndarray, y: np.ndarray, per_trial: bool, device: torch.device, dtype: torch.dtype) -> Table:
        """Return a table on `device` with inputs of `dtype`, or int64."""
        labels = torch.from_numpy(np.ascontiguousarray(y)).to(device)
        labels = labels.to(dtype) if labels.is_floating_point() else labels
        rows = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        return cls(rows if x.dtype == np.int64 else rows.to(dtype), labels, per_trial)

    def with_folds(self, held_out: Tensor, records: int | None = None) -> Table:
        """Return the table with folds: trial r trains on the rows where `held_out` (N, R) is False.

        Each trial has `records` places; by default, as many as the largest trial has rows. Raises RunError if a trial
        has more rows than places.
        """
        held_out = held_out.to(self.y.device)
        listed = [(~column).nonzero().squeeze(1) for column in held_out.T]
        most = max(len(rows) for rows in listed)
        records = most if records is None else records
        if most > records:
            raise RunError(
                f"a trial has {most} training rows, more than the {records} places that were planned, which happens"
                " once in a billion by chance; give another seed"
            )
        own = torch.stack([F.pad(rows, (0, records - len(rows)), value=-1) for rows in listed])
        return replace(self, held_out=held_out, own=own, filled=all(len(rows) == records for rows in listed))

    def with_places(self, places: int) -> Table:
        """Return the table with a public number of `places`; raise ValueError if it has more rows than that."""
        if places < self.rows:
            raise ValueError(f"{places} places cannot hold {self.rows} rows")
        return replace(self, places=None if places == self.rows else places, filled=places == self.rows)

    def __len__(self) -> int:
        """Return the number of places for the records that a trial trains on; public."""
        if self.own is not None:
            return self.own.shape[1]
        return self.rows if self.places is None else self.places

    @property
    def counts(self) -> Tensor:
        """Number of rows of each trial (R,), or (1,) if all have the same; float64. Public for test parts."""
        if self.held_out is None:
            return torch.full((1,), float(self.rows), dtype=torch.float64, device=self.y.device)
        return (~self.held_out).sum(dim=0, dtype=torch.float64)

    @property
    def rows(self) -> int:
        """Number of rows, including held-out ones. Private if there are more places than rows."""
        return self.y.shape[0]

    @property
    def summed(self) -> int:
        """Public bound on the number of rows in a sum: the places, or with folds all rows of the files.

        Grids of noise are made for this number, because `rows` is private if a fraction was held out.
        """
        return len(self) if self.own is None else self.rows

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input."""
        return tuple(self.x.shape[1 + self.per_trial :])

    def every(self, start: int, stop: int) -> Examples:
        """Return rows start..stop-1: inputs (R or 1, B, ...), labels (1, B), and with folds a mask (R, B)."""
        x = self.x[:, start:stop] if self.per_trial else self.x[None, start:stop]
        mask = None if self.held_out is None else ~self.held_out[start:stop].T
        if self.factors is not None:
            x = x * _beside(self.factors[:, start:stop], x)
        return x, self.y[None, start:stop], mask

    def chunks(self, batch: Batch, most: int) -> Iterator[Examples]:
        """Yield the batch in pieces of at most `most` rows per trial."""
        if batch.rows is None:
            first, last = batch.span or (0, self.rows)
            for start in range(first, last, most):
                yield self.every(start, min(start + most, last))
            return
        for start in range(0, batch.rows.shape[1], most):
            mask = None if batch.mask is None else torch.as_tensor(batch.mask[:, start : start + most])
            yield self._gather(torch.as_tensor(batch.rows[:, start : start + most]), mask)

    def _own(self, rows: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the table's row number for each place in `rows`, and the mask without empty places, on its device."""
        rows, mask = rows.to(self.y.device), None if mask is None else mask.to(self.y.device)
        if self.own is not None:
            rows = self.own.gather(1, rows)
        if self.filled:
            return rows, mask
        there = (rows >= 0) & (rows < self.rows)
        return torch.where(there, rows, 0), there if mask is None else mask & there

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        rows, mask = self._own(rows, mask)
        flat = rows.reshape(-1)
        y = self.y.index_select(0, flat).view(*rows.shape, *self.y.shape[1:])
        x = self.x
        if self.per_trial:
            offsets = torch.arange(x.shape[0], device=rows.device).unsqueeze(1) * self.rows
            x, flat = x.flatten(0, 1), (rows + offsets).reshape(-1)
        x = x.index_select(0, flat).view(*rows.shape, *self.input_shape)
        return x if self.factors is None else x * _beside(self.factors.gather(1, rows), x), y, mask


def _beside(numbers: Tensor, rows: Tensor) -> Tensor:
    """Reshape one number per row, (R, B), so that it broadcasts over rows (R or 1, B, ...)."""
    return numbers.view(*numbers.shape, *[1] * (rows.dim() - 2))
