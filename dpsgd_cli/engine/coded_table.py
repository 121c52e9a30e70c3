"""Tables of examples that are kept as codes: features are made of the rows that are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.coded_rows import CodedRows
from dpsgd_cli.engine.tensors import Examples, Table


@dataclass(frozen=True)
class CodedTable(Table):
    """A table, on the CPU, that makes its rows from `coded`; its own x is empty and carries only the dtype.

    Guarantee: a step gets the same rows as from a table of features.
    """

    coded: CodedRows = field(kw_only=True)

    @classmethod
    def open(cls, coded: CodedRows, y: np.ndarray, dtype: torch.dtype) -> CodedTable:
        """Return the table of `coded` rows (N, D) and labels (N,)."""
        empty = Table.load(np.empty((0, coded.shape[1]), np.float32), y, False, torch.device("cpu"), dtype)
        return cls(empty.x, empty.y, False, coded=coded)

    def every(self, start: int, stop: int) -> Examples:
        return self._made(slice(start, stop))[None], self.y[None, start:stop], None

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        rows, mask = self._own(rows, mask)
        return self._made(rows.numpy()), self.y[rows], mask

    def _made(self, places: slice | np.ndarray) -> Tensor:
        return torch.from_numpy(self.coded[places]).to(self.x.dtype)
