"""A running total equals the correctly rounded sum of all terms, whatever their number and size."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.privacy.exact_sum import ExactSum, exceeds

TERMS = st.lists(st.floats(min_value=0, max_value=1e300, allow_subnormal=True), max_size=60)


@given(TERMS, st.floats(min_value=0, max_value=1e300))
def test_the_total_is_the_exact_sum_rounded_once(terms: list[float], extra: float) -> None:
    running = ExactSum()
    for term in terms:
        running.add(term)
    assert running.total() == float(sum(map(Fraction, terms)))
    assert running.total(extra) == float(sum(map(Fraction, [*terms, extra])))
    assert running.total() == float(sum(map(Fraction, terms)))


def test_adding_one_by_one_in_floats_would_not_do() -> None:
    terms = [1.0, *[1e-16] * 1000]
    running, naive = ExactSum(), 0.0
    for term in terms:
        running.add(term)
        naive += term
    assert naive == 1.0
    assert running.total() == math.fsum(terms) > 1.0


def test_ten_thousand_equal_terms_are_held_as_a_few() -> None:
    running = ExactSum()
    for _ in range(10_000):
        running.add(0.1)
    assert running.total() == float(10_000 * Fraction(0.1))
    assert len(running._parts) < 5


def test_what_passes_the_range_of_floats_is_infinite() -> None:
    for terms in ([math.inf], [1.0, math.inf, 2.0], [1.7e308, 1.7e308], [math.inf, math.inf]):
        running = ExactSum()
        for term in terms:
            running.add(term)
        assert running.total() == math.inf
    running = ExactSum()
    running.add(1.7e308)
    assert running.total(1.7e308) == math.inf
    assert running.total() == 1.7e308


@given(TERMS, st.floats(min_value=0, max_value=1e300))
def test_a_limit_is_passed_where_the_exact_sum_is_above_it(terms: list[float], limit: float) -> None:
    running = ExactSum()
    for term in terms[1:]:
        running.add(term)
    above = sum(map(Fraction, terms)) > Fraction(limit)
    assert exceeds(terms, limit) == above
    assert running.passes(limit, terms[0] if terms else 0.0) == above


@pytest.mark.parametrize("terms", [[1.0, 2.0**-60], [math.nan], [math.inf], [1.7e308, 1.7e308]])
def test_a_limit_is_passed_by_less_than_rounding_shows_and_by_what_is_no_number(terms: list[float]) -> None:
    assert exceeds(terms, 1.0)
    assert not exceeds([0.5, 0.5], 1.0)
