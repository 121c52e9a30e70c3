"""Batches: each record independently at its rate (Poisson), partitions (shuffle), all (full); drawn ahead or not.

Statistical tests use fixed seeds; each accepts with probability above 1 - 1e-6 over seeds, and rejects a control.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpsgd_cli.batching import run as sampling
from dpsgd_cli.batching.run import (
    BITS,
    AheadSampler,
    AllocationSampler,
    BatchSizes,
    CyclicSampler,
    FixedSampler,
    FullSampler,
    PoissonSampler,
    Sampler,
    ShuffleSampler,
    WrappedSampler,
    _groups_of,
    batch_sizes,
    padded_to,
)
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.engine.tensors import Batch

LEAST = 1e-6
RECORDS, BATCH, STEPS = 6, 2, 2000
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


def test_allocated_records_choose_by_themselves(make: MakeStreams) -> None:
    """2000 epochs of 3 steps: each record alone, an epoch later, in another trial, and two of one epoch together.

    The last tells it from a partition of equal batches, of which two records share one in 1/5 of epochs, not 1/3.
    """
    sampler, epochs = AllocationSampler(make(2), RECORDS, BATCH), 2000
    order = np.full((2, epochs, RECORDS), -1, dtype=np.int64)
    for step in range(3 * epochs):
        for trial, rows in enumerate(records(sampler.batch(step))):
            assert (order[trial, step // 3, rows] == -1).all(), "no record in two steps of an epoch"
            order[trial, step // 3, rows] = step % 3
    assert order.min() == 0, "each record in one step"

    def even(first: np.ndarray, second: np.ndarray, same: float = 1 / 3) -> bool:
        return bool(unlikely(int((first == second).sum()), first.size, same) > LEAST)

    for record in range(RECORDS):
        own, beside = order[0, :, record], order[0, :, (record + 1) % RECORDS]
        assert stats.chisquare(np.bincount(own, minlength=3)).pvalue > LEAST
        assert even(own[0::2], own[1::2]) and even(own, order[1, :, record]) and even(own, beside)
        assert not even(own, beside, 1 / 5)


def test_batches_of_one_size_are_uniform_sets_drawn_anew(make: MakeStreams) -> None:
    """How often two records are together is that of draws without replacement, not of draws by themselves."""
    sampler = FixedSampler(make(2), RECORDS, BATCH)
    seen = inclusions(sampler, STEPS, RECORDS)
    assert (seen.sum(axis=2) == BATCH).all()
    rate, both = BATCH / RECORDS, BATCH * (BATCH - 1) / (RECORDS * (RECORDS - 1))
    pairs = list(itertools.combinations(range(RECORDS), 2))
    together = [int((seen[0, :, i] & seen[0, :, j]).sum()) for i, j in pairs]
    assert min(unlikely(count, STEPS, both) for count in together) > LEAST
    assert min(unlikely(count, STEPS, rate**2) for count in together) < LEAST
    assert min(unlikely(int(own.sum()), STEPS // 2, rate**2) for own in (seen[0, 0::2] & seen[0, 1::2]).T) > LEAST
    assert min(unlikely(int(own.sum()), STEPS, rate**2) for own in (seen[0] & seen[1]).T) > LEAST


def test_shuffled_batches_can_be_asked_for_again_when_seeded() -> None:
    first, again = (ShuffleSampler([SeededStreams(3)], 10, 4) for _ in range(2))
    wanted = [first.batch(step).rows for step in range(9)]
    for step in (8, 0, 4, 8):
        assert np.array_equal(again.batch(step).rows, wanted[step])  # type: ignore[arg-type]


def test_single_records_are_uniform_and_independent(make: MakeStreams) -> None:
    """6000 steps of 7 records: one record, two steps in a row, two trials; one that stands for two is found."""
    sampler = FixedSampler(make(2), 7, 1)
    assert sampler.steps_per_epoch == 7
    drawn = np.concatenate([sampler.batch(step).rows for step in range(6000)], axis=1)
    assert drawn.shape == (2, 6000) and drawn.dtype == np.int64
    assert not np.array_equal(drawn[:, : 6000 - 4096], drawn[:, 4096:]), "another block of 4096 is drawn anew"
    for rows in (drawn[0], drawn[1], 7 * drawn[0, 0::2] + drawn[0, 1::2], 7 * drawn[0] + drawn[1]):
        cells = 7 if rows.max() < 7 else 49
        assert stats.chisquare(np.bincount(rows, minlength=cells)).pvalue > LEAST
    merged = np.bincount(np.where(drawn[0] == 6, 5, drawn[0]), minlength=6)
    assert stats.chisquare(merged).pvalue < LEAST


@pytest.mark.parametrize("unit", [1, 5, 7, 64])
def test_steady_batches_have_whole_pieces_and_the_same_records(unit: int) -> None:
    streams = [SeededStreams(0), SeededStreams(1)]
    plain = PoissonSampler(streams, 60, 6)
    steady = WrappedSampler(PoissonSampler(streams, 60, 6), lambda step, batch: padded_to(unit, batch))
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


def law_of(sizes: BatchSizes, records: int) -> list[Fraction]:
    """The exact law of `draw`: how many of the 2^512 numbers give each size, found by bisection on them."""

    def first_above(size: int) -> int:
        low, high = 0, 1 << BITS
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if sizes.draw(middle) <= size else (low, middle)
        return low

    ends = [0, *(first_above(size) for size in range(records + 1))]
    return [Fraction(b - a, 1 << BITS) for a, b in itertools.pairwise(ends)]


@given(st.integers(1, 40), st.integers(1, 40))
def test_the_law_is_binomial_to_2_to_the_minus_100(records: int, expected: int) -> None:
    expected = min(records, expected)
    rate = Fraction(expected, records)
    exact = [comb(records, k) * rate**k * (1 - rate) ** (records - k) for k in range(records + 1)]
    ours = law_of(BatchSizes(records, expected), records)
    assert sum(ours) == 1
    assert sum(abs(a - b) for a, b in zip(ours, exact, strict=True)) / 2 < Fraction(1, 2**100)


def test_a_law_that_is_a_little_off_is_found() -> None:
    """The control of the test above: 53-bit floating point, or a neighbouring rate."""
    rate, ours = Fraction(3, 10), law_of(BatchSizes(10, 3), 10)
    floats = [Fraction(float(stats.binom.pmf(k, 10, 0.3))) for k in range(11)]
    other = [
        comb(10, k) * (rate + Fraction(1, 2**90)) ** k * (1 - rate - Fraction(1, 2**90)) ** (10 - k) for k in range(11)
    ]
    for wrong in (floats, other):
        assert sum(abs(a - b) for a, b in zip(ours, wrong, strict=True)) / 2 > Fraction(1, 2**100)


@pytest.mark.parametrize(("records", "expected"), [(10**8, 1024), (10**8, 1), (10**6, 600_000), (7, 7), (10**12, 4096)])
def test_probabilities_of_many_records(records: int, expected: int) -> None:
    """Against SciPy's floats, within 12 deviations of the mean; nothing outside 0..N."""
    sizes, deviation = batch_sizes(records, expected), (expected * (1 - expected / records)) ** 0.5
    around = range(max(0, int(expected - 12 * deviation)), min(records, int(expected + 12 * deviation)) + 1)
    ours = np.array([sizes.probability(k) for k in around])
    np.testing.assert_allclose(ours, stats.binom.pmf(np.array(around), records, expected / records), rtol=1e-7)
    assert ours.sum() == pytest.approx(1, abs=1e-9)
    assert sizes.probability(-1) == sizes.probability(records + 1) == 0
    assert sizes.draw(0) >= 0 and sizes.draw((1 << BITS) - 1) <= records


