"""Cuts and folds: each row's place and the seed decide, so neighbours stay neighbours; every row exactly once."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data import splits
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.splits import (
    SECOND_FILE,
    coins,
    cut_places,
    folds_of,
    most_trained_on,
    places_of,
    splitmix,
)
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Split, ValidationSet

sizes = st.integers(20, 200)
seeds = st.integers(0, 50)


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
    assert coins(np.array([place]), 7, "test").tolist() == [z ^ (z >> 31)]


@pytest.mark.parametrize(("test", "expected"), [(0.2, 20_000), (0.015, 1500), (7, 7), (0.5, 50_000)])
def test_every_row_is_in_exactly_one_part(test: float, expected: int) -> None:
    """A fraction's size to 5 deviations of the binomial (6e-7 by chance), a count's exactly."""
    train, held = cut_places(np.arange(100_000), Split(test=test))
    off = 0.0 if isinstance(test, int) else 5 * math.sqrt(100_000 * test * (1 - test))
    assert abs(len(held) - expected) <= off
    assert sorted([*train, *held]) == list(range(100_000))
    assert (np.diff(train) > 0).all() and (np.diff(held) > 0).all()


@given(sizes, seeds, st.sampled_from([0.1, 0.4, 1, 5, 12]), st.sampled_from([0.2, 3]))
def test_one_row_more_moves_no_other_row_into_or_out_of_training_but_one(
    records: int, seed: int, test: float, validation: float
) -> None:
    """Neighbours before the cuts are neighbours after them; a permutation of all rows moves a third of them."""
    second = ValidationSet.model_validate(
        {"fraction" if validation < 1 else "records": validation, "seed": seed, "public": True}
    )

    def parts(rows: int) -> tuple[set[int], set[int], set[int]]:
        rest, held = cut_places(np.arange(rows), Split(test=test, seed=seed))
        train, looked_at = cut_places(rest, second)
        return set(train.tolist()), set(held.tolist()), set(looked_at.tolist())

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


@given(sizes, seeds, st.data())
def test_a_record_left_out_anywhere_leaves_a_neighbour(records: int, seed: int, data: st.DataObject) -> None:
    """A place that is empty, as the docstring has it: counts and fractions."""
    places, gap = np.arange(records), data.draw(st.integers(0, records - 1))
    cut = Split(test=data.draw(st.sampled_from([0.3, 4])), seed=seed)
    whole, less = (set(cut_places(own, cut)[0].tolist()) for own in (places, np.delete(places, gap)))
    assert less <= whole and len(whole - less) <= 1


def test_the_seed_and_the_purpose_decide_and_nothing_else() -> None:
    first, again, other = (cut_places(np.arange(50), Split(test=10, seed=seed))[1].tolist() for seed in (3, 3, 4))
    assert first == again != other
    looked_at = ValidationSet(records=10, seed=3, public=True)
    assert cut_places(np.arange(50), looked_at)[1].tolist() != first


def test_coins_belong_to_places_not_to_ranks() -> None:
    """A validation row is one by its place in the file, whatever was cut before."""
    cut = ValidationSet(fraction=0.3, seed=1, public=True)
    alone = set(cut_places(np.arange(200), cut)[1].tolist())
    rest, _ = cut_places(np.arange(200), Split(test=0.5))
    assert set(cut_places(rest, cut)[1].tolist()) == alone & set(rest.tolist())


def test_pieces_are_cut_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for cut in (Split(test=0.2), Split(test=30), Split(test=70)):
        whole = cut_places(np.arange(100), cut)[1].tolist()
        with monkeypatch.context() as patch:
            patch.setattr(splits, "_AT_ONCE", 7)
            assert cut_places(np.arange(100), cut)[1].tolist() == whole


def test_cut_ignores_values_and_keeps_rows_with_labels() -> None:
    labels = np.arange(30)
    one, two = (Part(np.full((30, 2), value), labels) for value in (0.0, 9.0))
    assert one.cut(Split())[1].y.tolist() == two.cut(Split())[1].y.tolist()
    rows = Part(labels[:, None] * 10.0, labels)
    for part in rows.cut(Split()):
        assert (part.x[:, 0] == part.y * 10).all() and part.places.tolist() == part.y.tolist()


def test_pool_puts_training_rows_first_and_keeps_files_apart() -> None:
    train, test = Part(np.zeros((2, 1)), np.array([0, 1])), Part(np.ones((1, 1)), np.array([2]))
    pooled = train.pooled(test.of_second_file())
    assert pooled.y.tolist() == [0, 1, 2] and pooled.places.tolist() == [0, 1, SECOND_FILE]
    assert train.pooled(None) is train


@pytest.mark.parametrize(
    ("records", "test", "told"),
    [
        (0, 0.2, "0 rows cannot be cut into two parts; give at least 2"),
        (1, 0.2, "1 row cannot be cut into two parts; give at least 2"),
        *((10, test, "both parts need at least one row") for test in (0.0001, 0.9999, 10, 11)),
    ],
)
def test_cuts_with_an_empty_part_are_refused(records: int, test: float, told: str) -> None:
    with pytest.raises(DataError, match=told):
        cut_places(np.arange(records), Split(test=test))


@given(st.integers(2, 60), st.integers(2, 7), st.integers(1, 3), seeds)
def test_folds_of_a_repeat_cover_all_rows_and_differ_by_one_at_most(
    records: int, folds: int, repeats: int, seed: int
) -> None:
    found = folds_of(np.arange(records), folds, repeats, seed)
    assert found.shape == (records, repeats)
    for repeat in range(repeats):
        held = np.bincount(found[:, repeat], minlength=folds)
        assert held.sum() == records and len(held) == folds
        assert set(held.tolist()) <= {records // folds, records // folds + 1}
        if records >= folds:
            assert records - held.min() == most_trained_on([records], folds)


@given(sizes, st.integers(2, 7), seeds)
def test_one_row_more_leaves_every_fold_as_it_was(records: int, folds: int, seed: int) -> None:
    """In either of two files; so each trial's training records are neighbours."""
    whole = folds_of(places_of((records, records)), folds, 2, seed)
    more = folds_of(places_of((records + 1, records)), folds, 2, seed)
    assert np.array_equal(np.delete(more, records, axis=0), whole)
    assert np.array_equal(folds_of(places_of((records, records + 1)), folds, 2, seed)[:-1], whole)


def test_repeats_and_seeds_have_folds_of_their_own() -> None:
    found = folds_of(np.arange(50), 5, 2, seed=1)
    assert not np.array_equal(found[:, 0], found[:, 1])
    assert not np.array_equal(folds_of(np.arange(50), 5, 1, seed=2)[:, 0], found[:, 1])


def test_each_order_of_a_block_is_as_likely_as_another() -> None:
    """Orders of 3 folds in 6000 blocks: each of 6 in 1000 of them, to 5 deviations (4e-6 by chance for all)."""
    found = folds_of(np.arange(18_000), 3, 1)[:, 0].reshape(-1, 3)
    orders, counts = np.unique(found @ np.array([9, 3, 1]), return_counts=True)
    assert len(orders) == 6 and abs(counts - 1000).max() < 5 * math.sqrt(6000 * 5 / 36)


def test_more_folds_than_rows_are_refused() -> None:
    with pytest.raises(DataError, match="5 folds of 4 rows"):
        most_trained_on([4], 5)
    assert most_trained_on([7, 3], 5) == 9
