"""Rows that stay on disk: a memory-mapped `.npy` file, some of its rows, and what is done to each when it is read.

The process allocates memory for the rows that are asked for, never for the file; what it has mapped of the file is the
system's cache, which the system takes back when it needs memory. A row is transformed on its own, each time it is read.
A file that shrinks while it is mapped ends the process (the operating system's SIGBUS): leave it alone until then.

Not here: what a user's files must hold (`own_mapped.py`), batches and devices (`core/streamed.py`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.data.dataset import Layout, flatten
from dpsgd_cli.data.splits import count_test
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema import Split

Transform = Callable[[np.ndarray], np.ndarray]

_MOST_MAPPED = 1 << 27
_MAPPED_AROUND = 1 << 16  # what Linux maps around a page that is asked for, if it has it
_READERS = 16
_LEAST_ROWS = 64


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, thread_name_prefix="read-rows")


class Stored:
    """The rows of a C-ordered `.npy` file. Raises DataError for files that cannot be mapped."""

    def __init__(self, path: Path) -> None:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} cannot be read as a npy array: {error}") from None
        if array.ndim == 0 or array.size == 0 or not array.flags.c_contiguous:
            raise DataError(
                f"{path}: an array of shape {array.shape} in {'C' if array.flags.c_contiguous else 'Fortran'} order; it"
                " must hold at least one row, row after row (numpy.ascontiguousarray)"
            )
        self.path = path
        self.header: int = array.offset
        self._file = path.open("rb")
        self._mapping: mmap.mmap = array.base
        self._rows = np.asarray(array)
        self._touched = 0
        self._advise("MADV_RANDOM")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def dtype(self) -> np.dtype:
        return self._rows.dtype

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def _row_bytes(self) -> int:
        return self._rows[:1].nbytes

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows (n,) in the order asked for. Several threads wait for the disk at once: it has work ahead."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()}..{rows.max()} of {self.path}, which has {len(self)}")
        taken = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = max(1, min(_READERS, len(rows) // _LEAST_ROWS))
        ends = [part * len(rows) // parts for part in range(parts + 1)]

        def take(part: int) -> None:
            own = slice(ends[part], ends[part + 1])
            # "raise" would fill a copy first; the rows were looked at above
            self._rows.take(rows[own], axis=0, out=taken[own], mode="clip")

        if parts == 1:
            take(0)
        else:
            list(_readers().map(take, range(parts)))
        self._touched += len(rows) * (self._row_bytes + _MAPPED_AROUND)
        if self._touched > _MOST_MAPPED:
            self._advise("MADV_DONTNEED")
            self._touched = 0
        return taken

    def span(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1, read one after the other past the map."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if stop == start:
            return rows
        room, place = rows.data.cast("B"), self.header + start * self._row_bytes
        while len(room):
            count = os.preadv(self._file.fileno(), [room], place)
            if count == 0:
                raise DataError(f"{self.path} has become shorter while it was read; train again with the whole file")
            room, place = room[count:], place + count
        return rows

    def _advise(self, advice: str) -> None:
        """What the map is used for, where the system takes such advice. MADV_DONTNEED gives its pages back to it."""
        if hasattr(mmap, advice):
            self._mapping.madvise(getattr(mmap, advice))


@dataclass(frozen=True)
class Selection:
    """Rows of a file in ascending order: all `records`, those `listed` (`only`), or all others. Listed rows ascend."""

    records: int
    listed: np.ndarray | None = None
    only: bool = True

    def __len__(self) -> int:
        if self.listed is None:
            return self.records
        return len(self.listed) if self.only else self.records - len(self.listed)

    @cached_property
    def _before(self) -> np.ndarray:
        """For each row left out, how many of the others come before it."""
        assert self.listed is not None
        return self.listed - np.arange(len(self.listed))

    def at(self, places: np.ndarray) -> np.ndarray:
        """Row numbers in the file of the chosen rows number `places`, each 0..len-1."""
        if self.listed is None:
            return places
        return self.listed[places] if self.only else places + np.searchsorted(self._before, places, side="right")

    def cut(self, split: Split) -> tuple[Selection, Selection]:
        """The rest, and the rows that `split` holds out: a uniform set by its seed, whatever the rows hold.

        Holds 8 bytes for each row held out, nothing for the others; so it is another set than that of
        `splits.split_rows`.
        """
        held_out = self.at(_drawn(len(self), count_test(len(self), split), split.seed))
        chosen = Selection(self.records, held_out)
        if self.listed is None:
            return Selection(self.records, held_out, only=False), chosen
        if self.only:
            return Selection(self.records, np.setdiff1d(self.listed, held_out)), chosen
        return Selection(self.records, np.union1d(self.listed, held_out), only=False), chosen


def _drawn(records: int, count: int, seed: int) -> np.ndarray:
    """A uniform set of `count` of 0..records-1, ascending."""
    state = np.random.RandomState(seed)
    fewer = min(count, records - count)
    found = np.empty(0, dtype=np.int64)
    while len(found) < fewer:
        found = np.union1d(found, state.randint(0, records, fewer - len(found), dtype=np.int64))
    return found if fewer == count else np.setdiff1d(np.arange(records), found)


class MappedRows:
    """Chosen rows of a file, each put through `transforms` when it is read. Read by many threads at once."""

    def __init__(self, stored: Stored, chosen: Selection, transforms: tuple[Transform, ...] = ()) -> None:
        self.stored = stored
        self.chosen = chosen
        self.transforms = transforms

    @cached_property
    def _none(self) -> np.ndarray:
        """No rows, transformed: what shape and type the others will have."""
        return self._through(np.empty((0, *self.stored.shape[1:]), self.stored.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._none.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self._none.dtype

    def __len__(self) -> int:
        return len(self.chosen)

    def _through(self, rows: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            rows = transform(rows)
        return rows

    def then(self, transform: Transform) -> MappedRows:
        """The same rows, transformed further."""
        return MappedRows(self.stored, self.chosen, (*self.transforms, transform))

    def cut(self, split: Split) -> tuple[MappedRows, MappedRows]:
        """The rest, and the rows that `split` holds out; of features and labels alike."""
        rest, held_out = self.chosen.cut(split)
        return MappedRows(self.stored, rest, self.transforms), MappedRows(self.stored, held_out, self.transforms)

    def reshape(self, *shape: int) -> MappedRows:
        """The same with every row flattened: the one other shape that statistics of rows ask for."""
        if shape != (len(self), int(np.prod(self.shape[1:]))):
            raise ValueError(f"rows of shape {self.shape} stay on disk and are flattened, not reshaped to {shape}")
        return self.then(flatten)

    def __getitem__(self, places: slice) -> np.ndarray:
        """Rows in order, read at once where few others lie between them."""
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
        """Rows (.., B, ...) at `places` (.., B)."""
        rows = self._through(self.stored.take(self.chosen.at(places.reshape(-1))))
        return rows.reshape(*places.shape, *rows.shape[1:])


class TrialRows:
    """The same rows for every trial, put through transforms of each trial's own: (R, N, ...)."""

    def __init__(self, shared: MappedRows, trials: Sequence[MappedRows]) -> None:
        self.shared = shared
        self._own = [own.transforms[len(shared.transforms) :] for own in trials]
        self.shape = (len(trials), *trials[0].shape)

    def __len__(self) -> int:
        return self.shape[1]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Rows (R, B, ...) at `places` (R, B), or (1, B): the same places for all."""
        return self._each(self.shared.at(places))

    def __getitem__(self, places: slice) -> np.ndarray:
        """Rows (R, B, ...) in order."""
        return self._each(self.shared[places][None])

    def _each(self, rows: np.ndarray) -> np.ndarray:
        out = []
        for trial, transforms in enumerate(self._own):
            own = rows[trial if len(rows) > 1 else 0]
            for transform in transforms:
                own = transform(own)
            out.append(own)
        return np.stack(out)


@dataclass(frozen=True)
class MappedPart:
    """`dataset.Part` on disk: features, and labels as class indices or targets."""

    x: MappedRows
    y: MappedRows

    def __len__(self) -> int:
        return len(self.y)

    def cut(self, split: Split) -> tuple[MappedPart, MappedPart]:
        """The rest, and the rows that `split` holds out."""
        (x, held_x), (y, held_y) = self.x.cut(split), self.y.cut(split)
        return MappedPart(x, y), MappedPart(held_x, held_y)


@dataclass(frozen=True)
class MappedSource:
    """`dataset.Source` on disk."""

    name: str
    train: MappedPart
    test: MappedPart | None
    layout: Layout
    classes: tuple[Any, ...] | None
    declarations: tuple[str, ...]
    warnings: tuple[str, ...]
    sha256: dict[str, str]
