"""Coins, cuts and folds: each record's own content, or its place, decides; neighbours stay neighbours."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data import splits
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.settings import Split, ValidationSet
from dpsgd_cli.data.splits import (
    SECOND_FILE,
    Keys,
    coin,
    content_keys,
    cut_sizes,
    places_for,
    places_of_a_fold,
    splitmix,
)
from dpsgd_cli.errors import DataError

sizes = st.integers(20, 200)
seeds = st.integers(0, 50)


def cut_of(keys: Keys, cut: Any) -> tuple[np.ndarray, np.ndarray]:
    """The keys that stay, and those that are held out."""
    held = keys.held_out(cut)
    return keys.values[~held], keys.values[held]


def by_place(records: int) -> Keys:
    return Keys.of_places([records])


def table(records: int, seed: int = 0) -> np.ndarray:
    """Rows of few different values, so that many are identical."""
    return np.random.default_rng(seed).integers(0, 4, (records, 2)).astype(np.float32)


def test_coins_are_those_of_splitmix64() -> None:
    """Published outputs for the state 1234567, and the key from SHA-256 by whole numbers of Python."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix(1234567, np.arange(4)).tolist() == published
    assert splitmix(1234567, np.array([3, 1])).tolist() == [published[3], published[1]], "in any order"
    mask = (1 << 64) - 1
    state = int.from_bytes(hashlib.sha256(b"test/7").digest()[:8], "little")
    place = SECOND_FILE + 12345
    z = (state + (place + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    assert coin(np.array([place]), 7, "test").tolist() == [z ^ (z >> 31)]


def test_keys_of_content_are_hashes_of_bytes_and_of_numbers_among_identical_records() -> None:
    """By hand: BLAKE2b of a record's bytes, whose first 8 start a SplitMix64; the k-th identical one takes output k."""
    x, y = np.array([[1.5, 2.0], [3.0, 4.0], [1.5, 2.0]], np.float32), np.array([1, 0, 1])
    found = content_keys(x, y).values
    states = [
        int.from_bytes(hashlib.blake2b(x[i].tobytes() + y[i].tobytes(), digest_size=16).digest()[:8], "little")
        for i in (0, 1)
    ]
    assert sorted(found[[0, 2]].tolist()) == sorted(splitmix(states[0], np.arange(2)).tolist())
    assert found[1] == splitmix(states[1], np.arange(1))[0]
    assert content_keys(x, 1 - y).values[0] not in found, "the label is a part of a record"


def test_pieces_are_read_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(100)
    whole = content_keys(rows, rows[:, 0])
    cuts = [cut_of(by_place(100), cut)[1].tolist() for cut in (Split(test=0.2), Split(test=30), Split(test=70))]
    monkeypatch.setattr(splits, "_BYTES_AT_ONCE", 50)
    monkeypatch.setattr(splits, "_AT_ONCE", 7)
    assert np.array_equal(content_keys(rows, rows[:, 0]).values, whole.values)
    assert [cut_of(by_place(100), cut)[1].tolist() for cut in (Split(test=0.2), Split(test=30), Split(test=70))] == cuts


@given(sizes, seeds, st.data())
def test_a_record_that_is_removed_moves_no_other(records: int, seed: int, data: st.DataObject) -> None:
    """First, middle, last or a duplicate: every other record is where it was, in fractions, folds and parts.

    A record is its values and its part. Of identical records one fewer is left, whichever was removed.
    """
    rows, gone = table(records, seed), data.draw(st.sampled_from([0, records // 2, records - 1]))
    fewer = np.delete(rows, gone, axis=0)

    def places(values: np.ndarray) -> list[list[tuple[float, ...]]]:
        keys = content_keys(values)
        first = keys.held_out(Split(test=0.5, seed=seed))
        fold, teacher = keys.folds(5, 2, seed), keys.parts(7, "teachers", seed)
        return [sorted((*row, part) for row, part in zip(values.tolist(), own, strict=True)) for own in
                (first.tolist(), teacher.tolist(), *fold.T.tolist())]  # fmt: skip

    for whole, less in zip(places(rows), places(fewer), strict=True):
        for found in less:
            whole.remove(found)
        assert len(whole) == 1 and whole[0][:-1] == tuple(rows[gone].tolist())


@given(sizes, seeds)
def test_the_order_of_a_file_does_not_matter(records: int, seed: int) -> None:
    rows = table(records, seed)
    order = np.random.default_rng(seed).permutation(records)
    parts = [
        sorted((*row, part) for row, part in zip(own.tolist(), content_keys(own).parts(9, "test", seed), strict=True))
        for own in (rows, rows[order])
    ]
    assert parts[0] == parts[1]


def test_places_would_not_have_passed() -> None:
    """The control of the two tests above: by place, removing the first row moves most others to another part."""
    whole, less = (Keys.of_places([n]).parts(5, "test", 0) for n in (200, 199))
    assert (whole[1:] != less).sum() > 100


@given(sizes, seeds, st.integers(1, 15), st.data())
def test_a_count_exchanges_one_record_at_most(records: int, seed: int, test: int, data: st.DataObject) -> None:
    """Training loses the removed record, or one that replaces it in the other part; it gains none."""
    rows = np.arange(records, dtype=np.float64)
    fewer = np.delete(rows, data.draw(st.integers(0, records - 1)))
    cut = Split(test=test, seed=seed)
    (train, held), (less, held_less) = (
        (set(own[~out].tolist()), set(own[out].tolist()))
        for own in (rows, fewer)
        for out in [content_keys(own).held_out(cut)]
    )
    assert len(held) == len(held_less) == test
    assert less <= train and len(train - less) == 1 and len(held - held_less) <= 1


@pytest.mark.parametrize(("test", "expected"), [(0.2, 20_000), (0.015, 1500), (7, 7), (0.5, 50_000)])
@pytest.mark.parametrize("content", [False, True])
def test_every_row_is_in_exactly_one_part(test: float, expected: int, content: bool) -> None:
    """A fraction's size to 5 deviations of the binomial (6e-7 by chance), a count's exactly."""
    keys = content_keys(np.arange(100_000)) if content else by_place(100_000)
    train, held = cut_of(keys, Split(test=test))
    off = 0.0 if isinstance(test, int) else 5 * math.sqrt(100_000 * test * (1 - test))
    assert abs(len(held) - expected) <= off
    assert sorted([*train, *held]) == sorted(keys.values)


@given(sizes, seeds, st.sampled_from([0.1, 0.4, 1, 5, 12]), st.sampled_from([0.2, 3]))
def test_one_place_more_moves_no_other_row_into_or_out_of_training_but_one(
    records: int, seed: int, test: float, validation: float
) -> None:
    """Neighbours before the cuts are neighbours after them; a permutation of all rows moves a third of them."""
    second = ValidationSet.model_validate(
        {"fraction" if validation < 1 else "records": validation, "seed": seed, "public": True}
    )

    def parts(rows: int) -> tuple[set[int], set[int], set[int]]:
        keys = by_place(rows)
        held = keys.held_out(Split(test=test, seed=seed))
        train, looked_at = cut_of(keys[~held], second)
        return set(train.tolist()), set(keys.values[held].tolist()), set(looked_at.tolist())

    try:
        before, after = parts(records), parts(records + 1)
    except DataError:
        return
    gained = after[0] - before[0]
    assert before[0] <= after[0] and len(gained) <= 1, "training gains one record at most, and loses none"
    for number in (1, 2):
        lost, found = before[number] - after[number], after[number] - before[number]
        assert len(lost) <= 1 and len(found) <= 1
    if test < 1:
        assert before[1] <= after[1], "of a fraction no row leaves its part"


def test_a_permutation_would_not_have_passed() -> None:
    """The control of the test above: what was done before."""
    before, after = (set(np.random.RandomState(0).permutation(n)[:20].tolist()) for n in (127, 128))
    assert len(before - after) > 10


def test_the_seed_and_the_purpose_decide_and_nothing_else() -> None:
    first, again, other = (cut_of(by_place(50), Split(test=10, seed=seed))[1].tolist() for seed in (3, 3, 4))
    assert first == again != other
    looked_at = ValidationSet(records=10, seed=3, public=True)
    assert cut_of(by_place(50), looked_at)[1].tolist() != first


def test_coins_belong_to_keys_not_to_ranks() -> None:
    """A validation row is one by its own coin, whatever was cut before."""
    cut = ValidationSet(fraction=0.3, seed=1, public=True)
    for keys in (by_place(200), content_keys(table(200))):
        alone = set(cut_of(keys, cut)[1].tolist())
        rest = keys[~keys.held_out(Split(test=0.5))]
        assert set(cut_of(rest, cut)[1].tolist()) == alone & set(rest.values.tolist())


def test_a_cut_keeps_rows_with_labels_and_keys() -> None:
    labels = np.arange(30)
    rows = Part(labels[:, None] * 10.0, labels, by_place(30))
    for part in rows.cut(Split()):
        assert (part.x[:, 0] == part.y * 10).all() and part.known_keys.values.tolist() == part.y.tolist()


def test_pool_puts_training_rows_first_and_keeps_files_apart() -> None:
    keys = Keys.of_places((2, 1))
    train, test = Part(np.zeros((2, 1)), np.array([0, 1]), keys[:2]), Part(np.ones((1, 1)), np.array([2]), keys[2:])
    pooled = train.pooled(test)
    assert pooled.y.tolist() == [0, 1, 2] and pooled.known_keys.values.tolist() == [0, 1, SECOND_FILE]
    assert train.pooled(None) is train
    with pytest.raises(ValueError, match="do not go together"):
        keys.then(content_keys(np.arange(2)))


@pytest.mark.parametrize(
    ("records", "test", "told"),
    [
        (0, 0.2, "0 rows cannot be cut into two parts; give at least 2"),
        (1, 0.2, "1 row cannot be cut into two parts; give at least 2"),
        *(
            (10, test, "leaves one of the two parts empty; give a count from 1 to 9")
            for test in (0.0001, 0.9999, 10, 11)
        ),
    ],
)
def test_cuts_with_an_empty_part_are_refused(records: int, test: float, told: str) -> None:
    with pytest.raises(DataError, match=told):
        by_place(records).held_out(Split(test=test))
    if test >= 1:
        with pytest.raises(DataError, match=told):
            cut_sizes(records, Split(test=test))


@given(st.integers(2, 60), st.integers(2, 7), st.integers(1, 3), seeds)
def test_folds_by_place_cover_all_rows_and_differ_by_one_at_most(
    records: int, folds: int, repeats: int, seed: int
) -> None:
    held = by_place(records).folds(folds, repeats, seed)
    assert held.shape == (records, folds * repeats)
    for repeat in range(repeats):
        own = held[:, repeat * folds : (repeat + 1) * folds]
        assert (own.sum(axis=1) == 1).all()
        assert set(own.sum(axis=0).tolist()) <= {records // folds, records // folds + 1}
        if records >= folds:
            assert records - own.sum(axis=0).min() == places_of_a_fold([records], folds, by_place=True)


@given(sizes, st.integers(2, 7), seeds)
def test_one_place_more_leaves_every_fold_as_it_was(records: int, folds: int, seed: int) -> None:
    """In either of two files; so each trial's training records are neighbours."""
    whole = Keys.of_places((records, records)).folds(folds, 2, seed)
    more = Keys.of_places((records + 1, records)).folds(folds, 2, seed)
    assert np.array_equal(np.delete(more, records, axis=0), whole)
    assert np.array_equal(Keys.of_places((records, records + 1)).folds(folds, 2, seed)[:-1], whole)


def test_repeats_and_seeds_have_folds_of_their_own() -> None:
    for keys in (by_place(50), content_keys(np.arange(50))):
        first, second = (keys.parts(5, f"fold {repeat}", 1) for repeat in (0, 1))
        assert not np.array_equal(first, second)
        assert not np.array_equal(keys.parts(5, "fold 0", 2), first)


def test_each_order_of_a_block_is_as_likely_as_another() -> None:
    """Orders of 3 folds in 6000 blocks: each of 6 in 1000 of them, to 5 deviations (4e-6 by chance for all)."""
    found = by_place(18_000).parts(3, "fold 0", 0).reshape(-1, 3)
    orders, counts = np.unique(found @ np.array([9, 3, 1]), return_counts=True)
    assert len(orders) == 6 and abs(counts - 1000).max() < 5 * math.sqrt(6000 * 5 / 36)


def test_parts_by_content_are_equally_likely() -> None:
    """Each of 7 parts of 70,000 records to 5 deviations (4e-6 by chance for all)."""
    counts = np.bincount(content_keys(np.arange(70_000)).parts(7, "teachers", 0))
    assert len(counts) == 7 and abs(counts - 10_000).max() < 5 * math.sqrt(70_000 * 6 / 49)


def test_more_folds_than_rows_are_refused() -> None:
    for place in (True, False):
        with pytest.raises(DataError, match="5 folds of 4 rows"):
            places_of_a_fold([4], 5, place)
    assert places_of_a_fold([7, 3], 5, by_place=True) == 9


def test_places_hold_what_coins_keep() -> None:
    """Six deviations above the mean: SciPy's binomial exceeds them less than once in 10^8, and never all records."""
    from scipy.stats import binom

    for records in (10, 500, 60_000):
        for share in (0.2, 0.8, 0.5):
            places = places_for(records, share)
            assert records * share <= places <= records
            assert places == records or binom.sf(places, records, share) < 2e-8
    assert cut_sizes(500, Split(test=0.2)) == (454, 100) and cut_sizes(500, Split(test=100)) == (400, 100)
