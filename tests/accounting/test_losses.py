"""Discretised losses dominate the mechanism they stand for, and lose little."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from dpsgd_cli.accounting.conversions import gaussian_delta
from dpsgd_cli.accounting.losses import Losses
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP
from dpsgd_cli.errors import FailedAccountant
from tests.accounting.releases import Dots, discretise


def hockey_stick(loss: Dots, width: float, epsilon: float) -> float:
    gaps = -np.expm1(np.minimum(epsilon - loss.cells * width, 0))
    return float(loss.infinite + (loss.masses * gaps).sum())


def exact(rate: float, noise: float, epsilon: float, remove: bool) -> float:
    """Integral of max(0, p - e^epsilon q) on a fine grid."""
    x = np.linspace(-14 * noise, 1 + 14 * noise, 400_001)
    without = norm.pdf(x, 0, noise)
    mixed = (1 - rate) * without + rate * norm.pdf(x, 1, noise)
    p, q = (mixed, without) if remove else (without, mixed)
    return float(np.maximum(p - np.exp(epsilon) * q, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.4, 0.8), (0.05, 5.0), (0.95, 2.0)])
@pytest.mark.parametrize("epsilon", [-0.02, 0.0, 0.013, 0.4])
def test_sampled_gaussian_is_dominated_in_both_directions(rate: float, noise: float, epsilon: float) -> None:
    mechanism = GaussianSum(noise, "add-remove", "poisson", rate)
    width = 0.02 * mechanism.losses()[0].moments()[1] ** 0.5
    pair = discretise(mechanism, width)
    for loss, remove in ((pair.remove, True), (pair.add, False)):
        true = exact(rate, noise, epsilon, remove)
        assert hockey_stick(loss, width, epsilon) >= true * (1 - 1e-6) - 1e-12
        assert hockey_stick(loss, width, epsilon) <= true * 1.01 + 1e-9


@pytest.mark.parametrize("rate", [1.0, 0.999999])
def test_unsampled_gaussian_is_the_closed_form(rate: float) -> None:
    mechanism = GaussianSum(2.0, "add-remove", "poisson", rate)
    pair = discretise(mechanism, 0.005)
    for epsilon in (0.0, 0.3, 2.0):
        assert hockey_stick(pair.remove, 0.005, epsilon) == pytest.approx(gaussian_delta(0.5, epsilon), rel=1e-3)


@pytest.mark.parametrize("mechanism", [GaussianSum(1.3, "add-remove", "poisson", 0.02), PureDP(0.37, "add-remove")])
def test_masses_are_those_of_two_probability_distributions(mechanism: GaussianSum | PureDP) -> None:
    pair = discretise(mechanism, 0.01)
    for loss in (pair.remove, pair.add):
        assert loss.masses.min() >= 0
        assert loss.masses.sum() + loss.infinite == pytest.approx(1, abs=1e-12)
        # Q's total mass, E e^-L, is what connecting the dots keeps.
        assert (loss.masses * np.exp(-loss.cells * 0.01)).sum() == pytest.approx(1, abs=1e-9)


def test_rounding_losses_down_instead_would_not_dominate() -> None:
    """The wrong-direction control: the same masses one cell lower understate delta."""
    loss = discretise(GaussianSum(1.0, "add-remove", "poisson", 0.05), 0.01).remove
    lowered = loss._replace(cells=loss.cells - 1)
    assert hockey_stick(lowered, 0.01, 0.1) < exact(0.05, 1.0, 0.1, remove=True)


def test_approximate_release_leaks_its_delta() -> None:
    loss = discretise(ApproximateDP(0.5, 1e-3, "add-remove"), 0.01).remove
    assert loss.infinite == 1e-3
    assert hockey_stick(loss, 0.01, 0.51) == pytest.approx(1e-3)
    assert hockey_stick(discretise(PureDP(0.0, "add-remove"), 0.01).remove, 0.01, 0.0) == 0


def two_ends(epsilon: float, top: float, at: float) -> float:
    """Hockey-stick of a loss that is `top` or `top - epsilon`, e^-loss of mean 1 (Dong, Durfee and Rogers 2020)."""
    likely = np.expm1(epsilon - top) / (np.exp(epsilon - top) - np.exp(-top))
    return float(likely * max(0, -np.expm1(at - top)) + (1 - likely) * max(0, -np.expm1(at - top + epsilon)))


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 9.0])
def test_exponential_mechanism_is_the_worst_range_at_every_epsilon(epsilon: float) -> None:
    width = epsilon / 300
    loss = discretise(PureDP(epsilon, "add-remove", "exponential"), width).remove
    for at in np.linspace(-epsilon, epsilon, 13):
        worst = max(two_ends(epsilon, top, at) for top in np.linspace(0, epsilon, 2001))
        mine = hockey_stick(loss, width, at)
        assert worst * (1 - 1e-6) - 1e-12 <= mine <= worst * 1.001 + 1e-3 * epsilon * width


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 9.0])
def test_laplace_is_the_integral_of_its_densities(epsilon: float) -> None:
    width = epsilon / 300
    loss = discretise(PureDP(epsilon, "add-remove", "laplace"), width).remove
    x = np.linspace(-40 / epsilon, 1 + 40 / epsilon, 800_001)
    p, q = (epsilon / 2 * np.exp(-epsilon * np.abs(x - shift)) for shift in (0, 1))
    for at in np.linspace(-epsilon, epsilon, 13):
        true = float(np.maximum(p - np.exp(at) * q, 0).sum() * (x[1] - x[0]))
        mine = hockey_stick(loss, width, at)
        assert true * (1 - 1e-4) - 1e-9 <= mine <= true * 1.001 + 1e-3 * epsilon * width + 1e-4
        if at >= 0:
            assert mine == pytest.approx(-np.expm1((at - epsilon) / 2), rel=1e-4, abs=1e-3 * width)


def test_losses_above_709_keep_their_masses() -> None:
    """Multiplier 0.02 has a mean loss of 1250; exp of it overflows."""
    for width in (0.05, 1.0):
        loss = discretise(GaussianSum(0.02, "add-remove"), width).remove
        for epsilon in (1100.0, 1250.0, 1400.0):
            true = gaussian_delta(50.0, epsilon)
            assert true * (1 - 1e-9) <= hockey_stick(loss, width, epsilon) <= true * 1.02 + 1e-6


@pytest.mark.parametrize("masses", [[0.5, 0.4], [0.5, np.nan], [np.inf, 0.5]])
def test_masses_that_do_not_add_up_are_a_failure_and_not_a_number(masses: list[float]) -> None:
    with pytest.raises(FailedAccountant, match="not to 1"):
        Losses(np.array(masses), *(np.array([0.0, 1.0]),) * 3).dots(1.0)
