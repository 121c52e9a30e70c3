"""Streams: what they are a function of, and that their draws have the law that is promised.

Statistical tests use fixed seeds. Each accepts with probability above 1 - 1e-6 over seeds, and each rejects a control.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd_cli.engine import streams
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, Streams

LEAST = 1e-6
KINDS = [SeededStreams, SecureStreams]
FLOATS = [torch.float32, torch.float64]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[type], Streams]:
    """Streams of either kind; the operating system's entropy is replaced by a generator with a seed."""
    entropy = np.random.default_rng(0)
    monkeypatch.setattr(os, "urandom", entropy.bytes)
    return lambda kind: kind(7) if kind is SeededStreams else kind()


Make = Callable[[type], Streams]


def test_the_state_is_that_of_numpys_mersenne_twister() -> None:
    """The next 3000 outputs of a torch generator, beyond four refills of its 624 words."""
    words = np.random.SeedSequence(12345).generate_state(624, np.uint32).astype(np.uint32)
    generator = torch.Generator()
    generator.manual_seed(99)
    torch.empty(100).normal_(generator=generator)  # leaves a position and a cached normal behind
    generator.set_state(streams._mersenne_state(generator, words))
    ours = torch.empty(3000, dtype=torch.int64).random_(0, 2**24, generator=generator).numpy()
    reference = np.random.MT19937()
    reference.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    assert np.array_equal(ours, reference.random_raw(3000) % 2**24)


def test_the_state_holds_no_cached_normal() -> None:
    words = np.random.SeedSequence(1).generate_state(624, np.uint32)
    fresh, used = torch.Generator(), torch.Generator()
    torch.empty(1, dtype=torch.float64).normal_(generator=used)  # draws a pair and caches the second
    for generator in (fresh, used):
        generator.set_state(streams._mersenne_state(generator, words))
    first, second = (torch.empty(5, dtype=torch.float64).normal_(generator=g) for g in (fresh, used))
    assert torch.equal(first, second)


def draws(stream: Streams, purpose: str, counter: int) -> list[tuple[float, ...]]:
    """One of everything."""
    return [
        tuple(stream.normal(purpose, counter, torch.empty(20, dtype=torch.int64)).tolist()),
        tuple(stream.coins(purpose, counter)(64) for _ in range(5)),
        tuple(stream.distinct(purpose, counter, 10**6, 20).tolist()),
        tuple(stream.permutation(purpose, counter, 50).tolist()),
        (stream.bits(purpose, counter),),
    ]


def test_seeded_draws_depend_on_seed_purpose_and_counter_and_on_nothing_else() -> None:
    keys = list(itertools.product((0, 1, 2**40), ("noise", "poisson"), (0, 1, 5)))
    first = [draws(SeededStreams(seed), purpose, counter) for seed, purpose, counter in keys]
    again = [draws(SeededStreams(seed), purpose, counter) for seed, purpose, counter in reversed(keys)][::-1]
    assert first == again
    for kind in range(5):
        assert len({own[kind] for own in first}) == len(keys), "no two keys share a draw"
    assert len({SeededStreams(seed).integer(purpose) for seed, purpose, _ in keys}) == 6


def test_seeds_that_agree_in_their_low_32_bits_differ() -> None:
    """torch's own seeding of a CPU generator would not tell them apart."""
    assert draws(SeededStreams(3), "noise", 0) != draws(SeededStreams(3 + 2**32), "noise", 0)


def test_secure_draws_never_repeat() -> None:
    stream = SecureStreams()
    assert draws(stream, "noise", 0) != draws(stream, "noise", 0)
    assert stream.integer("init") != stream.integer("init")
    assert not stream.reproducible and SeededStreams(0).reproducible
    assert all(0 <= own.integer("init") < 2**63 for own in (stream, SeededStreams(4)))


def test_secure_streams_have_no_floating_point_normals() -> None:
    """Whose grid would betray the sum that they are added to."""
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(TypeError, match="drawn as integers"):
            SecureStreams().normal("noise", 0, torch.empty(3, dtype=dtype))


