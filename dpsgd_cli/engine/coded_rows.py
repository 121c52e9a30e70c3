"""Rows whose features are functions of single columns, kept as one code for each column instead of as features.

A column has G public values, so its d features are a row of a public table (G, d). A row of F columns then takes F
codes of 4 bytes, where its features would take 4 bytes each: for a million rows of 20 columns 80 MB instead of 4 GB.
Features are made for the rows that are asked for, to the bit those of the step `bin` (`data/bins.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class CodedColumn:
    """One column: the indices (d,) of its features in a row, and the features (G, d), float32, of each code.

    `codes` maps rows as read, (N, C), to the column's codes, (N,), each in 0..G-1.
    """

    features: np.ndarray
    values: np.ndarray
    codes: Callable[[np.ndarray], np.ndarray]


class CodedRows:
    """Rows (N, D), float32: `constant` (D,), in which each of `columns` fills its own features by the row's code."""

    def __init__(self, columns: Iterable[CodedColumn], constant: np.ndarray, codes: np.ndarray) -> None:
        """Take codes (F, N), int32, of F columns."""
        self.columns, self.constant, self.codes = tuple(columns), constant, codes

    @classmethod
    def of(cls, columns: Iterable[CodedColumn], constant: np.ndarray, x: np.ndarray) -> CodedRows:
        """Return the coded rows of rows as read, (N, C)."""
        columns = tuple(columns)
        codes = np.empty((len(columns), len(x)), np.int32)
        for start in range(0, len(x), _ROWS_AT_ONCE):
            block = slice(start, start + _ROWS_AT_ONCE)
            for own, column in zip(codes, columns, strict=True):
                own[block] = column.codes(x[block])
        return cls(columns, constant, codes)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), len(self.constant)

    def __len__(self) -> int:
        return self.codes.shape[1]

    def __getitem__(self, places: Any) -> np.ndarray:
        """Return the features of rows, (.., D), for a slice or an array of row numbers."""
        codes = self.codes[:, places]
        rows = np.empty((*codes.shape[1:], len(self.constant)), np.float32)
        rows[...] = self.constant
        for own, column in zip(codes, self.columns, strict=True):
            first, width = int(column.features[0]), len(column.features)
            rows[..., first : first + width] = column.values[own]
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)
