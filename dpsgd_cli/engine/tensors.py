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


_PIECE = 1 << 22


def narrowed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return `x` in the fewest bytes that lose nothing, and the values that its bytes stand for, if they stand for any.

    Tokens (int64) become the smallest kind that holds them all. Floats that are at most 256 evenly spaced values, as
    pixels scaled from bytes, become bytes: places in the array of values. All others stay as they are.

    >>> narrowed(np.array([0.5, 0.0, 1.0]))[0].tolist(), narrowed(np.array([70_000]))[0].dtype
    ([128, 0, 255], dtype('int32'))
    """
    if x.dtype == np.uint8:
        return x, np.arange(256, dtype=np.float32)
    if not x.size or (x.dtype != np.int64 and x.dtype.kind != "f"):
        return x, None
    low, high = x.min(), x.max()
    if x.dtype == np.int64:
        kinds = (np.iinfo(kind) for kind in (np.uint8, np.int16, np.int32, np.int64))
        return x.astype(next(kind.dtype for kind in kinds if kind.min <= low and high <= kind.max)), None
    if not low < high < np.inf or low == -np.inf:
        return x, None
    flat = x.reshape(-1)
    codes, values = np.empty(len(flat), np.uint8), np.full(256, np.nan, x.dtype)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        found = np.rint((piece - low) * (255 / (high - low))).astype(np.uint8)
        fresh = np.isnan(values[found])
        values[found[fresh]] = piece[fresh]
        if not np.array_equal(values[found], piece):
            return x, None
        codes[start : start + _PIECE] = found
    return codes.reshape(x.shape), np.nan_to_num(values)


def to_host(there: Tensor) -> Tensor:
    """Return a copy of a tensor on the host: what is kept of training between epochs takes no memory of a GPU."""
    return there.detach().to("cpu", copy=True)


@dataclass(frozen=True)
class Table:
    """Examples of all trials: inputs (N, ...), or (R, N, ...) if `per_trial`, and labels (N,) or (N, ...).

    Inputs are floats, or int64 where they are tokens: these are never rounded. `stored` may hold them in fewer bytes
    (`narrowed`): tokens as smaller integers, and numbers of which there are at most 256 as their places in `palette`.

    A table has a public number of places, at least its number of rows. Samplers draw from places and count places, as
    if all of them were filled; a place without a row adds nothing. `places` is that number if it is not N. With folds,
    `held_out` (N, R) marks the rows that a trial does not train on. `own` (R, M) then lists the rows that it trains on,
    with the same number M of places for every trial, -1 for an empty place. Each trial multiplies the rows by `factors`
    (R, N).
    """

    stored: Tensor
    y: Tensor
    per_trial: bool
    held_out: Tensor | None = None
    own: Tensor | None = None
    places: int | None = None
    filled: bool = True
    factors: Tensor | None = None
    palette: Tensor | None = None

    @classmethod
    def load(
        cls, x: np.ndarray, y: np.ndarray, per_trial: bool, device: torch.device, dtype: torch.dtype,
        small: bool = False,
    ) -> Table:  # fmt: skip
        """Return a table on `device` with inputs of `dtype`, or int64; `small`: stored in as few bytes as possible."""
        labels = torch.from_numpy(np.ascontiguousarray(y)).to(device)
        labels = labels.to(dtype) if labels.is_floating_point() else labels
        kept, values = narrowed(x) if small else (x, None)
        rows = torch.from_numpy(np.ascontiguousarray(kept)).to(device)
        if values is not None:
            return cls(rows, labels, per_trial, palette=torch.from_numpy(values).to(device).to(dtype))
        return cls(rows if x.dtype == np.int64 else rows.to(dtype), labels, per_trial)

    @property
    def x(self) -> Tensor:
        """All inputs, as floats or int64; if they are stored smaller, a copy, which is made anew each time."""
        return self._read(self.stored)

    @property
    def like(self) -> Tensor:
        """An empty tensor on the device and of the dtype of inputs."""
        return self._read(self.stored.new_empty(0))

    def _read(self, stored: Tensor) -> Tensor:
        """Return the inputs that stored numbers stand for, in the same shape."""
        if self.palette is not None:
            return self.palette.index_select(0, stored.flatten().int()).view(stored.shape)
        return stored if stored.is_floating_point() else stored.to(torch.int64)

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
        return tuple(self.stored.shape[1 + self.per_trial :])

    def every(self, start: int, stop: int) -> Examples:
        """Return rows start..stop-1: inputs (R or 1, B, ...), labels (1, B), and with folds a mask (R, B)."""
        x = self._read(self.stored[:, start:stop] if self.per_trial else self.stored[None, start:stop])
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
        x = self.stored
        if self.per_trial:
            offsets = torch.arange(x.shape[0], device=rows.device).unsqueeze(1) * self.rows
            x, flat = x.flatten(0, 1), (rows + offsets).reshape(-1)
        x = self._read(x.index_select(0, flat)).view(*rows.shape, *self.input_shape)
        return x if self.factors is None else x * _beside(self.factors.gather(1, rows), x), y, mask


def _beside(numbers: Tensor, rows: Tensor) -> Tensor:
    """Reshape one number per row, (R, B), so that it broadcasts over rows (R or 1, B, ...)."""
    return numbers.view(*numbers.shape, *[1] * (rows.dim() - 2))
