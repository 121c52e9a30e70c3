"""Sizes of Poisson batches: the binomial law in exact fractions, and draws of it."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpsgd_cli.core.batch_sizes import BITS, BatchSizes, batch_sizes
from dpsgd_cli.core.streams import SeededStreams

LEAST = 1e-6


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