def test_sizes_drawn_from_a_stream() -> None:
    """Chi-square on 3000 draws at 10^8 records; a rate 1.05 times as large is rejected."""
    sizes, stream = BatchSizes(10**8, 100), SeededStreams(5)
    drawn = np.array([sizes.draw(stream.bits("poisson", step)) for step in range(3000)])
    cuts = np.array([-1, 80, 90, 95, 100, 105, 110, 120, 10**8])

    def tail(rate: float) -> float:
        law = np.diff(stats.binom.cdf(cuts, 10**8, rate))
        return float(stats.chisquare(np.histogram(drawn, cuts + 0.5)[0], law * len(drawn)).pvalue)

    assert tail(1e-6) > LEAST
    assert tail(1.05e-6) < LEAST


@pytest.mark.parametrize(("records", "expected"), [(5, 0), (5, 6), (1 << 41, 5)])
def test_sizes_without_a_proof_are_refused(records: int, expected: int) -> None:
    with pytest.raises(ValueError, match=f"expected size {expected} of {records} records"):
        BatchSizes(records, expected)


CPU = torch.device("cpu")
STREAMS = [SeededStreams(3), SeededStreams(4)]
SAMPLERS = {
    "poisson": lambda: PoissonSampler(STREAMS, 50, 7),
    "poisson-one": lambda: PoissonSampler(STREAMS[:1], 50, 7),
    "nearly-empty": lambda: PoissonSampler(STREAMS, 1000, 1),
    "shuffle": lambda: ShuffleSampler(STREAMS, 50, 7),
    "single": lambda: FixedSampler(STREAMS, 50, 1),
    "fixed": lambda: FixedSampler(STREAMS, 50, 7),
    "allocation": lambda: AllocationSampler(STREAMS, 50, 7),
}


