"""Rows whose features are functions of single columns, kept as one code for each column instead of as features.

A column has G public values, so its d features are a row of a public table (G, d). A row then takes 2 bytes for each
column, where each feature would take 4: for a million rows of 20 columns 35 MB instead of 4 GB. Columns with few values
are joined into one (`joined`), so that a row has fewer codes. Codes are in memory, or in a file (`data/on_disk.py`).
Features are made for the rows that are asked for, to the bit those of the step `bin` (`data/bins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

_ROWS_AT_ONCE = 1 << 16
MOST_JOINED = 4096
"""Most codes of a column that is joined from several: a table that stays in the cache of a processor."""


class Codes(Protocol):
    """Codes (N, F) of N rows and F columns, unsigned: an array, or rows on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, F)."""

    def __getitem__(self, places: Any) -> np.ndarray:
        """Return the codes (n, F) of a slice."""


@dataclass(frozen=True)
class CodedColumn:
    """One column: the indices (d,) of its features in a row, and the features (G, d), float32, of each code.

    `codes` maps rows as read, (N, C), to the column's codes, (N,), each in 0..G-1.
    """

    features: np.ndarray
    values: np.ndarray
    codes: Callable[[np.ndarray], np.ndarray]

    def beside(self, other: CodedColumn) -> CodedColumn:
        """Return this column and another as one, whose code is their pair of codes."""
        first, second = len(self.values), len(other.values)
        values = np.hstack([np.repeat(self.values, second, axis=0), np.tile(other.values, (first, 1))])
        return CodedColumn(
            np.concatenate([self.features, other.features]),
            values,
            lambda x: self.codes(x).astype(np.int64) * second + other.codes(x),
        )


def joined(columns: Iterable[CodedColumn]) -> Iterator[CodedColumn]:
    """Yield the columns, those of few values joined as long as a joined one has at most `MOST_JOINED` codes."""
    held: CodedColumn | None = None
    for column in sorted(columns, key=lambda one: len(one.values)):
        if held is not None and len(held.values) * len(column.values) <= MOST_JOINED:
            held = held.beside(column)
            continue
        if held is not None:
            yield held
        held = column
    if held is not None:
        yield held


class CodedRows:
    """Rows (N, D), float32: `constant` (D,), in which each of `columns` fills its own features by the row's code."""

    def __init__(self, columns: Iterable[CodedColumn], constant: np.ndarray, codes: Codes) -> None:
        """Take codes (N, F) of F columns."""
        self.columns, self.constant, self.codes = tuple(columns), constant, codes

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.constant)

    @property
    def in_memory(self) -> bool:
        return isinstance(self.codes, np.ndarray)

    def __len__(self) -> int:
        return self.codes.shape[0]

    def by_column(self, start: int, stop: int) -> np.ndarray:
        """Return the codes of rows start..stop-1 by column, int32 (F, n)."""
        return np.ascontiguousarray(self.codes[start:stop].T, np.int32)

    def __getitem__(self, places: Any) -> np.ndarray:
        """Return the features of rows, (.., D), for a slice or an array of row numbers."""
        if isinstance(places, slice) or self.in_memory:
            codes = self.codes[places]
        else:
            codes = self.codes.at(places)  # type: ignore[attr-defined]
        rows = np.empty((*codes.shape[:-1], len(self.constant)), np.float32)
        rows[...] = self.constant
        for number, column in enumerate(self.columns):
            rows[..., column.features] = column.values[codes[..., number]]
        return rows

    at = __getitem__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True)
class Coder:
    """The function from rows as read, (N, C), to their codes and to coded rows."""

    columns: tuple[CodedColumn, ...]
    constant: np.ndarray

    def __call__(self, x: np.ndarray) -> CodedRows:
        """Return coded rows in memory."""
        codes = np.empty((len(x), len(self.columns)), self.dtype, order="F")
        for start in range(0, len(x), _ROWS_AT_ONCE):
            codes[start : start + _ROWS_AT_ONCE] = self.codes(x[start : start + _ROWS_AT_ONCE])
        return self.of(codes)

    def of(self, codes: Codes) -> CodedRows:
        """Return the coded rows that have `codes`."""
        return CodedRows(self.columns, self.constant, codes)

    @property
    def dtype(self) -> np.dtype:
        most = max((len(column.values) for column in self.columns), default=1)
        return np.dtype(np.uint16 if most <= 1 << 16 else np.uint32)

    def codes(self, x: np.ndarray) -> np.ndarray:
        """Return the codes (N, F) of rows."""
        found = np.empty((len(x), len(self.columns)), self.dtype, order="F")
        for number, column in enumerate(self.columns):
            found[:, number] = column.codes(x)
        return found
