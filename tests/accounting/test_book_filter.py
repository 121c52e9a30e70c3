"""The filter of a book: its limits and prices by formulas of SciPy and losses of dp-accounting, and an analyst who
chooses by what was seen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import norm

from dpsgd_cli.accounting import book_filter
from dpsgd_cli.accounting.book_filter import Price, Spending, fits, limits
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP, Release, ZeroConcentrated
from dpsgd_cli.errors import UnsupportedMechanism

EPSILON, DELTA = 3.0, 1e-5


def delta_of(mu: float, epsilon: Any) -> Any:
    """Analytic Gaussian mechanism, Balle and Wang 2018, Theorem 8; true for every sign of epsilon."""
    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


def epsilon_of(mu: float, delta: float) -> float:
    return float(brentq(lambda epsilon: delta_of(mu, epsilon) - delta, 0, 200, xtol=1e-12))


def full(noise: float, count: int = 1) -> Spending:
    return Spending((Release(GaussianSum(noise, "add-remove"), count),))


def poisson(noise: float, rate: float, count: int) -> Spending:
    return Spending((Release(GaussianSum(noise, "add-remove", "poisson", rate), count),))


def test_the_limits_are_the_gaussian_of_nine_tenths_of_delta_and_a_tenth_of_leaks() -> None:
    found = limits(EPSILON, DELTA)
    mu = brentq(lambda mu: delta_of(mu, EPSILON) - 0.9 * DELTA, 0.1, 10, xtol=1e-14)
    assert found.mu_squared == pytest.approx(mu**2, rel=1e-9)
    assert found.leak == pytest.approx(0.1 * DELTA, rel=1e-12)
    assert delta_of(math.sqrt(found.mu_squared), EPSILON) + found.leak <= DELTA


def test_ten_gaussian_runs_cost_far_less_than_ten_epsilons() -> None:
    """Ten runs of epsilon 1: by SciPy together 3.64, not 10; a book of 3.65 holds them and no eleventh."""
    mu = brentq(lambda mu: delta_of(mu, 1.0) - DELTA, 0.01, 10, xtol=1e-14)
    together = epsilon_of(math.sqrt(10) * mu, 0.9 * DELTA)
    assert together == pytest.approx(3.64, abs=0.005)
    limit, one = limits(together + 0.01, DELTA), full(1 / mu).price(1e-6)
    assert one.mu_squared == pytest.approx(mu**2, rel=1e-12) and one.leak == 0
    assert fits(limit, [one] * 9, one) and not fits(limit, [one] * 10, one)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.01, 1000), (2.0, 0.05, 400)])
def test_a_sampled_run_is_dominated_by_what_it_is_charged_and_by_little_less(
    noise: float, rate: float, steps: int
) -> None:
    found = poisson(noise, rate, steps).price(DELTA / 10)
    assert found.leak == pytest.approx(DELTA / 160, rel=1e-12)
    mu = math.sqrt(found.mu_squared)
    # rounded up, by less than 0.1% of each delta (connect the dots)
    losses = pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-3)
    grid = np.linspace(0, 12, 600)
    deltas = losses.self_compose(steps).get_delta_for_epsilon(grid)

    def dominates(mu: float) -> bool:
        return bool((deltas <= (found.leak + (1 - found.leak) * delta_of(mu, grid)) * 1.001).all())

    assert dominates(mu)
    assert not dominates(mu * 0.98)


def test_sampled_runs_cost_little_more_than_their_losses_composed() -> None:
    """Epsilon of five runs by the filter, and by dp-accounting as if all had been fixed beforehand: 13% apart."""
    one = poisson(1.0, 0.01, 1000).price(DELTA / 10)
    together = epsilon_of(math.sqrt(5 * one.mu_squared), 0.9 * DELTA)
    composed = pld.from_gaussian_mechanism(1.0, sampling_prob=0.01).self_compose(5000).get_epsilon_for_delta(DELTA)
    assert composed < together < 1.13 * composed
    assert together < 0.6 * 5 * poisson(1.0, 0.01, 1000).epsilon(DELTA)


def test_a_profile_is_dominated_between_the_points_that_are_looked_at() -> None:
    """A staircase falls right after a point of the grid: only a bound on whole cells sees its upper edge."""
    end = 2.0

    def stairs(epsilon: float) -> float:
        return 0.0 if epsilon > end else 0.3 * (1 - math.floor(epsilon * 10) / 10 / end) + 1e-3

    mu = book_filter.dominating_mu(stairs, 1e-4)
    grid = np.linspace(0, 2.5, 25_001)
    assert (np.vectorize(stairs)(grid) <= 1e-4 + (1 - 1e-4) * delta_of(mu, grid)).all()


def test_pure_and_approximate_releases_have_their_own_mu_and_leak() -> None:
    pure = Spending((Release(PureDP(1.0, "add-remove"), 3),)).price(1e-6)
    # the curve of mu touches the corner of randomised response: Dong, Roth and Su 2022
    assert pure.mu_squared == pytest.approx(3 * (2 * norm.ppf(math.e / (1 + math.e))) ** 2, rel=1e-9)
    approximate = Spending((Release(ApproximateDP(1.0, 1e-7, "add-remove"), 3),)).price(1e-6)
    assert approximate.mu_squared == pytest.approx(pure.mu_squared, rel=1e-12)
    assert approximate.leak == pytest.approx(3e-7, rel=1e-6)


def test_what_is_known_by_zcdp_alone_is_charged_by_its_profile() -> None:
    """rho-zCDP promises less than its Gaussian, so it costs more: never less than 2 rho."""
    found = Spending((Release(ZeroConcentrated(0.05, "add-remove")),)).price(1e-6)
    assert 0.1 < found.mu_squared < 0.3


@pytest.mark.parametrize("spending", [full(0.0), poisson(0.0, 0.1, 1), Spending(profiles=(lambda epsilon: 1.0,))])
def test_what_nothing_bounds_never_fits(spending: Spending) -> None:
    assert not fits(limits(1e3, 0.5), [], spending.price(0.05))


def test_what_no_accountant_covers_is_refused() -> None:
    sampled = GaussianSum(1.0, "zero-out", "random-allocation", 0.1)
    mixed = Spending((Release(sampled), Release(GaussianSum(1.0, "add-remove", "poisson", 0.1))))
    with pytest.raises(UnsupportedMechanism):
        mixed.price(1e-6)


def test_sums_are_exact_and_overflow_is_too_much() -> None:
    limit = Price(0.3, 1.0)
    assert fits(limit, [Price(0.1, 0.0)], Price(0.1, 0.0))
    assert not fits(limit, [Price(0.1, 0.0), Price(0.2, 0.0)], Price(1e-18, 0.0))
    assert not fits(Price(1e308, 1.0), [Price(1e308, 0.0)], Price(1e308, 0.0))
    assert not fits(limit, [], Price(math.nan, 0.0)) and not fits(limit, [], Price(math.inf, 0.0))
    assert not fits(limit, [Price(0.0, 0.9)], Price(0.0, 0.2))


def test_leaks_never_run_out_by_sampled_runs_alone() -> None:
    limit, spent = limits(EPSILON, DELTA), list[Price]()
    for _ in range(2):
        left = book_filter.left(limit, spent)
        more = Price(0.0, poisson(1.0, 0.01, 10).price(left.leak).leak)
        assert more.leak > 0 and fits(limit, spent, more)
        spent.append(more)
    assert math.isinf(poisson(1.0, 0.01, 10).price(0.0).mu_squared)


def test_an_analyst_who_chooses_by_what_was_seen_gets_no_further_than_delta() -> None:
    """First half of mu^2; then, by the outcome x, the analyst stops, or takes the rest and all leaks. The best choice
    at each x gives the hockey-stick divergence at epsilon, by numerical integration. It stays below delta, but not by
    much: with 3% more mu^2, or the leaks beside the whole delta, it is above."""

    def reached(limit: Price) -> float:
        mu = math.sqrt(limit.mu_squared / 2)
        xs = np.linspace(-12, 12 + mu, 40_001)
        losses = mu * xs - mu**2 / 2
        goes_on = limit.leak + (1 - limit.leak) * delta_of(mu, EPSILON - losses)
        stops = np.maximum(0, 1 - np.exp(EPSILON - losses))
        return float(np.trapezoid(np.maximum(goes_on, stops) * norm.pdf(xs - mu), xs))

    limit = limits(EPSILON, DELTA)
    assert 0.99 * DELTA < reached(limit) <= DELTA * (1 + 1e-6)
    assert reached(Price(limit.mu_squared * 1.03, limit.leak)) > DELTA
    whole = brentq(lambda mu: delta_of(mu, EPSILON) - DELTA, 0.1, 10) ** 2
    assert reached(Price(whole, limit.leak)) > 1.05 * DELTA


def test_what_is_left_is_told_from_below() -> None:
    for mu_squared in (0.01, 0.3, 5.0):
        for runs in (1, 10):
            told = book_filter.epsilon_of_next(mu_squared, DELTA, runs)
            assert told <= epsilon_of(math.sqrt(mu_squared / runs), DELTA) < told + 1.1e-4
