"""Conversions against their definitions, and round trips."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting import conversions

RHOS = [1e-8, 1e-3, 0.1, 0.78125, 5.0, 200.0, 1e14]
DELTAS = [0.3, 1e-5, 1e-12, 1e-80]


def exact_gaussian_delta(mu: float, epsilon: float) -> mp.mpf:
    m, e = mp.mpf(mu), mp.mpf(epsilon)
    return mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 1.0, 3.0, 20.0])
def test_gaussian_delta_is_balle_and_wangs_formula(mu: float, share: float) -> None:
    with mp.workdps(400):
        epsilon = mu * mu / 2 + share * mu if share else 0.0
        exact = exact_gaussian_delta(mu, epsilon)
        assert abs(mp.mpf(conversions.gaussian_delta(mu, epsilon)) / exact - 1) < 1e-9


@pytest.mark.parametrize("mu", [1e-3, 0.05, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("delta", DELTAS)
def test_gaussian_epsilon_inverts_delta_from_above(mu: float, delta: float) -> None:
    epsilon = conversions.gaussian_epsilon(mu, delta)
    assert conversions.gaussian_delta(mu, epsilon) <= delta
    if epsilon > 0:
        assert conversions.gaussian_delta(mu, epsilon * (1 - 1e-9)) > delta


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("delta", DELTAS)
def test_tight_zcdp_is_the_minimum_over_orders(rho: float, delta: float) -> None:
    tight = conversions.tight_zcdp_epsilon(rho, delta)
    centre = math.log(math.log(1 / delta) / rho) / 2
    orders = [1 + math.exp(centre + i / 50) for i in range(-400, 400)]
    slow = max(0.0, min(conversions.renyi_epsilon(order, rho * order, delta) for order in orders))
    assert tight <= slow * (1 + 1e-12) + 1e-15
    assert tight >= slow * (1 - 1e-3)
    assert tight <= conversions.bun_steinke_epsilon(rho, delta)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("delta", DELTAS)
def test_zcdp_round_trips(rho: float, delta: float) -> None:
    for there, back in (
        (conversions.bun_steinke_epsilon, conversions.bun_steinke_delta),
        (conversions.tight_zcdp_epsilon, conversions.tight_zcdp_delta),
    ):
        epsilon = there(rho, delta)
        if epsilon > 0:
            assert math.log(back(rho, epsilon)) == pytest.approx(math.log(delta), abs=1e-6)


@given(rho=st.floats(1e-6, 50), delta=st.floats(1e-12, 0.5))
@settings(max_examples=60, deadline=None)
def test_a_gaussian_costs_at_most_what_its_rho_says(rho: float, delta: float) -> None:
    exact = conversions.gaussian_epsilon(math.sqrt(2 * rho), delta)
    assert exact <= conversions.tight_zcdp_epsilon(rho, delta) * (1 + 1e-9) + 1e-12


def test_corners() -> None:
    assert conversions.gaussian_epsilon(0.0, 1e-5) == 0
    assert conversions.gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert conversions.bun_steinke_delta(0.5, 0.4) == 1
    assert conversions.tight_zcdp_epsilon(0.0, 1e-5) == 0
    assert conversions.tight_zcdp_delta(0.0, 1.0) == 0
    assert conversions.tight_zcdp_delta(math.inf, 1.0) == 1


def test_minimise_finds_the_bottom_of_a_quasi_convex_function() -> None:
    assert conversions.minimise(lambda x: abs(x - 0.3) ** 0.5, -5, 5) == pytest.approx(0.3, abs=1e-6)


POINTS = [-30.0, -6.0, -1.5, 0.0, 0.3, 2.0, 5.999, 6.0, 6.001, 12.0, 40.0, 1e4]


@pytest.mark.parametrize("x", POINTS)
def test_mills_ratio(x: float) -> None:
    with mp.workdps(60):
        exact = mp.erfc(mp.mpf(x) / mp.sqrt(2)) / 2 / mp.npdf(mp.mpf(x))
        assert abs(mp.mpf(conversions.mills_ratio(x)) / exact - 1) < 2e-13


def test_mills_ratio_is_infinite_where_it_leaves_the_range_of_floats() -> None:
    assert conversions.mills_ratio(-50) == float("inf")
