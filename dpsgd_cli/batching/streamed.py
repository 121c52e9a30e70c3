"""Tables of examples that stay on disk: each piece of a batch is read when a step asks for it.

The rows are read by `data/on_disk.py`. The system keeps what was read in memory while there is room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.coded_rows import RowsByNumber
from dpsgd_cli.engine.tensors import Examples, Table, to_device


class StoredRows(RowsByNumber, Protocol):
    """Examples on disk, (N, ...), which all trials share."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the examples (.., B, ...) at `places` (.., B)."""


@dataclass(frozen=True)
class StreamedTable(Table):
    """A table that reads its rows by `features` and `labels`; its own x and y are empty and carry only the dtypes.

    Guarantee: a step gets the same rows as from a table in memory.
    """

    features: StoredRows = field(kw_only=True)
    labels: StoredRows = field(kw_only=True)

    @classmethod
    def open(cls, features: StoredRows, labels: StoredRows, device: torch.device, dtype: torch.dtype) -> StreamedTable:
        """Return the table of `features` (N, ...) and `labels` (N,), on `device`."""
        y = torch.from_numpy(labels[0:0])
        y = y.to(device, dtype) if y.is_floating_point() else y.to(device)
        whole = getattr(features, "dtype", None) == np.int64
        x = torch.empty((0, *features.shape[1:]), device=device, dtype=torch.int64 if whole else dtype)
        return cls(x, y, False, features=features, labels=labels)

    @property
    def rows(self) -> int:
        return len(self.labels)

    def every(self, start: int, stop: int) -> Examples:
        return *self._sent(self.features[start:stop][None], self.labels[start:stop][None]), None

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        # an empty place gets the last row, which the mask leaves out
        places = np.minimum(rows.numpy(), self.rows - 1)
        return *self._sent(self.features.at(places), self.labels.at(places)), self._own(rows, mask)[1]

    def _sent(self, x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return features (R or 1, B, ...) and labels (R or 1, B), read to the host, on the device of the training."""
        pair = torch.from_numpy(np.ascontiguousarray(x)).to(self.x.dtype), torch.from_numpy(y).to(self.y.dtype)
        return to_device(pair[0], self.y.device), to_device(pair[1], self.y.device)
