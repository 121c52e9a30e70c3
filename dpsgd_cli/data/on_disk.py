"""Rows that stay on disk: a memory map of a `.npy` file larger than memory, places of rows in it, and their transforms.

A process holds only the rows that are asked for. The system counts pages of the file that were read as memory of the
process, or of its control group, until it needs them for something else. Each row is transformed on its own, each time
it is read. A file must not be shortened while it is in use: the system ends a process that reads beyond its end.

`own_arrays.py` checks the content of a user's files; `batching/streamed.py` forms batches.
"""

from __future__ import annotations

import math
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import TypeAlias

import numpy as np

from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import shortened
from dpsgd_cli.data.settings import Cut
from dpsgd_cli.data.splits import Keys, digests_of, numbered
from dpsgd_cli.engine.coded_rows import CODED_AT_ONCE, CodedRows, Coder
from dpsgd_cli.errors import DataError

UNREADABLE = (
    *(ValueError, TypeError, OSError, EOFError, OverflowError, SyntaxError, MemoryError),
    *(struct.error, TokenError),
)
"""Errors that NumPy raises for a file whose header or size is not that of an array."""

Transform = Callable[[np.ndarray], np.ndarray]
"""A function of rows that acts on each row alone, once what it keeps is fixed."""

MOST_HELD = 1 << 26
"""Most bytes of codes of rows on disk that are in memory: of a million rows of 20 columns."""
_KEYS_AT_ONCE = 1 << 20


def flatten(rows: np.ndarray) -> np.ndarray:
    """Return rows (N, ...) as (N, D), also for N = 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def stored(path: Path) -> np.memmap:
    """Return the rows of a C-ordered `.npy` file, which stay there. Raises DataError for other files."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as a npy array: {shortened(str(error), 200)}") from None
    if not isinstance(array, np.memmap):
        raise DataError(f"{path} cannot be read as a npy array: it holds something else (an npz file?)")
    if array.ndim == 0 or array.size == 0 or not array.flags.c_contiguous:
        raise DataError(
            f"{path}: an array of shape {array.shape} in {'C' if array.flags.c_contiguous else 'Fortran'} order; it"
            " must hold at least one row, row after row (numpy.ascontiguousarray)"
        )
    return array


def scratch(rows: int, each: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """Return room for `rows` rows of shape `each`, zero until written, in a file that only its owner may read.

    The file has no name, so the system removes it when the process ends, however it ends.
    """
    folder = cache_folder() / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=(rows, *each))


class DiskRows:
    """Rows of a file, `held`: all, or those at `places`, ascending. `transforms` are applied when rows are read.

    Many threads may read at once.
    """

    def __init__(
        self, held: np.ndarray, places: np.ndarray | None = None, transforms: tuple[Transform, ...] = ()
    ) -> None:
        self.held = held
        self.places = places
        self.transforms = transforms

    @cached_property
    def _none(self) -> np.ndarray:
        """An empty array of transformed rows, which gives the shape and type of all rows."""
        return self._through(np.empty((0, *self.held.shape[1:]), self.held.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._none.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self._none.dtype

    def __len__(self) -> int:
        return len(self.held) if self.places is None else len(self.places)

    @np.errstate(**SILENT)
    def _through(self, rows: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            rows = transform(rows)
        return rows

    def then(self, transform: Transform) -> DiskRows:
        """Return these rows with one more transform."""
        return DiskRows(self.held, self.places, (*self.transforms, transform))

    def coded(self, coder: Coder) -> CodedRows:
        """Return these rows as codes, in a file of their own if there are more than `MOST_HELD` bytes of them."""
        if len(self) * len(coder.columns) * coder.dtype.itemsize <= MOST_HELD:
            return coder(self)
        found = scratch(len(self), (len(coder.columns),), coder.dtype)
        for start in range(0, len(self), CODED_AT_ONCE):
            found[start : start + CODED_AT_ONCE] = coder.codes(self[start : start + CODED_AT_ONCE])
        return coder.of(DiskRows(found))

    def only(self, chosen: np.ndarray) -> DiskRows:
        """Return the rows with numbers `chosen`, ascending, among these."""
        return DiskRows(self.held, chosen if self.places is None else self.places[chosen], self.transforms)

    def reshape(self, *shape: int) -> DiskRows:
        """Return these rows flattened to (N, D). Raises ValueError for any other shape."""
        if shape != (len(self), int(np.prod(self.shape[1:]))):
            raise ValueError(f"rows of shape {self.shape} stay on disk and are flattened, not reshaped to {shape}")
        return self.then(flatten)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return the rows of a slice, in order."""
        return self._through(np.array(self.held[rows if self.places is None else self.places[rows]]))

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows (.., B, ...) with `numbers` (.., B), each in 0..len-1."""
        flat = numbers.reshape(-1)
        rows = self._through(np.array(self.held[flat if self.places is None else self.places[flat]]))
        return rows.reshape(*numbers.shape, *rows.shape[1:])


Rows: TypeAlias = np.ndarray | DiskRows | CodedRows
"""Rows in memory, on disk, or as codes."""


def stored_keys(*arrays: DiskRows) -> Keys:
    """Return `splits.content_keys` of rows on disk, in a file: identical records are counted a range of hashes at once.

    Memory: that of `_KEYS_AT_ONCE` records, if few of them are identical, and one byte a record.
    """
    records = len(arrays[0])
    digests, found = scratch(records, (2,), np.dtype(np.uint64)), scratch(records, (), np.dtype(np.uint64))
    ranges = -(-records // _KEYS_AT_ONCE)
    whose = np.empty(records, np.min_scalar_type(ranges))
    for start in range(0, records, CODED_AT_ONCE):
        piece = slice(start, start + CODED_AT_ONCE)
        digests[piece] = own = digests_of([array[piece] for array in arrays])
        whose[piece] = (own[:, 0] >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)
    for number in range(ranges):
        here = whose == number
        found[here] = numbered(digests[here])
    return Keys(DiskRows(found), by_place=False)


@dataclass(frozen=True)
class DiskPart:
    """A `dataset.Part` on disk: features, labels as class indices or targets, and keys by content."""

    x: DiskRows
    y: DiskRows
    keys: Keys | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def units(self) -> int:
        """The number of records; rows of users are read into memory."""
        return len(self)

    def cut(self, cut: Cut) -> tuple[DiskPart, DiskPart]:
        """Return the rest, and the rows that `cut` holds out."""
        assert self.keys is not None, "these rows have no keys, so nothing can be cut from them"
        held = self.keys.held_out(cut)
        rest, chosen = (self._only(np.flatnonzero(own)) for own in (~held, held))
        return rest, chosen

    def _only(self, rows: np.ndarray) -> DiskPart:
        assert self.keys is not None
        return DiskPart(self.x.only(rows), self.y.only(rows), self.keys.only(rows))
