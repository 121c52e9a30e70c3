"""Renyi divergences against direct numerical integrals (mpmath) and dp-accounting."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as oracle

from dpsgd_cli.accounting import renyi


def integral(rate: float, noise: float, order: float, reverse: bool = False) -> mp.mpf:
    """D_alpha between the mixture and N(0, z^2), by quadrature."""
    with mp.workdps(30):
        q, z, a = mp.mpf(rate), mp.mpf(noise), mp.mpf(order)

        def ratio(x: mp.mpf) -> mp.mpf:
            return 1 - q + q * mp.exp(x / z - 1 / (2 * z * z))

        power = 1 - a if reverse else a
        high = float(a / z) + 15
        cuts = [-15 + i * (high + 15) / 24 for i in range(25)]
        return mp.log(mp.quad(lambda x: mp.npdf(x) * ratio(x) ** power, cuts)) / (a - 1)


@pytest.mark.parametrize("rate", [1e-8, 0.01, 0.9])
@pytest.mark.parametrize(("noise", "order"), [(0.3, 1.1), (0.3, 2.5), (0.8, 7.3), (1.0, 32), (4.0, 63.5), (20.0, 1.5)])
def test_poisson_divergence_is_its_integral(rate: float, noise: float, order: float) -> None:
    exact = integral(rate, noise, order)
    assert abs(renyi.poisson_gaussian_divergence(rate, noise, order) / exact - 1) < 1e-10


@pytest.mark.parametrize(("rate", "noise", "order"), [(0.01, 1.0, 3.0), (0.3, 0.8, 5.5), (0.05, 4.0, 20.0)])
def test_the_other_direction_is_smaller(rate: float, noise: float, order: float) -> None:
    assert integral(rate, noise, order, reverse=True) < renyi.poisson_gaussian_divergence(rate, noise, order)


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("noise", [0.3, 1.1, 4.0, 50.0])
def test_integer_orders_agree_with_dp_accounting(rate: float, noise: float) -> None:
    orders = [2, 3, 5, 8, 20, 64, 256]
    theirs = oracle._compute_rdp_poisson_subsampled_gaussian(rate, noise, orders)
    for order, value in zip(orders, theirs, strict=True):
        # Theirs takes the logarithm of a sum near 1, which costs it 1e-16 absolute.
        mine = renyi.poisson_gaussian_divergence(rate, noise, order)
        assert mine == pytest.approx(value, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("rate", "noise", "order"), [(0.01, 1.5, 2.5), (0.1, 2.0, 6.7), (0.02, 0.9, 9.1)])
def test_fractional_orders_are_not_above_dp_accounting(rate: float, noise: float, order: float) -> None:
    # Theirs adds up an alternating series in absolute value, which can only overstate.
    theirs = oracle._compute_rdp_poisson_subsampled_gaussian(rate, noise, [order])[0]
    mine = renyi.poisson_gaussian_divergence(rate, noise, order)
    assert mine <= theirs * (1 + 1e-9)
    assert mine >= theirs * 0.9


def test_corners_of_sampling_and_noise() -> None:
    assert renyi.poisson_gaussian_divergence(0.0, 1.0, 3.0) == 0
    assert renyi.poisson_gaussian_divergence(0.5, 0.0, 3.0) == math.inf
    assert renyi.poisson_gaussian_divergence(1.0, 2.0, 3.0) == pytest.approx(3 / 8)
    assert renyi.poisson_gaussian_divergence(0.5, 0.09, 3.0) == renyi.gaussian_divergence(0.09, 3.0)


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 8.0, 400.0])
@pytest.mark.parametrize("order", [1.01, 2.0, 7.5, 300.0])
def test_pure_divergence_is_that_of_randomised_response(epsilon: float, order: float) -> None:
    with mp.workdps(400):
        large = 1 / (1 + mp.exp(-mp.mpf(epsilon)))
        moment = large**order * (1 - large) ** (1 - order) + (1 - large) ** order * large ** (1 - order)
        exact = mp.log(moment) / (order - 1)
        assert abs(renyi.pure_divergence(epsilon, order) / exact - 1) < 1e-8


def test_bounded_range_halves_the_slope_at_small_epsilon() -> None:
    assert renyi.pure_divergence(0.1, 2.0, bounded_range=True) == pytest.approx(2 * 0.01 / 8)
    assert renyi.pure_divergence(0.1, 2.0) > 3.9 * 2 * 0.01 / 8
    assert renyi.pure_divergence(5.0, 1e6, bounded_range=True) <= 5.0


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.1, 2.0), (0.02, 0.5), (0.001, 20.0)])
def test_fixed_size_bound_is_no_more_than_that_of_dp_accounting(rate: float, noise: float) -> None:
    """Wang, Balle and Kasiviswanathan 2019, Theorem 27, which bounds every pair; ours is that of the worst losses."""
    orders = [2, 3, 6.5, 7, 20, 64]
    theirs = oracle._compute_rdp_sample_wor_gaussian(rate, noise, orders)
    for order, value in zip(orders, theirs, strict=True):
        assert renyi.fixed_size_gaussian_divergence(rate, noise, order) <= min(value, order / (2 * noise**2))


CASES = [(0.1, 1.0, 2.0), (0.5, 2.0, 4.0), (0.02, 0.7, 3.0), (0.01, 0.3, 1.5), (0.02, 0.3, 12.0), (0.001, 4.0, 30.0)]


@pytest.mark.parametrize(("rate", "noise", "order"), CASES)
def test_replaced_records_have_the_divergences_of_their_worst_pairs(rate: float, noise: float, order: float) -> None:
    """By mpmath: a Poisson batch's own pair; of fixed batches, losses of one direction above 0, of the other below."""
    with mp.workdps(30):
        q, z, a = mp.mpf(rate), mp.mpf(noise), mp.mpf(order)

        def mixture(x: mp.mpf, shift: mp.mpf) -> mp.mpf:
            return (1 - q) * mp.npdf(x, 0, z) + q * mp.npdf(x, shift, z)

        def integral(of: Callable[[mp.mpf], mp.mpf], low: float, high: float) -> mp.mpf:
            return mp.quad(of, [low + i * (high - low) / 40 for i in range(41)])

        moment = integral(
            lambda x: mixture(x, 0.5) ** a * mixture(x, -0.5) ** (1 - a), -0.5 - 12 * noise, 12 * noise + order
        )
        assert renyi.replaced_divergence(rate, noise, order) == pytest.approx(float(mp.log(moment) / (a - 1)), rel=1e-9)

        def both(x: mp.mpf) -> mp.mpf:
            ratio = 1 - q + q * mp.exp((x - mp.mpf(1) / 2) / z**2)
            return mp.npdf(x, 0, z) * (ratio**a - ratio + ratio ** (1 - a) - 1)

        moment = 1 + integral(both, 0.5, 12 * noise + order)
        found = renyi.fixed_size_gaussian_divergence(rate, noise, order)
        assert found == pytest.approx(float(mp.log(moment) / (a - 1)), rel=1e-9)
        assert renyi.replaced_divergence(rate, noise, order) <= found


