"""Rows that stay on disk: a `.npy` file larger than memory, a selection of its rows, and their transforms.

A process holds only the rows that are asked for. They are read by their position in the file, not through a memory map,
for three reasons. Pages of a map count as the process's memory until the system reclaims them. Their first access costs
more than a read. If the file has become shorter, access to a map ends the
process without a message. Each row is transformed on its own, each time it is read.

`own_arrays.py` checks the content of a user's files; `batching/streamed.py` forms batches.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import IO, TypeAlias

import numpy as np

from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import shortened
from dpsgd_cli.data.settings import Cut
from dpsgd_cli.data.splits import Keys, digests_of, numbered
from dpsgd_cli.engine.coded_rows import CodedRows, Coder
from dpsgd_cli.errors import DataError

UNREADABLE = (
    ValueError,
    TypeError,
    OSError,
    EOFError,
    OverflowError,
    SyntaxError,
    MemoryError,
    struct.error,
    TokenError,
)
"""Errors that NumPy raises for a file whose header or size is not that of an array."""

Transform = Callable[[np.ndarray], np.ndarray]
"""A function of rows that acts on each row alone, once what it keeps is fixed."""

_PAGE = 4096
_ROWS_AT_ONCE = 4096
_CODED_AT_ONCE = 1 << 16
_KEYS_AT_ONCE = 1 << 20


def flatten(rows: np.ndarray) -> np.ndarray:
    """Return rows (N, ...) as (N, D), also for N = 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


