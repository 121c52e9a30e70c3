"""Tables of examples that are kept as codes: features are made of the rows that are asked for.

A linear model of such rows needs no features. With weights V, a row's output is a sum of one number for each column,
(M_c V_c)[code], where M_c (G_c, d) holds the features of column c for each of its codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.coded_rows import CodedRows
from dpsgd_cli.engine.precision import PRECISION
from dpsgd_cli.engine.tensors import Examples, Table

PIECE = 8192
"""Rows whose sums are made together."""


@dataclass(frozen=True)
class CodedTable(Table):
    """A table, on the CPU, that makes its rows from `coded`; its own x and y are empty and carry only the dtypes.

    `labels` (N,) are in memory. Guarantee: a step gets the same rows as from a table of features.
    """

    coded: CodedRows = field(kw_only=True)
    labels: np.ndarray = field(kw_only=True)

    @classmethod
    def open(cls, coded: CodedRows, y: Any, dtype: torch.dtype) -> CodedTable:
        """Return the table of `coded` rows (N, D) and labels (N,), an array or rows on disk."""
        empty = Table.load(np.empty((0, coded.shape[1]), np.float32), y[0:0], False, torch.device("cpu"), dtype)
        return cls(empty.x, empty.y, False, coded=coded, labels=np.asarray(y[:]))

    @property
    def rows(self) -> int:
        return len(self.coded)

    def every(self, start: int, stop: int) -> Examples:
        return self._made(slice(start, stop))[None], self.labels_of(start, stop), None

    def labels_of(self, start: int, stop: int) -> Tensor:
        """Return the labels (1, n) of rows start..stop-1."""
        return self._told(self.labels[start:stop])[None]

    def codes(self, start: int, stop: int) -> Tensor:
        """Return the codes of rows start..stop-1 by column, int32 (F, n)."""
        return torch.from_numpy(self.coded.by_column(start, stop))

    def outputs(self, weight: Tensor, bias: Tensor | None) -> Iterator[Examples]:
        """Yield the outputs (R, n, K) of linear models with `weight` (R, K, D) and `bias` (R, K) with the labels."""
        constant = torch.from_numpy(self.coded.constant).to(PRECISION)
        always = weight.to(PRECISION) @ constant
        always = always if bias is None else always + bias.to(PRECISION)
        values = [torch.from_numpy(column.values).to(PRECISION) for column in self.coded.columns]
        found = LookUp(by_code(weight, features_of(self.coded), values))
        for start in range(0, self.rows, PIECE):
            stop = min(start + PIECE, self.rows)
            sums = found.sums(self.codes(start, stop)).view(*always.shape, -1) + always.unsqueeze(2)
            yield sums.mT.to(weight.dtype), self.labels_of(start, stop), None

    def _told(self, labels: np.ndarray) -> Tensor:
        return torch.from_numpy(labels).to(self.y.dtype)

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        rows, mask = self._own(rows, mask)
        places = rows.numpy()
        return self._made(places), self._told(self.labels[places]), mask

    def _made(self, places: slice | np.ndarray) -> Tensor:
        return torch.from_numpy(self.coded[places]).to(self.x.dtype)


def features_of(coded: CodedRows) -> list[Tensor]:
    """Return the indices of the features of each column."""
    return [torch.from_numpy(column.features) for column in coded.columns]


def by_code(weight: Tensor, features: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return what each code of each column adds to the outputs, (R K, G_c), float64.

    Args: `weight` (R, K, D); `values` (G_c, d) or (R, G_c, d) of each column, for its `features` (d,).
    """
    exact = weight.to(PRECISION)
    return [(exact[..., at] @ own.mT).flatten(0, 1) for own, at in zip(values, features, strict=True)]


class LookUp:
    """Sums over columns of numbers of each column's code: `tables` (A, G_c), float64, for each column c."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self.sizes = [table.shape[1] for table in tables]
        self.lanes = [lane.split(self.sizes) for lane in lanes(torch.cat(list(tables), dim=1))]

    def sums(self, codes: Tensor) -> Tensor:
        """Return the sums (A, n) for codes (F, n)."""
        return numbers([self._sum(lane, codes) for lane in self.lanes])

    def _sum(self, lane: Sequence[Tensor], codes: Tensor) -> Tensor:
        first, *rest = (own.index_select(0, at) for own, at in zip(lane, codes, strict=True))
        for own in rest:
            first += own
        return first


def lanes(rows: Tensor) -> list[Tensor]:
    """Return `rows` (A, n) two at a time as one complex row, so that one look-up serves both."""
    pairs = [torch.complex(one, other) for one, other in zip(rows[0::2], rows[1::2], strict=False)]
    return pairs + [rows[-1].clone()] * (len(rows) % 2)


def numbers(held: Sequence[Tensor]) -> Tensor:
    """Return the rows (A, n) of `lanes`."""
    rows = [part for lane in held for part in ((lane.real, lane.imag) if lane.is_complex() else (lane,))]
    return torch.stack(rows)
