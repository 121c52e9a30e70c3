"""The best attacker against closed forms (Neyman and Pearson), 40-digit numbers, and dp-accounting's own profiles."""

from __future__ import annotations

import math

import mpmath as mp
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle

from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release, ZeroConcentrated
from dpsgd_cli.accounting.tradeoff import RATES, best_attacker, gaussian_power, power
from dpsgd_cli.errors import PrivacyError
from tests.accounting.releases import full, poisson, pure, shuffled


def normal(x: mp.mpf) -> mp.mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def quantile(share: float) -> mp.mpf:
    return mp.findroot(lambda x: normal(x) - mp.mpf(share), mp.mpf(-2))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(
    ("releases", "mu"),
    [
        ([full(0.5)], 2.0),
        ([full(4.0, 25)], 1.25),
        ([shuffled(3.0, 9)], 1.0),
        ([full(2.0, 3), full(1.0)], math.sqrt(1.75)),
        ([full(100.0)], 0.01),
    ],
)
def test_gaussians_are_exact(releases: list[Release], mu: float, rate: float) -> None:
    with mp.workdps(40):
        expected = float(normal(quantile(rate) + mp.mpf(mu)))
        right = float(normal(mp.mpf(mu) / 2))
    found = best_attacker(releases)
    assert found.mu == pytest.approx(mu, rel=1e-14)
    assert found.true_positives[rate] == pytest.approx(expected, rel=1e-12)
    assert found.right == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("mu", [0.05, 1.0, 3.0, 7.0])
@pytest.mark.parametrize("rate", [*RATES, 0.3, 0.9])
def test_the_search_over_a_profile_finds_the_curve_and_never_less(mu: float, rate: float) -> None:
    """delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), whose conjugate is the curve."""

    def profile(epsilon: float) -> float:
        with mp.workdps(30):
            first = normal(mp.mpf(mu) / 2 - epsilon / mp.mpf(mu))
            return float(first - mp.exp(epsilon) * normal(-mp.mpf(mu) / 2 - epsilon / mp.mpf(mu)))

    exact = gaussian_power(mu, rate)
    assert exact * (1 - 1e-12) <= power(profile, rate) <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.2, 2.0), (0.5, 0.6), (0.9, 1.0)])
@pytest.mark.parametrize("false_positives", RATES)
def test_one_sampled_step_is_what_neyman_and_pearson_say(rate: float, noise: float, false_positives: float) -> None:
    """N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2): the likelihood ratio grows with the output."""
    with mp.workdps(40):
        shifted = normal(quantile(false_positives) + 1 / mp.mpf(noise))
        exact = float((1 - mp.mpf(rate)) * mp.mpf(false_positives) + mp.mpf(rate) * shifted)
    found = best_attacker([poisson(rate, noise)])
    assert found.mu is None and found.proved_by == "pld"
    assert exact * (1 - 1e-12) <= found.true_positives[false_positives] <= exact * (1 + 1e-4)


@pytest.mark.parametrize(
    ("rate", "noise", "steps"), [(0.01, 4.0, 10_000), (0.18, 4.0, 240), (0.004, 1.1, 3500), (0.05, 0.7, 20)]
)
def test_sampled_steps_are_what_dp_accounting_has_and_never_below_its_optimistic_profile(
    rate: float, noise: float, steps: int
) -> None:
    found = best_attacker([poisson(rate, noise, steps)])
    sure, hopeful = (
        oracle.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            value_discretization_interval=2e-4,
            use_connect_dots=pessimistic,
            pessimistic_estimate=pessimistic,
        ).self_compose(steps)
        for pessimistic in (True, False)
    )
    for alpha in RATES:
        assert found.true_positives[alpha] == pytest.approx(power(sure.get_delta_for_epsilon, alpha), rel=1e-3)
        assert found.true_positives[alpha] >= power(hopeful.get_delta_for_epsilon, alpha) * (1 - 1e-9)


def test_randomised_response_is_its_two_lines() -> None:
    """epsilon-DP and nothing more: beta = min(e^epsilon alpha, 1 - e^-epsilon (1 - alpha))."""
    found = best_attacker([pure(1.0)])
    assert found.true_positives[0.01] == pytest.approx(math.e * 0.01, rel=1e-6)
    assert found.right == pytest.approx(math.e / (1 + math.e), rel=1e-6)
    certain = best_attacker([pure(8.0)])
    assert certain.true_positives[0.01] == pytest.approx(1 - math.exp(-8) * 0.99, rel=1e-6)


def test_a_budget_in_rho_is_bounded_by_its_renyi_divergences_and_never_below_the_gaussian_of_that_rho() -> None:
    found = best_attacker([Release(ZeroConcentrated(0.5, "add-remove"))])
    assert found.proved_by == "rdp" and found.mu is None
    for rate in RATES:
        gaussian = gaussian_power(1.0, rate)  # rho = mu^2 / 2
        assert gaussian < found.true_positives[rate] < 2 * gaussian


@pytest.mark.parametrize("releases", [[poisson(0.1, 0.8, 30)], [pure(0.3, 4)], [poisson(0.1, 2.0, 9), pure(0.5)]])
def test_the_answer_is_a_bound_of_every_profile_that_holds(releases: list[Release]) -> None:
    """A looser profile gives a looser bound, and nobody guesses worse than a coin with that bias."""
    found = best_attacker(releases)
    for rate in RATES:
        assert rate <= found.true_positives[rate] <= power(Rdp().profile(releases, rate), rate) <= 1
    assert 0.5 <= found.right <= 1


def test_no_release_leaves_a_coin_and_no_noise_leaves_nothing() -> None:
    nothing = best_attacker([])
    assert (nothing.mu, nothing.right, nothing.true_positives[0.01]) == (0.0, 0.5, pytest.approx(0.01))
    everything = best_attacker([Release(GaussianSum(0.0, "add-remove", "poisson", 0.1))])
    assert everything.true_positives == {0.01: 1.0, 0.001: 1.0}


def test_what_no_profile_covers_is_refused_with_reasons() -> None:
    mixed = [pure(1.0), Release(PureDP(1.0, "replace-one"))]
    with pytest.raises(PrivacyError, match="different adjacencies"):
        best_attacker(mixed)