@pytest.mark.parametrize("epsilon", [0.01, 0.7, 5.0])
@pytest.mark.parametrize("order", [1.01, 2.0, 32.0])
def test_laplace_noise_is_the_integral_of_its_densities(epsilon: float, order: float) -> None:
    """In 30 digits; a scale half as large, or a sensitivity of 2, is another number."""

    def divergence(epsilon: float) -> float:
        with mp.workdps(30):
            eps, alpha = mp.mpf(epsilon), mp.mpf(order)

            def powered(x: mp.mpf) -> mp.mpf:
                return eps / 2 * mp.exp(-eps * (alpha * abs(x) + (1 - alpha) * abs(x - 1)))

            whole = mp.quad(powered, [-mp.inf, -10 / eps, 0, 1, 1 + 10 / eps, mp.inf])
            return float(mp.log(whole) / (alpha - 1))

    found = renyi.laplace_divergence(epsilon, order)
    assert found == pytest.approx(divergence(epsilon), rel=1e-9)
    assert found != pytest.approx(divergence(2 * epsilon), rel=1e-2)
    assert found <= renyi.pure_divergence(epsilon, order)


RATES = np.array([1e-6, 0.001, 0.01, 0.2, 0.9])
NOISES = np.array([0.4, 1.0, 3.0, 12.0, 60.0])


@pytest.mark.parametrize("order", [1.001, 1.5, 2.0, 7.3, 32.0, 63.0, 512.0])
def test_many_mechanisms_at_once(order: float) -> None:
    rates, noises = (grid.ravel() for grid in np.meshgrid(RATES, NOISES))
    slow = [renyi.poisson_gaussian_divergence(q, z, order) for q, z in zip(rates, noises, strict=True)]
    np.testing.assert_allclose(renyi.poisson_gaussian_divergences(rates, noises, order), slow, rtol=1e-10)


def test_an_order_of_its_own_for_each() -> None:
    orders = np.array([1.2, 3.0, 8.8, 40.0, 2.5])
    slow = [renyi.poisson_gaussian_divergence(q, z, a) for q, z, a in zip(RATES, NOISES, orders, strict=True)]
    np.testing.assert_allclose(renyi.poisson_gaussian_divergences(RATES, NOISES, orders), slow, rtol=1e-10)
