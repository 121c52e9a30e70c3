"""The one search: as little noise as the budget allows, and never less; from the safe side of every question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpsgd_cli.account.cases import Target, afforded
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.accounting.search import (
    NOISE,
    ExactSum,
    Interval,
    exceeds,
    gap_of,
    gap_of_sum,
    largest,
    smallest,
    solve_at_limit,
)
from dpsgd_cli.errors import InfeasibleBudget, UnsupportedMechanism
from tests.accounting.releases import poisson, pure, shuffled


def sampled(noise: float) -> list[Release]:
    return [poisson(0.01, noise, 1000)]


def calibrate(build: Callable[[float], list[Release]], accountant: Accountant, epsilon: float, delta: float) -> float:
    return afforded(lambda noise: accountant.epsilon(build(noise), delta), "noise-multiplier", Target(epsilon))


@pytest.mark.parametrize("name", ["rdp", "pld", "moments", "strong-composition"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 20.0])
def test_the_least_noise_that_satisfies_epsilon(name: str, epsilon: float) -> None:
    accountant = accountants.get(name)
    noise = calibrate(sampled, accountant, epsilon, 1e-5)
    assert accountant.epsilon(sampled(noise), 1e-5) <= epsilon
    # pld is monotone to the precision of its discretisation only
    assert accountant.epsilon(sampled(noise * (1 - (1e-3 if name == "pld" else 1e-6))), 1e-5) > epsilon


def test_a_schedule_is_calibrated_as_a_whole() -> None:
    def build(initial: float) -> list[Release]:
        return [poisson(0.01, initial * math.exp(-0.02 * i), 100) for i in range(30)]

    accountant = accountants.get("rdp")
    initial = calibrate(build, accountant, 1.0, 1e-5)
    assert accountant.epsilon(build(initial), 1e-5) <= 1.0 < accountant.epsilon(build(initial * (1 - 1e-6)), 1e-5)


def test_rho_is_met_to_the_last_bit() -> None:
    exact = replace(NOISE, precision=0.0)
    noise = solve_at_limit(lambda z: gap_of(total_rho([shuffled(z, 100)]), 0.78125), exact)
    assert noise == 8.0
    assert solve_at_limit(lambda z: gap_of_sum([0.5 / z**2] * 100, 0.78125), exact) == 8.0


def test_what_no_noise_affords_is_said() -> None:
    def build(noise: float) -> list[Release]:
        return [*sampled(noise), pure(2.0)]

    with pytest.raises(InfeasibleBudget, match=r"not even noise-multiplier 1e\+12 fits the budget 1"):
        calibrate(build, accountants.get("rdp"), 1.0, 1e-5)


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(UnsupportedMechanism, match="zcdp does not cover"):
        calibrate(sampled, accountants.get("zcdp"), 1.0, 1e-5)


def test_a_region_that_begins_at_some_noise_is_entered_from_above() -> None:
    """Lemma 15.2 speaks below epsilon 1 only: less noise is a refusal, not a price."""
    accountant = accountants.get("advanced-composition")
    noise = calibrate(sampled, accountant, 0.5, 1e-5)
    assert accountant.epsilon(sampled(noise), 1e-5) == pytest.approx(0.5, rel=1e-5)


def test_the_dear_end_of_the_span_is_an_answer() -> None:
    def gap(noise: float) -> float:
        return gap_of(accountants.get("zcdp").epsilon([shuffled(noise, 100)], 1e-5), 1e9)

    assert solve_at_limit(gap, replace(NOISE, expensive=0.5)) == 0.5


def test_a_refusal_where_the_budget_is_not_spent_is_a_refusal() -> None:
    """What costs least of what is covered is no answer to what the budget affords."""
    with pytest.raises(UnsupportedMechanism, match=r"below 1 .*it answers, and the budget is not spent there"):
        calibrate(sampled, accountants.get("advanced-composition"), 2.0, 1e-5)


@given(st.floats(1e-6, 1e6), st.sampled_from([1.0, 64.0]), st.booleans(), st.booleans())
def test_the_last_float_that_fits_is_found(limit: float, start: float, upwards: bool, known: bool) -> None:
    """Whether gaps or only answers are known, and whichever end is the cheap one."""
    cheap, dear = (1e9, 1e-9) if upwards else (1e-9, 1e9)

    def gap(value: float) -> float:
        beyond = value < limit if upwards else value > limit
        size = abs(math.log(value / limit)) if known else math.inf
        return max(size, 1e-300) if beyond else -size

    assert solve_at_limit(gap, Interval("number", cheap, dear, start)) == limit


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_last_whole_number_that_fits_is_found(limit: int, start: int) -> None:
    span = Interval("steps", cheap=1.0, expensive=float(1 << 26), start=float(start), whole=True)
    assert solve_at_limit(lambda steps: steps - limit, span) == limit
    downwards = replace(span, cheap=span.expensive, expensive=span.cheap)
    assert solve_at_limit(lambda period: limit - period, downwards) == limit


def test_where_nothing_fits_nothing_is_found() -> None:
    assert solve_at_limit(lambda value: math.inf, NOISE) is None
    assert solve_at_limit(lambda value: math.nan, NOISE) is None
    assert solve_at_limit(lambda value: -1.0, NOISE) == NOISE.expensive


def test_smallest_and_largest_stay_on_the_safe_side() -> None:
    assert (least := smallest(lambda x: x * x >= 2, 0.0, 10.0)) ** 2 >= 2
    assert (most := largest(lambda x: x * x <= 2, 0.0, 10.0)) ** 2 <= 2
    assert least == pytest.approx(math.sqrt(2), rel=1e-11)
    assert most == pytest.approx(math.sqrt(2), rel=1e-11)


def test_a_gap_says_on_which_side_an_exact_sum_is() -> None:
    """0.1 added ten times is above 1 before rounding (0.1 is a little more than a tenth), and 1.0 after it."""
    assert gap_of(math.fsum([0.1] * 10), 1.0) <= 0 < gap_of_sum([0.1] * 10, 1.0)
    assert gap_of_sum([0.25] * 4, 1.0) <= 0
    assert gap_of(math.inf, 1.0) == gap_of(math.nan, 1.0) == gap_of_sum([1e308] * 9, 1.0) == math.inf


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
@example([0.1] * 10, 1.0)
@example([1.0, 2.0**-60], 1.0)
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
