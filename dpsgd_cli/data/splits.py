"""Which rows are held out, for testing, for validation or by a fold: each row's place and a seed decide, nothing else.

A row's place is its number in its file, counted from 0 in the order of the file (after the rows that a card's reader
leaves out), and which of the files it is in. It has a coin: a hash of (seed, purpose, place), uniform on 64 bits. No
value of any row, no other row and no number of rows enters it, so whoever comes or goes leaves the others' coins alone.

fraction f   A row is held out where its coin is below f. One row more is in one part, and the others stay where they
             are. Sizes are about f N, and what exactly depends on the seed and on the places alone.
count n      The rows of the n smallest coins are held out. Proof that training parts of neighbours are neighbours: let
             one row come, and n rows be held out before and after. If its coin is not among the n smallest, it joins
             the training part. If it is, it takes the place of the one row whose coin was the largest of the n, and
             that row joins the training part. Either way the training part gains one record and loses none. The part
             held out stays the same or has one record replaced.
two cuts     Validation rows are cut from what the first cut left, by coins of another purpose. What is left gains one
             record at most and loses none, and then so does what is left of that; the validation part gains one record
             (fraction) or has one replaced (count), which moves a count of right predictions by one at most.
K folds      K rows in a row (places K b to K b + K - 1) are dealt out to the K folds in an order that their coins
             give, an incomplete last block among them. A row's fold depends on nothing but its place. Folds then
             differ in size by one at most for each file.

What neighbouring means here. The records are those in places: under add-remove one place is filled or empty, under
replace-one and zero-out it is filled differently. A file can leave only its last place empty. A row taken out of the
middle of a file moves all later rows up by one place, and they take other coins: the guarantee compares data sets in
which everybody else keeps their place, as it compares those in which everybody else keeps their values. The number of
places is public, and so are the sizes of all parts.

Not here: what parts are used for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Cut
from dpsgd_cli.wording import count

SECOND_FILE = 1 << 40
"""The place of the first row of a second file: beyond those of the first, however many they are."""

_AT_ONCE = 1 << 22


class Places(Protocol):
    """Places in ascending order: an array, or what stands for one that would be too large."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, chosen: slice) -> np.ndarray:
        """Those from a number to another."""


def places_of(files: Sequence[int]) -> np.ndarray:
    """The places (N,) of all rows of `files`, given by their numbers of rows; int64, ascending."""
    return np.concatenate([number * SECOND_FILE + np.arange(rows) for number, rows in enumerate(files)])


def coins(places: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """The coins of `places`, uint64: `splitmix` by a key that is SHA-256's first 64 bits, little-endian, of
    "purpose/seed".

    >>> coins(np.arange(2), 0, "test").tolist()
    [12774773154734168601, 2140662401178399102]
    """
    key = hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8]
    return splitmix(int.from_bytes(key, "little"), places)


def splitmix(key: int, places: np.ndarray) -> np.ndarray:
    """SplitMix64's outputs number `places` (from 0) from the state `key`, uint64.

    A bijection of 64 bits, so no two places below 2^64 have the same. Source: Steele, Lea and Flood 2014, "Fast
    splittable pseudorandom number generators"; constants of its reference in C.
    """
    mixed = np.uint64(key) + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def held_out(places: Places, cut: Cut) -> np.ndarray:
    """Those of `places` that `cut` holds out, ascending; holds 8 bytes for each of them, whatever the others are.

    Raises DataError unless both parts get at least one row.
    """
    records = len(places)
    asked, purpose, key = cut.asked, cut.purpose, cut.key
    if records < 2:
        raise DataError(
            f"{key}: {count(records, 'row')} cannot be cut into two parts; give at least 2, or rows to hold out in a"
            " file of their own (data.test_path)"
        )
    held = np.empty(min(asked, records) if isinstance(asked, int) else 0)
    if len(held) < records:
        bound = _bound(places, asked, cut.seed, purpose)
        held = np.concatenate([part[coins(part, cut.seed, purpose) < bound] for part in _pieces(places)])
    if not 1 <= len(held) < records:
        raise DataError(
            f"{key}: {asked} holds out {len(held)} of {records} rows; both parts need at least one row, so give a count"
            f" from 1 to {records - 1}, or another fraction"
        )
    return held


def _bound(places: Places, asked: float, seed: int, purpose: str) -> np.uint64:
    """What a coin must be below to be held out."""
    if isinstance(asked, float):
        return np.uint64(int(asked * 2.0**64))
    smallest = np.empty(0, np.uint64)
    for part in _pieces(places):
        smallest = np.concatenate([smallest, coins(part, seed, purpose)])
        if len(smallest) > asked:
            smallest = np.partition(smallest, asked - 1)[:asked]
    return smallest.max() + np.uint64(1)


def _pieces(places: Places) -> Iterator[np.ndarray]:
    for start in range(0, len(places), _AT_ONCE):
        yield places[start : start + _AT_ONCE]


def cut_places(places: np.ndarray, cut: Cut) -> tuple[np.ndarray, np.ndarray]:
    """The places that stay, and those that `cut` holds out, each ascending."""
    held = held_out(places, cut)
    return np.setdiff1d(places, held, assume_unique=True), held


def most_trained_on(files: Sequence[int], folds: int) -> int:
    """Records of a trial with K folds, as prices and divisors count them: the most that any fold can train on.

    A fold that trains on fewer is filled up with records that add nothing. Raises DataError where a fold may be empty.
    """
    if not sum(rows // folds for rows in files):
        raise DataError(f"folds: {folds} folds of {count(sum(files), 'row')}; give at most as many folds as rows")
    return sum(rows - rows // folds for rows in files)


def folds_of(places: np.ndarray, folds: int, repeats: int, seed: int = 0) -> np.ndarray:
    """The fold (N, repeats), 0 to K - 1, that each place falls into: a function of (seed, repeat, place) alone.

    >>> np.bincount(folds_of(np.arange(7), 3, 1)[:, 0]).tolist()
    [2, 2, 3]
    """
    in_block = places % SECOND_FILE % folds
    first, block = np.unique(places - in_block, return_inverse=True)
    dealt = first[:, None] + np.arange(folds)
    found = np.empty((len(places), repeats), np.int64)
    for repeat in range(repeats):
        ranks = coins(dealt, seed, f"fold {repeat}").argsort(axis=1).argsort(axis=1)
        found[:, repeat] = ranks[block, in_block]
    return found


def held_out_by_folds(places: np.ndarray, folds: int, repeats: int, seed: int = 0) -> np.ndarray:
    """Rows that each trial does not train on: bool (N, K * repeats); trial t is fold t % K of repeat t // K."""
    found = folds_of(places, folds, repeats, seed)
    return (found[:, :, None] == np.arange(folds)).reshape(len(places), -1)