class Stored:
    """The rows of a C-ordered `.npy` file. Raises DataError for other files, whose rows cannot be found by number."""

    def __init__(self, path: Path) -> None:
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
        self.path = path
        self.header: int = array.offset
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype = array.dtype
        self._row_bytes = array[:1].nbytes
        self._file: IO[bytes] = path.open("rb")
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows with numbers `rows` (n,), in that order. Raises IndexError for numbers out of range."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of {self.path}, which has {len(self)}")
        taken = np.empty((len(rows), *self.shape[1:]), self.dtype)
        order = np.argsort(rows, kind="stable")
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            own = order[start : start + _ROWS_AT_ONCE]
            taken[own] = self._ascending(rows[own])
        return taken

    def _ascending(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows with ascending numbers; one read covers rows within a page of each other.

        The system is advised of all reads before the first one, so that it can fetch them in parallel.
        """
        size, file = self._row_bytes, self._file.fileno()
        apart = np.append(True, np.diff(rows) > max(1, _PAGE // size))
        begins = np.flatnonzero(apart)
        first, last = rows[begins], rows[np.append(begins[1:], len(rows)) - 1] + 1
        spans = list(zip((self.header + first * size).tolist(), ((last - first) * size).tolist(), strict=True))
        if hasattr(os, "posix_fadvise"):
            for place, length in spans:
                os.posix_fadvise(file, place, length, os.POSIX_FADV_WILLNEED)
        read = bytearray().join([os.pread(file, length, place) for place, length in spans])
        if len(read) < size * int((last - first).sum()):
            raise self._shorter()
        run, before = np.cumsum(apart) - 1, np.cumsum(last - first) - (last - first)
        return np.frombuffer(read, self.dtype).reshape(-1, *self.shape[1:])[before[run] + rows - first[run]]

    def span(self, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop-1, read in order."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if stop == start:
            return rows
        room, place = rows.data.cast("B"), self.header + start * self._row_bytes
        while len(room):
            count = os.preadv(self._file.fileno(), [room], place)
            if count == 0:
                raise self._shorter()
            room, place = room[count:], place + count
        return rows

    def _shorter(self) -> DataError:
        return DataError(f"{self.path} has become shorter while it was read; train again with the whole file")


class Scratch(Stored):
    """Rows that this process writes itself, to a file that only its owner may read.

    The file has no name from the start, so the system removes it when the process ends, however it ends.
    """

    def __init__(self, rows: int, each: tuple[int, ...], dtype: np.dtype) -> None:
        """Make room for `rows` rows of shape `each`, which are zero until they are written."""
        folder = cache_folder() / "tables"
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.header, self.shape, self.dtype = folder, 0, (rows, *each), np.dtype(dtype)
        self._row_bytes = math.prod(each) * self.dtype.itemsize
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by the finalizer
        self._file.truncate(rows * self._row_bytes)
        weakref.finalize(self, self._file.close)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Write `rows` as the rows from number `start` on."""
        room = np.ascontiguousarray(rows, self.dtype).data.cast("B")
        place = start * self._row_bytes
        while len(room):
            done = os.pwrite(self._file.fileno(), room, place)
            room, place = room[done:], place + done


@dataclass(frozen=True)
class Selection:
    """A selection of a file's rows, in ascending order.

    It has all `records` rows if `listed` is None, else the `listed` ones if `only`, else all others. `listed` ascends.
    """

    records: int
    listed: np.ndarray | None = None
    only: bool = True

    def __len__(self) -> int:
        if self.listed is None:
            return self.records
        return len(self.listed) if self.only else self.records - len(self.listed)

    @cached_property
    def _before(self) -> np.ndarray:
        """For each row left out, the number of selected rows before it."""
        assert self.listed is not None
        return self.listed - np.arange(len(self.listed))

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the row numbers in the file of the selected rows at `places`, each in 0..len-1."""
        if self.listed is None:
            return places
        return self.listed[places] if self.only else places + np.searchsorted(self._before, places, side="right")

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return the row numbers in the file for a range of places."""
        return self.at(np.arange(*places.indices(len(self))))

    def cut(self, held: np.ndarray) -> tuple[Selection, Selection]:
        """Return the rest, and the selected rows that the mask `held` marks.

        Memory: 8 bytes for each row held out, nothing for the others.
        """
        listed = self.at(np.flatnonzero(held))
        chosen = Selection(self.records, listed)
        if self.listed is None:
            return Selection(self.records, listed, only=False), chosen
        if self.only:
            return Selection(self.records, np.setdiff1d(self.listed, listed)), chosen
        return Selection(self.records, np.union1d(self.listed, listed), only=False), chosen


class DiskRows:
    """Selected rows of a file. `transforms` are applied when rows are read. Many threads may read at once."""

    def __init__(self, stored: Stored, chosen: Selection, transforms: tuple[Transform, ...] = ()) -> None:
        self.stored = stored
        self.chosen = chosen
        self.transforms = transforms

    @cached_property
    def _none(self) -> np.ndarray:
        """An empty array of transformed rows, which gives the shape and type of all rows."""
        return self._through(np.empty((0, *self.stored.shape[1:]), self.stored.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._none.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self._none.dtype

    def __len__(self) -> int:
        return len(self.chosen)

    @np.errstate(**SILENT)
    def _through(self, rows: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            rows = transform(rows)
        return rows

    def then(self, transform: Transform) -> DiskRows:
        """Return these rows with one more transform."""
        return DiskRows(self.stored, self.chosen, (*self.transforms, transform))

    def alike(self, other: DiskRows) -> DiskRows:
        """Return these rows, which are the same of their file as `other` of its own, with one list for both."""
        return DiskRows(self.stored, other.chosen, self.transforms)

    def coded(self, coder: Coder) -> CodedRows:
        """Return these rows as codes in a file of their own."""
        found = Scratch(len(self), (len(coder.columns),), coder.dtype)
        for start in range(0, len(self), _CODED_AT_ONCE):
            found.write(start, coder.codes(self[start : start + _CODED_AT_ONCE]))
        return coder.of(DiskRows(found, Selection(len(found))))

    def cut(self, held: np.ndarray) -> tuple[DiskRows, DiskRows]:
        """Return the rest, and the rows that the mask `held` marks."""
        parts = self.chosen.cut(held)
        rest, chosen = (DiskRows(self.stored, part, self.transforms) for part in parts)
        return rest, chosen

    def reshape(self, *shape: int) -> DiskRows:
        """Return these rows flattened to (N, D). Raises ValueError for any other shape."""
        if shape != (len(self), int(np.prod(self.shape[1:]))):
            raise ValueError(f"rows of shape {self.shape} stay on disk and are flattened, not reshaped to {shape}")
        return self.then(flatten)

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return consecutive selected rows, in one read if few other rows lie between them."""
        start, stop, _ = places.indices(len(self))
        if stop <= start:
            return self._none
        rows = self.chosen.at(np.arange(start, stop))
        first, last = int(rows[0]), int(rows[-1]) + 1
        if last - first > 2 * len(rows):
            return self._through(self.stored.take(rows))
        read = self.stored.span(first, last)
        return self._through(read if last - first == len(rows) else read[rows - first])

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the rows (.., B, ...) at `places` (.., B)."""
        rows = self._through(self.stored.take(self.chosen.at(places.reshape(-1))))
        return rows.reshape(*places.shape, *rows.shape[1:])


class TrialRows:
    """Rows (R, N, ...) that all trials share on disk, with transforms of each trial's own."""

    def __init__(self, shared: DiskRows, trials: Sequence[DiskRows]) -> None:
        self.shared = shared
        self._own = [own.transforms[len(shared.transforms) :] for own in trials]
        self.shape = (len(trials), *trials[0].shape)

    def __len__(self) -> int:
        return self.shape[1]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the rows (R, B, ...) at `places` (R, B), or (1, B) for the same places in all trials."""
        return self._each(self.shared.at(places))

    def __getitem__(self, places: slice) -> np.ndarray:
        """Return consecutive rows (R, B, ...)."""
        return self._each(self.shared[places][None])

    def _each(self, rows: np.ndarray) -> np.ndarray:
        out = []
        for trial, transforms in enumerate(self._own):
            own = rows[trial if len(rows) > 1 else 0]
            for transform in transforms:
                own = transform(own)
            out.append(own)
        return np.stack(out)


Rows: TypeAlias = np.ndarray | DiskRows | TrialRows | CodedRows
"""Rows in memory, on disk, or as codes."""


def stored_keys(*arrays: DiskRows) -> Keys:
    """Return `splits.content_keys` of rows on disk, in a file: identical records are counted a range of hashes at once.

    Memory: that of `_KEYS_AT_ONCE` records, if few of them are identical.
    """
    records = len(arrays[0])
    starts = range(0, records, _CODED_AT_ONCE)
    digests, found = Scratch(records, (2,), np.dtype(np.uint64)), Scratch(records, (), np.dtype(np.uint64))
    for start in starts:
        digests.write(start, digests_of([array[start : start + _CODED_AT_ONCE] for array in arrays]))
    ranges = -(-records // _KEYS_AT_ONCE)
    for number in range(ranges):

        def own(start: int, number: int = number) -> tuple[np.ndarray, np.ndarray]:
            """Return the digests of a piece, and which of them are in the range."""
            piece = digests.span(start, min(start + _CODED_AT_ONCE, records))
            return piece, (piece[:, 0] >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32) == number

        chosen = numbered(np.concatenate([piece[here] for piece, here in map(own, starts)]))
        for start in starts:
            _, here = own(start)
            held = found.span(start, start + len(here))
            held[here], chosen = chosen[: here.sum()], chosen[here.sum() :]
            found.write(start, held)
    return Keys(DiskRows(found, Selection(records)), by_place=False)


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
        x, held_x = self.x.cut(held)
        # the rows of a part are the same in both files, and are listed once
        y, held_y = self.y.alike(x), self.y.alike(held_x)
        rest, chosen = self.keys.cut(held)
        return DiskPart(x, y, rest), DiskPart(held_x, held_y, chosen)
