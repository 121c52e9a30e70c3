"""Batches: each record independently at its rate (Poisson), partitions (shuffle), everything (full).

Statistical tests use fixed seeds; each accepts with probability above 1 - 1e-6 over seeds, and rejects a control.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpsgd_cli.core.sampling import (
    Batch,
    FullSampler,
    PoissonSampler,
    Sampler,
    ShuffleSampler,
    SingleSampler,
    SteadySampler,
)
from dpsgd_cli.core.streams import SecureStreams, SeededStreams, Streams

LEAST = 1e-6
RECORDS, BATCH, STEPS = 6, 2, 3000
MakeStreams = Callable[[int], Sequence[Streams]]


@pytest.fixture(params=["seeded", "secure"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeStreams:
    """Streams of so many trials; the operating system's entropy is replaced by a generator with a seed."""
    if request.param == "seeded":
        return lambda trials: [SeededStreams(100 + trial) for trial in range(trials)]
    monkeypatch.setattr(os, "urandom", np.random.default_rng(1).bytes)
    return lambda trials: [SecureStreams() for _ in range(trials)]


def present(sampler: Sampler, step: int, trial: int, records: int) -> np.ndarray:
    """How often each record is in a trial's batch."""
    batch = sampler.batch(step)
    assert batch.rows is not None
    rows = batch.rows[trial] if batch.mask is None else batch.rows[trial][batch.mask[trial]]
    return np.bincount(rows, minlength=records)


def inclusions(sampler: Sampler, steps: int, records: int, trials: int = 2) -> np.ndarray:
    """(trials, steps, records)."""
    return np.stack([[present(sampler, step, trial, records) for step in range(steps)] for trial in range(trials)])


def unlikely(count: int, n: int, rate: float) -> float:
    """Two-sided tail probability of a binomial count."""
    return float(min(1.0, 2 * min(stats.binom.cdf(count, n, rate), stats.binom.sf(count - 1, n, rate))))