@pytest.mark.parametrize(
    ("kind", "dtype"), [*itertools.product(KINDS, [torch.int64]), *itertools.product([SeededStreams], FLOATS)]
)
def test_normals_are_standard_normal(make: Make, kind: type, dtype: torch.dtype) -> None:
    """Kolmogorov-Smirnov on 40,000 draws; scales 0.95 and 1.05 and a shift of 0.05 are rejected."""
    values = make(kind).normal("noise", 3, torch.empty(200, 200, dtype=dtype)).double().numpy().ravel()
    values = values / (1.0 if dtype.is_floating_point else 2.0**42)
    assert stats.kstest(values, "norm").pvalue > LEAST
    for wrong in (values * 0.95, values * 1.05, values + 0.05):
        assert stats.kstest(wrong, "norm").pvalue < LEAST


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_normals_are_not_correlated(make: Make, kind: type) -> None:
    """At 50 lags of 30,000 draws, those of Box-Muller pairs and of refills included; r sqrt(n) is standard normal."""
    stream, n = make(kind), 30_000
    values = stream.normal("noise", 0, torch.empty(n, dtype=torch.int64)).numpy() / 2.0**42
    bound = stats.norm.isf(LEAST / 2 / 50)
    for lag in [*range(1, 40), 256, 312, 511, 512, 513, 623, 624, 1248, n // 4, n // 2, 3 * n // 4]:
        assert abs(np.dot(values[lag:], values[:-lag])) / math.sqrt(n - lag) < bound
    assert abs(np.dot(values[1:], values[:-1] + 0.1 * values[1:])) / math.sqrt(n - 1) > bound


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_fair_and_independent(make: Make, kind: type) -> None:
    """Each of 512 bits over 2000 draws, and each with the next; bits that are 1 with probability 0.56 are not."""
    stream = make(kind)
    drawn = [stream.bits("poisson", counter) for counter in range(2000)]
    ones = np.array([[number >> place & 1 for place in range(512)] for number in drawn])
    for own in (ones, ones[:, 1:] ^ ones[:, :-1], ones[1:] ^ ones[:-1]):
        tails = [2 * stats.binom.sf(max(k, len(own) - k) - 1, len(own), 0.5) for k in own.sum(axis=0)]
        assert min(tails) * len(tails) > LEAST
    biased = np.random.default_rng(0).random(len(ones)) < 0.56
    assert stats.binom.sf(biased.sum() - 1, len(biased), 0.5) < LEAST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 5])
def test_distinct_is_a_uniform_set(make: Make, kind: type, size: int) -> None:
    """Chi-square over all sets of 2 or 5 of 7 (few of many, and most) in 4000 draws; those with 0 doubled are not."""
    stream = make(kind)
    sets = [tuple(sorted(stream.distinct("poisson", counter, 7, size).tolist())) for counter in range(4000)]
    assert all(len(set(own)) == size and set(own) <= set(range(7)) for own in sets)
    counts = Counter(sets)
    possible = list(itertools.combinations(range(7), size))
    assert stats.chisquare([counts[own] for own in possible]).pvalue > LEAST
    skewed = [counts[own] * (2 if 0 in own else 1) for own in possible]
    assert stats.chisquare(skewed).pvalue < LEAST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "size"), [(5, 0), (5, 5), (1, 1), (1000, 999), (10**6, 3000)])
def test_distinct_has_its_size(make: Make, kind: type, n: int, size: int) -> None:
    found = make(kind).distinct("poisson", 1, n, size)
    assert found.dtype == np.int64 and found.shape == (size,)
    assert len(set(found.tolist())) == size
    assert all(0 <= row < n for row in found)


@pytest.mark.parametrize("kind", KINDS)
def test_distinct_of_many_covers_them_evenly(make: Make, kind: type) -> None:
    """60 of 20,000, 300 times, in 20 bins of rows: chi-square; half more in the first bin is rejected."""
    stream = make(kind)
    rows = np.concatenate([stream.distinct("poisson", counter, 20_000, 60) for counter in range(300)])
    counts = np.bincount(rows // 1000, minlength=20)
    assert stats.chisquare(counts).pvalue > LEAST
    counts[0] = counts[0] * 3 // 2
    assert stats.chisquare(counts).pvalue < LEAST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 3 * 2**61])
def test_integers_of_many_are_as_likely_as_each_other(make: Make, kind: type, n: int) -> None:
    """6000 in thirds; of 3 2^61, 64 bits without rejection give the first two thirds 3 times for twice of the last."""
    stream = make(kind)
    drawn = np.concatenate([stream.integers("allocation", counter, n, 600) for counter in range(10)])
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < n
    counts = np.bincount(drawn // (n // 3), minlength=3)
    assert stats.chisquare(counts).pvalue > LEAST
    assert stats.chisquare(counts, np.array([3, 3, 2]) * 750).pvalue < LEAST
    later = drawn[np.arange(len(drawn)) % 600 != 0] // (n // 3), drawn[np.arange(len(drawn)) % 600 != 599] // (n // 3)
    assert stats.chisquare(np.bincount(3 * later[0] + later[1], minlength=9)).pvalue > LEAST


@pytest.mark.parametrize("kind", KINDS)
def test_permutations_are_uniform(make: Make, kind: type) -> None:
    """Chi-square over the 24 orders of 4 in 4000 draws; the orders that Sattolo's cycles leave out are missed."""
    stream = make(kind)
    orders = [tuple(stream.permutation("shuffle", counter, 4).tolist()) for counter in range(4000)]
    possible = list(itertools.permutations(range(4)))
    assert stats.chisquare([orders.count(own) for own in possible]).pvalue > LEAST
    deranged = [own for own in orders if all(place != row for place, row in enumerate(own))]
    assert stats.chisquare([deranged.count(own) for own in possible]).pvalue < LEAST
