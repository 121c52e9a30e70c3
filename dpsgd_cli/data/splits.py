"""Coins: hashes that decide which records are held out, and which fold or part each record is in.

A record's coin is a hash of (seed, purpose, key), uniform on 64 bits. The key depends on the adjacency that the
recipe's statement is for, so that neighbouring files differ in one record of one part:

add-remove              The key is a hash of the record's own content as read (features and label, before preprocessing)
                        and of its number among identical records. With `privacy.unit` it is a hash of the user's name.
                        Removing a record, or one of several identical ones, leaves every other record's key and coin
                        as they were. So does another order of the file.
replace-one, zero-out   The key is the record's place: which of the files it is in, and its row there (with
                        `privacy.unit` the user's rank by name). Neighbours have the same places, so every part keeps
                        its size.

fraction f   A record is held out if its coin is below f. It depends on that record alone.
count n      The n records with the smallest coins are held out. Let one record be removed. If it was not held out,
             nobody moves. If it was, the record with the next coin takes its place and leaves the training part. Either
             way the training part loses one record and gains none, so training parts of neighbours are neighbours. The
             held-out part is the same or has one record replaced.
two cuts     Validation records are cut from what the first cut left, by coins of another purpose.
K folds      Under add-remove a record is in fold floor(K coin / 2^64), a function of that record alone. By place, K
             consecutive places are dealt out to the K folds in the order of their coins; fold sizes then differ by at
             most one for each file.

Sizes. By place the sizes of all parts follow from the number of records, which is public. Under add-remove a fraction
or a fold has a size that depends on the records. What is public instead is an upper bound (`places_for`): prices,
sampling rates and divisors count that many places, and a place without a record adds nothing to any sum. A file whose
part has more records than places is refused before anything is released.

A collision of 128-bit BLAKE2b digests would count two different records as identical. Everything else holds for all
files, also for records chosen to have certain coins, but for that refusal: records that were chosen to overfill the
places of a known seed bring it about, and it then tells whether the last of them is there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.settings import Cut
from dpsgd_cli.errors import DataError

SECOND_FILE = 1 << 40
"""Place of the first row of a second file: beyond every row of the first."""
_DEVIATIONS = 6
"""Places for a random number of records: its mean plus this many standard deviations (exceeded once in 10^9)."""
_AT_ONCE = 1 << 19
_BYTES_AT_ONCE = 1 << 23


class Rows(Protocol):
    """An array, or rows on disk that are read by slices."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Return the rows of a slice, in order."""


def coin(keys: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """Return coins (N,), uint64, of records with `keys` (N,): SplitMix64 seeded by SHA-256 of "purpose/seed".

    All random choices of parts, folds and rows go through this function.

    >>> coin(np.arange(2), 0, "test").tolist()
    [12774773154734168601, 2140662401178399102]
    """
    key = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8]
    return splitmix(int.from_bytes(key, "little"), keys)