def worst_tail(seen: np.ndarray, rate: float) -> float:
    """Least tail probability, times their number, over records, pairs of records, successive steps and two trials."""
    first, second = seen
    steps, records = first.shape
    tails = [unlikely(int(own.sum()), steps, rate) for own in first.T]
    pairs = itertools.combinations(range(records), 2)
    tails += [unlikely(int((first[:, i] * first[:, j]).sum()), steps, rate**2) for i, j in pairs]
    tails += [unlikely(int(own.sum()), steps // 2, rate**2) for own in (first[0::2] * first[1::2]).T]
    tails += [unlikely(int(own.sum()), steps, rate**2) for own in (first * second).T]
    return min(tails) * len(tails)


class FixedSize(PoissonSampler):
    """A control: batches of exactly the expected size."""

    def batch(self, step: int) -> Batch:
        return Batch(np.stack([s.distinct("poisson", step, self._records, BATCH) for s in self._streams]))


def test_poisson_takes_each_record_independently_at_the_stated_rate(make: MakeStreams) -> None:
    sampler = PoissonSampler(make(2), RECORDS, BATCH)
    assert sampler.rate == BATCH / RECORDS
    seen = inclusions(sampler, STEPS, RECORDS)
    assert seen.max() == 1, "no record twice in a batch"
    assert worst_tail(seen, sampler.rate) > LEAST
    assert worst_tail(seen, 1.25 * sampler.rate) < LEAST
    assert worst_tail(seen, sampler.rate / 1.25) < LEAST


def test_a_batch_of_fixed_size_is_told_from_a_poisson_batch(make: MakeStreams) -> None:
    assert worst_tail(inclusions(FixedSize(make(2), RECORDS, BATCH), STEPS, RECORDS), BATCH / RECORDS) < LEAST


def test_poisson_batches_have_binomial_sizes(make: MakeStreams) -> None:
    seen = inclusions(PoissonSampler(make(1), RECORDS, BATCH), STEPS, RECORDS, trials=1)
    counts = np.bincount(seen[0].sum(axis=1), minlength=RECORDS + 1)
    assert counts[0] > 0, "some batches are empty"

    def tail(rate: float) -> float:
        law = stats.binom.pmf(np.arange(RECORDS + 1), RECORDS, rate) * STEPS
        return float(stats.chisquare(counts, law).pvalue)

    assert tail(BATCH / RECORDS) > LEAST
    assert tail(1.25 * BATCH / RECORDS) < LEAST


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(0, 50))
def test_poisson_pads_what_is_short(records: int, size: int, trials: int, step: int) -> None:
    """Alone and in a pack a trial has the same rows; the rest is masked."""
    size = min(size, records)
    pack = PoissonSampler([SeededStreams(seed) for seed in range(trials)], records, size)
    assert pack.steps_per_epoch == -(-records // size)
    batch = pack.batch(step)
    assert batch.rows is not None and batch.rows.dtype == np.int64
    for trial in range(trials):
        alone = PoissonSampler([SeededStreams(trial)], records, size).batch(step)
        assert alone.rows is not None and alone.mask is None
        mask = np.ones(batch.rows.shape[1], dtype=bool) if batch.mask is None else batch.mask[trial]
        assert batch.rows[trial][mask].tolist() == alone.rows[0].tolist()
        assert set(batch.rows[trial]) <= set(range(records))


@pytest.mark.parametrize("records", [10**5, 10**8])
def test_poisson_batches_of_many_records(make: MakeStreams, records: int) -> None:
    """400 batches of 100 expected: chi-square of where records lie, in 20 parts, with all that were left out.

    A rate 1.1 times as large is rejected, and so is a sampler that never reaches the last part.
    """
    sampler, parts = PoissonSampler(make(1), records, 100), 20
    drawn = [batch.rows[0] for batch in map(sampler.batch, range(400)) if isinstance(batch.rows, np.ndarray)]
    assert all(len(np.unique(rows)) == len(rows) for rows in drawn), "no record twice in a batch"
    assert len({rows.tobytes() for rows in drawn}) == 400
    counts = np.bincount(np.concatenate(drawn) * parts // records, minlength=parts)

    def tail(counts: np.ndarray, rate: float) -> float:
        mean = 400 * rate * records / parts
        return float(stats.chi2.sf(((counts - mean) ** 2 / (mean * (1 - rate))).sum(), parts))

    assert tail(counts, sampler.rate) > LEAST
    assert tail(counts, 1.1 * sampler.rate) < LEAST
    assert tail(np.append(counts[:-2], [counts[-2:].sum(), 0]), sampler.rate) < LEAST


def test_the_whole_as_a_poisson_batch_is_everything() -> None:
    batch = PoissonSampler([SeededStreams(0)], 5, 5).batch(0)
    assert batch.rows is not None and sorted(batch.rows[0].tolist()) == [0, 1, 2, 3, 4]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(0, 5))
def test_an_epoch_of_shuffled_batches_is_a_partition(records: int, size: int, trials: int, epoch: int) -> None:
    size = min(size, records)
    sampler = ShuffleSampler([SeededStreams(seed) for seed in range(trials)], records, size)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    batches = [sampler.batch(step) for step in steps]
    for trial in range(trials):
        rows = [batch.rows[trial] for batch in batches if batch.rows is not None]
        assert sorted(np.concatenate(rows).tolist()) == list(range(records))
        assert [len(own) for own in rows[:-1]] == [size] * (len(rows) - 1)
        assert all(batch.mask is None for batch in batches)


def test_epochs_and_trials_are_shuffled_anew_and_uniformly(make: MakeStreams) -> None:
    """Where records lie in 2000 epochs of 3 batches: alone, in pairs, an epoch later, and in another trial."""
    sampler, epochs = ShuffleSampler(make(2), RECORDS, BATCH), 2000
    order = np.empty((2, epochs, RECORDS), dtype=np.int64)
    for step in range(3 * epochs):
        batch = sampler.batch(step)
        assert batch.rows is not None
        for trial in range(2):
            order[trial, step // 3, batch.rows[trial]] = step % 3

    def even(first: np.ndarray, second: np.ndarray, same: float) -> bool:
        """Whether two records (or one, twice) are in the same batch as often as chance has it."""
        return bool(unlikely(int((first == second).sum()), first.size, same) > LEAST)

    for record in range(RECORDS):
        assert stats.chisquare(np.bincount(order[0, :, record], minlength=3)).pvalue > LEAST
        assert even(order[0, 0::2, record], order[0, 1::2, record], 1 / 3)
        assert even(order[0, :, record], order[1, :, record], 1 / 3)
        assert even(order[0, :, record], order[0, :, (record + 1) % RECORDS], 1 / 5)
        assert not even(order[0, :, record], order[0, :, (record + 1) % RECORDS], 1 / 3)
    assert not even(order[0], order[0], 1 / 3), "an order that is used twice is found"


def test_shuffled_batches_can_be_asked_for_again_when_seeded() -> None:
    first, again = (ShuffleSampler([SeededStreams(3)], 10, 4) for _ in range(2))
    wanted = [first.batch(step).rows for step in range(9)]
    for step in (8, 0, 4, 8):
        assert np.array_equal(again.batch(step).rows, wanted[step])  # type: ignore[arg-type]


def test_full_batches_are_everything() -> None:
    sampler = FullSampler()
    assert sampler.steps_per_epoch == 1
    assert sampler.batch(0).rows is None and sampler.batch(7).mask is None


def test_single_records_are_uniform_and_independent(make: MakeStreams) -> None:
    """6000 steps of 7 records: one record, two steps in a row, two trials; one that stands for two is found."""
    sampler = SingleSampler(make(2), 7)
    assert sampler.steps_per_epoch == 7
    drawn = np.concatenate([sampler.batch(step).rows for step in range(6000)], axis=1)
    assert drawn.shape == (2, 6000) and drawn.dtype == np.int64
    for rows in (drawn[0], drawn[1], 7 * drawn[0, 0::2] + drawn[0, 1::2], 7 * drawn[0] + drawn[1]):
        cells = 7 if rows.max() < 7 else 49
        assert stats.chisquare(np.bincount(rows, minlength=cells)).pvalue > LEAST
    merged = np.bincount(np.where(drawn[0] == 6, 5, drawn[0]), minlength=6)
    assert stats.chisquare(merged).pvalue < LEAST


@pytest.mark.parametrize("unit", [1, 5, 7, 64])
def test_steady_batches_have_whole_pieces_and_the_same_records(unit: int) -> None:
    streams = [SeededStreams(0), SeededStreams(1)]
    plain, steady = PoissonSampler(streams, 60, 6), SteadySampler(PoissonSampler(streams, 60, 6), unit)
    for step in range(20):
        wanted, found = plain.batch(step), steady.batch(step)
        assert found.rows is not None
        assert found.mask is not None
        assert wanted.rows is not None
        assert found.rows.shape[1] % unit == 0 < found.rows.shape[1]
        mask = np.ones(wanted.rows.shape, dtype=bool) if wanted.mask is None else np.asarray(wanted.mask)
        for trial in range(2):
            own = np.asarray(found.rows)[trial][np.asarray(found.mask)[trial]]
            assert own.tolist() == np.asarray(wanted.rows)[trial][mask[trial]].tolist()
