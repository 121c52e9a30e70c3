"""Tables of examples that stay on disk: a thread reads them one batch ahead of the step that uses them.

The rows are read by `data/on_disk.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.batching.run import Sampler, WrappedSampler
from dpsgd_cli.engine.tensors import Batch, Examples, Table, to_device


class StoredRows(Protocol):
    """Examples on disk, (N, ...), or (R, N, ...) if each trial has its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, ...) or (R, N, ...)."""

    def __len__(self) -> int:
        """Return the number of examples N."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the examples (.., B, ...) at `places` (.., B)."""

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the examples of a slice, in order."""


@dataclass(frozen=True)
class StreamedTable(Table):
    """A table that reads its rows by `features` and `labels`; its own x and y are empty and carry only the dtypes.

    Guarantee: a step gets the same rows as from a table in memory.
    """

    features: StoredRows = field(kw_only=True)
    labels: StoredRows = field(kw_only=True)

    @classmethod
    def open(
        cls, features: StoredRows, labels: StoredRows, per_trial: bool, device: torch.device, dtype: torch.dtype
    ) -> StreamedTable:
        """Return the table of `features` (N, ...), or (R, N, ...) if `per_trial`, and `labels` (N,), on `device`."""
        rows = 1 if per_trial else 0
        shape = (*features.shape[:rows], 0, *features.shape[rows + 1 :])
        y = torch.from_numpy(labels[0:0])
        y = y.to(device, dtype) if y.is_floating_point() else y.to(device)
        whole = getattr(features, "dtype", None) == np.int64
        x = torch.empty(shape, device=device, dtype=torch.int64 if whole else dtype)
        return cls(x, y, per_trial, features=features, labels=labels)

    @property
    def rows(self) -> int:
        return len(self.labels)

    def every(self, start: int, stop: int) -> Examples:
        return self._sent(self._span(start, stop), None)

    def chunks(self, batch: Batch, most: int) -> Iterator[Examples]:
        if batch.rows is None:
            first, last = batch.span or (0, self.rows)
            spans = [(start, min(start + most, last)) for start in range(first, last, most)]
            for read in _one_ahead([lambda start=a, stop=b: self._span(start, stop) for a, b in spans]):  # type: ignore[misc]
                yield self._sent(read, None)
            return
        x, y = batch.read if isinstance(batch, ReadBatch) else self.read(np.asarray(batch.rows))
        mask = self._without_empty_places(batch)
        for start in range(0, y.shape[1], most):
            part = slice(start, start + most)
            yield self._sent((x[:, part], y[:, part]), None if mask is None else mask[:, part])

    def _without_empty_places(self, batch: Batch) -> np.ndarray | Tensor | None:
        """Return the batch's mask, which is also False at empty places."""
        if self.filled:
            return batch.mask
        there = np.asarray(batch.rows) < self.rows
        return there if batch.mask is None else there & np.asarray(batch.mask)

    def read(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read features (R, B, ...) and labels (R, B) at `places` (R, B) to the host; pinned if they go to a GPU.

        An empty place gets the last row, which a mask leaves out.
        """
        rows = np.minimum(places, self.rows - 1)
        return self._hosted(self.features.at(rows), self.labels.at(rows))

    def _span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x = self.features[start:stop]
        return self._hosted(x if self.per_trial else x[None], self.labels[start:stop][None])

    def _hosted(self, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
        pair = torch.from_numpy(np.ascontiguousarray(x)).to(self.x.dtype), torch.from_numpy(y).to(self.y.dtype)
        return (pair[0].pin_memory(), pair[1].pin_memory()) if self.y.is_cuda else pair

    def _sent(self, read: tuple[Tensor, Tensor], mask: np.ndarray | Tensor | None) -> Examples:
        device = self.y.device
        x, y = (own.to(device, non_blocking=True) for own in read)
        return x, y, None if mask is None else to_device(torch.as_tensor(mask), device)


@dataclass(frozen=True)
class ReadBatch(Batch):
    """A batch whose rows have been read."""

    read: tuple[Tensor, Tensor] = field(kw_only=True)


class ReadAhead(WrappedSampler):
    """The batches of `whole`; a thread draws and reads the next one while a step is computed.

    If a step is requested that is not the next one, reading restarts there.
    """

    def __init__(self, whole: Sampler, table: StreamedTable) -> None:
        super().__init__(whole)
        self._table = table
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        if self._next is None or self._next[0] != step:
            self._next = (step, self._thread.submit(self._read, step))
        drawn = self._next[1].result()
        self._next = (step + 1, self._thread.submit(self._read, step + 1))
        return drawn

    def _read(self, step: int) -> Batch:
        batch = self._whole.batch(step)
        if batch.rows is None:
            return batch
        return ReadBatch(batch.rows, batch.mask, read=self._table.read(np.asarray(batch.rows)))


def _one_ahead(jobs: list[Callable[[], tuple[Tensor, Tensor]]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the result of each job, in order, while another thread runs the next one."""
    if not jobs:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        coming = thread.submit(jobs[0])
        for job in jobs[1:]:
            read, coming = coming.result(), thread.submit(job)
            yield read
        yield coming.result()