def splitmix(state: int | np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return output number `numbers` (from 0) of SplitMix64 started at `state`, uint64.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"; constants of its C reference.
    """
    first = np.asarray(state, dtype=np.uint64)
    mixed = first + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Keys:
    """Keys of N rows in their order: places (int64), or hashes of content or of users' names (uint64).

    `by_place` says which of the two. Rows of one user share a key where `of_users`. The hashes of rows on disk are on
    disk, too (`on_disk.py`).
    """

    values: Any
    by_place: bool
    of_users: bool = False

    @classmethod
    def of_places(cls, files: Sequence[int]) -> Keys:
        """Return keys by place of the rows of `files`, given by their numbers of rows."""
        return cls(
            np.concatenate([number * SECOND_FILE + np.arange(rows) for number, rows in enumerate(files)]), by_place=True
        )

    @classmethod
    def of_names(cls, names: Sequence[str] | np.ndarray) -> Keys:
        """Return keys of users by their names."""
        digests = [hashlib.blake2b(str(name).encode(errors="surrogatepass"), digest_size=8).digest() for name in names]
        values = np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
        return cls(values, by_place=False, of_users=True)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: np.ndarray | slice) -> Keys:
        return replace(self, values=self.values[rows])

    def only(self, rows: np.ndarray) -> Keys:
        """Return the keys with numbers `rows`, ascending, among these."""
        return self[rows] if isinstance(self.values, np.ndarray) else replace(self, values=self.values.only(rows))

    def then(self, others: Keys) -> Keys:
        """Return these keys followed by `others`. Raises ValueError unless they are of the same kind."""
        if self.by_place != others.by_place:
            raise ValueError("keys by place and keys by content do not go together")
        return replace(self, values=np.concatenate([self.values, others.values]))

    @property
    def different(self) -> Keys:
        """Each key once: the users of rows, or the rows themselves."""
        return replace(self, values=np.unique(self.values)) if self.of_users else self

    def held_out(self, cut: Cut) -> np.ndarray:
        """Return a mask (N,) of the rows that `cut` holds out.

        Raises DataError unless both parts get at least one key.
        """
        chosen = self.different.values
        asked, records = cut.asked, len(chosen)
        if records < 2:
            raise DataError(
                f"{cut.key}: {count(records, 'row')} cannot be cut into two parts; give at least 2, or rows to hold out"
                " in a file of their own (data.test_path)"
            )
        below = np.zeros(len(self), bool)
        if not isinstance(asked, int) or asked < records:
            bound = _bound(chosen, asked, cut.seed, cut.purpose)
            for start in range(0, len(self), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                below[part] = coin(self.values[part], cut.seed, cut.purpose) < bound
        if not below.any() or below.all():
            raise DataError(_one_is_empty(cut, records))
        return below

    def parts(self, number: int, purpose: str, seed: int) -> np.ndarray:
        """Return the part (N,), 0 to `number` - 1, that each row falls into."""
        if not self.by_place:
            return ((coin(self.values, seed, purpose) >> np.uint64(32)) * np.uint64(number) >> np.uint64(32)).astype(
                int
            )
        in_block = self.values % SECOND_FILE % number
        first, block = np.unique(self.values - in_block, return_inverse=True)
        ranks = coin(first[:, None] + np.arange(number), seed, purpose).argsort(axis=1).argsort(axis=1)
        found: np.ndarray = ranks[block, in_block]
        return found

    def folds(self, folds: int, repeats: int, seed: int) -> np.ndarray:
        """Return the rows that each trial does not train on, bool (N, K * repeats).

        Trial t is fold t % K of repeat t // K.
        """
        found = np.stack([self.parts(folds, f"fold {repeat}", seed) for repeat in range(repeats)], axis=1)
        return (found[:, :, None] == np.arange(folds)).reshape(len(self), -1)


def content_keys(*arrays: Rows) -> Keys:
    """Return keys by content of records: the bytes of a record's row in each of `arrays`, all of shape (N, ...).

    Rows are read a few megabytes at a time. Memory: 32 bytes a record.
    """
    records, size = len(arrays[0]), sum(array[:1].nbytes for array in arrays)
    step = max(1, _BYTES_AT_ONCE // max(1, size))
    digests = [digests_of([array[start : start + step] for array in arrays]) for start in range(0, records, step)]
    return Keys(numbered(np.concatenate(digests)), by_place=False)


def digests_of(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return BLAKE2b digests (n, 2), uint64, of the rows of arrays (n, ...) side by side."""
    rows = len(arrays[0])
    parts = [np.ascontiguousarray(array).reshape(rows, -1).view(np.uint8) for array in arrays]
    joined = np.concatenate(parts, axis=1)
    width, content, blake2b = joined.shape[1], joined.tobytes(), hashlib.blake2b
    found = [blake2b(content[i : i + width], digest_size=16).digest() for i in range(0, rows * width, width)]
    return np.frombuffer(b"".join(found), dtype="<u8").reshape(rows, 2).astype(np.uint64)


def numbered(digests: np.ndarray) -> np.ndarray:
    """Return keys (N,) of records with `digests` (N, 2): SplitMix64 started there, output k for the k-th identical."""
    order = np.lexsort(digests.T)
    lined = digests[order]
    new = np.ones(len(order), bool)
    new[1:] = (lined[1:] != lined[:-1]).any(axis=1)
    begins = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) - begins
    return splitmix(digests[:, 0], number)


def _bound(keys: np.ndarray, asked: float, seed: int, purpose: str) -> np.uint64:
    """Return the number that the coin of a held-out record is below."""
    if isinstance(asked, float):
        return np.uint64(int(asked * 2.0**64))
    smallest = np.empty(0, np.uint64)
    for start in range(0, len(keys), _AT_ONCE):
        smallest = np.concatenate([smallest, coin(keys[start : start + _AT_ONCE], seed, purpose)])
        if len(smallest) > asked:
            smallest = np.partition(smallest, asked - 1)[:asked]
    return smallest.max() + np.uint64(1)


def places_for(records: int, share: float) -> int:
    """Return the places for those of `records` that independent coins keep with probability `share`; at most all.

    >>> places_for(500, 0.8), places_for(60_000, 0.8), places_for(10, 0.8)
    (454, 48588, 10)
    """
    return min(records, math.ceil(records * share + _DEVIATIONS * math.sqrt(records * share * (1 - share))))


def cut_sizes(whole: Keys | int, cut: Cut) -> tuple[Keys | int, int]:
    """Return what `cut` leaves, and how many records it holds out, before any record is read.

    `whole` is all keys by place; or under add-remove the number of places, of which a fraction's number is a mean.
    """
    if isinstance(whole, Keys):
        held = whole.held_out(cut)
        return whole[~held], int(held.sum())
    if not isinstance(cut.asked, int):
        return places_for(whole, 1 - cut.asked), round(whole * cut.asked)
    if cut.asked >= whole:
        raise DataError(_one_is_empty(cut, whole))
    return whole - cut.asked, cut.asked


def _one_is_empty(cut: Cut, records: int) -> str:
    return (
        f"{cut.key}: {cut.asked} of {count(records, 'row')} leaves one of the two parts empty; give a count from 1 to"
        f" {records - 1}, or another fraction"
    )


def places_of_a_fold(files: Sequence[int], folds: int, by_place: bool) -> int:
    """Return the number of places of a trial that trains on all of K folds but its own.

    `files` are numbers of records. By place it is the most records that any trial trains on. Raises DataError if a fold
    may be empty.
    """
    if sum(files) < folds or (by_place and not sum(rows // folds for rows in files)):
        raise DataError(f"folds: {folds} folds of {count(sum(files), 'row')}; give at most as many folds as rows")
    if by_place:
        return sum(rows - rows // folds for rows in files)
    return places_for(sum(files), 1 - 1 / folds)