def records(batch: Batch) -> list[list[int]]:
    """The records of each trial, padding taken away."""
    rows = np.asarray(batch.rows)
    mask = np.ones(rows.shape, dtype=bool) if batch.mask is None else np.asarray(batch.mask)
    return [row[own].tolist() for row, own in zip(rows, mask, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("room", [1, 100, 1 << 21])
def test_each_step_has_its_own_records(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_NUMBERS_AT_ONCE", room)
    sampler: Sampler = SAMPLERS[name]()
    drawn = AheadSampler(SAMPLERS[name](), CPU)
    assert drawn.steps_per_epoch == sampler.steps_per_epoch
    for step in range(3 * min(sampler.steps_per_epoch, 10)):
        assert records(drawn.batch(step)) == records(sampler.batch(step))


def test_steps_may_be_asked_for_from_anywhere() -> None:
    drawn, sampler = AheadSampler(SAMPLERS["poisson"](), CPU), SAMPLERS["poisson"]()
    for step in (20, 3, 3, 21, 0):
        assert records(drawn.batch(step)) == records(sampler.batch(step))


def test_sizes_that_vary_by_chance_have_few_widths() -> None:
    sampler = AheadSampler(PoissonSampler(STREAMS, 10_000, 100), CPU)
    batches = [sampler.batch(step) for step in range(300)]
    assert len({batch.rows.shape[1] for batch in batches if batch.rows is not None}) <= 4
    assert all(batch.mask is not None for batch in batches)


def test_batches_of_known_sizes_are_not_padded() -> None:
    sampler = AheadSampler(SAMPLERS["shuffle"](), CPU)
    widths = [np.asarray(sampler.batch(step).rows).shape[1] for step in range(8)]
    assert widths == [7] * 7 + [1]
    assert all(sampler.batch(step).mask is None for step in range(8))


def test_every_record_stays_every_record() -> None:
    assert AheadSampler(FullSampler(), CPU).batch(0) == Batch(rows=None)


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 100, 511, 513, 4096])
def test_a_width_is_rounded_up_by_a_sixteenth_at_most(width: int) -> None:
    assert max(1, width) <= sampling._rounded_up(width) <= max(1, width * 17 / 16)


def test_a_cyclic_batch_takes_each_record_of_its_group_at_the_stated_rate(make: MakeStreams) -> None:
    """Groups of two records in turn: of their own steps each record is in one independently of the other."""
    sampler = CyclicSampler(make(2), [SeededStreams(7), SeededStreams(7)], 12, 2, [3, 3])
    seen = inclusions(sampler, 3 * STEPS, 12)
    groups = _groups_of(SeededStreams(7), 12, 3)
    assert sorted(set(groups.tolist())) == [0, 1, 2] and len(set(np.bincount(groups).tolist())) > 1, "of unequal sizes"
    for group in range(3):
        own = seen[:, group::3]
        assert not own[:, :, groups != group].any(), "no record is in another group's step"
        members = own[:, :, groups == group]
        # 3 groups, batches of 2 of 12: rate 1/2 whatever the group holds
        assert worst_tail(members, 0.5) > LEAST
        assert worst_tail(members, 0.4) < LEAST and worst_tail(members, 2 / 12) < LEAST


def test_each_record_draws_its_group_by_itself() -> None:
    """Uniform and pairwise independent; one record less leaves the groups of those before it as they are."""
    drawn = np.stack([_groups_of(SeededStreams(seed), 6, 3) for seed in range(3000)])
    for i, j in itertools.combinations(range(6), 2):
        table = np.bincount(3 * drawn[:, i] + drawn[:, j], minlength=9)
        assert stats.chisquare(table).pvalue > LEAST / 15
    # equal parts of a permutation would tell one record's group from the others'
    assert len({tuple(np.bincount(own, minlength=3)) for own in drawn}) > 10
    for seed in range(5):
        whole = _groups_of(SeededStreams(seed), 6, 3)
        assert whole[:4].tolist() == _groups_of(SeededStreams(seed), 4, 3).tolist()


def test_one_group_is_poisson_batches() -> None:
    streams, size = [SeededStreams(3), SeededStreams(4)], 5
    plain, cyclic = PoissonSampler(streams, 40, size), CyclicSampler(streams, streams, 40, size, [1, 1])
    assert plain.steps_per_epoch == cyclic.steps_per_epoch == 8
    assert np.array_equal(inclusions(plain, 30, 40), inclusions(cyclic, 30, 40))
    # beside a trial with other groups, too
    mixed = CyclicSampler(streams, streams, 40, size, [4, 1])
    assert np.array_equal(inclusions(plain, 30, 40)[1], inclusions(mixed, 30, 40)[1])
