"""The best attacker against closed forms (Neyman and Pearson), 40-digit numbers, and dp-accounting's own profiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import stats
from scipy.optimize import minimize_scalar

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release, ZeroConcentrated
from dpsgd_cli.accounting.tradeoff import LEAST_ERROR, RATES, TradeoffCurve, best_attacker, gaussian_power, strongest
from dpsgd_cli.errors import PrivacyError
from tests.accounting.releases import full, poisson, pure, shuffled


def normal(x: mp.mpf) -> mp.mpf:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def quantile(share: float) -> mp.mpf:
    return mp.findroot(lambda x: normal(x) - mp.mpf(share), mp.mpf(-2))


def power(profile: Callable[[float], float], rate: float) -> float:
    """The largest true positive rate that a profile allows, by a search over epsilon for the least of both bounds."""
    bounds = (
        lambda e: math.exp(e) * rate + profile(e),
        lambda e: 1 - math.exp(-e) * (1 - rate - profile(e)),
    )
    ends, least = 60 * np.linspace(0, 1, 25) ** 3, 1.0
    for bound in bounds:
        best = int(np.argmin([bound(float(e)) for e in ends]))
        within = ends[max(best - 1, 0)], ends[min(best + 1, 24)]
        found = minimize_scalar(bound, bounds=within, method="bounded", options={"xatol": 1e-7}).x
        least = min(least, bound(float(ends[best])), bound(float(found)))
    return max(rate, least)


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
def test_some_epsilons_of_a_profile_give_nearly_the_curve_and_never_less(mu: float, rate: float) -> None:
    """delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), whose conjugate is the curve."""

    def profile(epsilon: float) -> float:
        with mp.workdps(30):
            first = normal(mp.mpf(mu) / 2 - epsilon / mp.mpf(mu))
            return float(first - mp.exp(epsilon) * normal(-mp.mpf(mu) / 2 - epsilon / mp.mpf(mu)))

    exact = gaussian_power(mu, rate)
    assert exact * (1 - 1e-12) <= TradeoffCurve.of_profile(profile, "").power(rate) <= exact * (1 + 2e-3)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.2, 2.0), (0.5, 0.6), (0.9, 1.0)])
@pytest.mark.parametrize("false_positives", RATES)
def test_one_sampled_step_is_what_neyman_and_pearson_say(rate: float, noise: float, false_positives: float) -> None:
    """N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2): the likelihood ratio grows with the output."""
    with mp.workdps(40):
        shifted = normal(quantile(false_positives) + 1 / mp.mpf(noise))
        exact = float((1 - mp.mpf(rate)) * mp.mpf(false_positives) + mp.mpf(rate) * shifted)
    found = best_attacker([poisson(rate, noise)])
    assert not found.exact and found.proved_by == "pld"
    assert exact * (1 - 1e-12) <= found.true_positives[false_positives] <= exact * (1 + 1e-4)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 4.0, 10_000), (0.18, 4.0, 240), (0.05, 0.7, 20)])
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
    assert found.proved_by == "rdp" and found.mu > 1
    for rate in RATES:
        gaussian = gaussian_power(1.0, rate)  # rho = mu^2 / 2
        assert gaussian < found.true_positives[rate] < 2 * gaussian


@pytest.mark.parametrize("releases", [[poisson(0.1, 0.8, 30)], [pure(0.3, 4)], [poisson(0.1, 2.0, 9), pure(0.5)]])
def test_the_answer_is_a_bound_of_every_profile_that_holds(releases: list[Release]) -> None:
    """A looser profile gives a looser bound, and nobody guesses worse than a coin with that bias."""
    found = best_attacker(releases)
    for rate in RATES:
        assert (
            rate
            <= found.true_positives[rate]
            <= TradeoffCurve.of_profile(Rdp().profile(releases, rate), "").power(rate)
            <= 1
        )
    assert 0.5 <= found.right <= 1


def test_no_release_leaves_a_coin_and_no_noise_leaves_nothing() -> None:
    nothing = best_attacker([])
    assert (nothing.mu, nothing.right, nothing.true_positives[0.01]) == (0.0, 0.5, pytest.approx(0.01))
    everything = best_attacker([Release(GaussianSum(0.0, "add-remove", "poisson", 0.1))])
    assert everything.true_positives == {0.01: 1.0, 0.001: 1.0}
    assert everything.mu == math.inf and not everything.exact


def test_what_no_profile_covers_is_refused_with_reasons() -> None:
    mixed = [pure(1.0), Release(PureDP(1.0, "replace-one"))]
    with pytest.raises(PrivacyError, match="different adjacencies"):
        best_attacker(mixed)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_gaussian_nearest_to_pure_privacy_meets_it_where_both_errors_are_equal(epsilon: float) -> None:
    """f(a) = max(1 - e^eps a, e^-eps (1 - a)) has one corner, 1 / (1 + e^eps) on both axes; all else is above N(mu)."""
    found = best_attacker([pure(epsilon)])
    assert found.mu == pytest.approx(2 * stats.norm.ppf(1 / (1 + math.exp(-epsilon))), rel=1e-7)
    alpha = np.linspace(1e-9, 0.5, 20_001)
    line = np.maximum(1 - math.exp(epsilon) * alpha, math.exp(-epsilon) * (1 - alpha))
    assert regret_of(alpha, line, found.mu) == pytest.approx(found.regret, rel=1e-2)


def regret_of(alpha: np.ndarray, missed: np.ndarray, mu: float) -> float:
    """The least k with f(x + k) - k <= f_mu(x) for all x: the definition, by bisection over a grid of x."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        k = (low + high) / 2
        inside = alpha[alpha + k <= alpha[-1]]
        fits = np.all(np.interp(inside + k, alpha, missed) - k <= stats.norm.cdf(stats.norm.isf(inside) - mu))
        low, high = (low, k) if fits else (k, high)
    return high


def neyman_pearson(rate: float, noise: float, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the tests {x > points} of N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2)."""
    alpha = stats.norm.sf(points / noise)
    return alpha, (1 - rate) * stats.norm.cdf(points / noise) + rate * stats.norm.cdf((points - 1) / noise)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.2, 2.0), (0.5, 0.6), (0.9, 1.0)])
def test_the_gaussian_nearest_to_one_sampled_step_is_the_least_below_its_exact_curve(rate: float, noise: float) -> None:
    points = np.linspace(-9 * noise, 9 * noise + 1, 400_001)
    alpha, missed = neyman_pearson(rate, noise, points)
    inside = (np.minimum(alpha, missed) >= LEAST_ERROR) & (np.minimum(1 - alpha, 1 - missed) >= LEAST_ERROR)
    exact = float(np.max(stats.norm.isf(alpha[inside]) + stats.norm.isf(missed[inside])))
    found = best_attacker([poisson(rate, noise)])
    assert exact * (1 - 1e-9) <= found.mu <= exact * (1 + 1e-3)


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "mu", "regret"),
    [(0.328, 9.4, 2000, 1.56843, 0.0010), (0.08192, 10.0, 875, 0.24517, 0.0005)],
)
def test_mu_of_sampled_training_is_that_of_gdpnum(
    rate: float, noise: float, steps: int, mu: float, regret: float
) -> None:
    """gdpnum 0.1.2, whose grid is coarser or finer than ours: 1e-4 apart."""
    found = best_attacker([poisson(rate, noise, steps)])
    assert found.mu == pytest.approx(mu, rel=1e-4)
    assert found.regret == pytest.approx(regret, abs=1e-4)


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.001, 1.0, 50_000)])
def test_mu_of_sampled_training_is_between_dp_accountings_two_profiles(rate: float, noise: float, steps: int) -> None:
    """gdpnum says .43936 for the first, though the optimistic profile has an attack of 1e-5 that needs .4530."""
    found = best_attacker([poisson(rate, noise, steps)])
    least, most = (
        oracle.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            value_discretization_interval=2e-4,
            use_connect_dots=sure,
            pessimistic_estimate=sure,
        ).self_compose(steps)
        for sure in (False, True)
    )
    rates = [LEAST_ERROR, 1e-8, 1e-5, 1e-3, 0.1]

    def needed(profile: oracle.PrivacyLossDistribution) -> float:
        powers = [power(profile.get_delta_for_epsilon, rate) for rate in rates]
        return float(max(stats.norm.isf(rates) - stats.norm.isf(powers)))

    assert needed(least) * (1 - 1e-9) <= found.mu <= needed(most) * (1 + 3e-3)


def test_of_several_trials_the_largest_mu_holds_and_its_regret_bounds_the_distance() -> None:
    small, large = best_attacker([full(2.0)]), best_attacker([pure(3.0)])
    both = strongest([small, large])
    assert (both.mu, both.regret) == (large.mu, large.regret) and both.mu > small.mu
    assert strongest([small, small]) == small and strongest([small, best_attacker([full(4.0)])]).mu == 0.5


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 2.0), (0.5, 0.6)])
def test_the_curve_is_that_of_the_worse_of_both_null_hypotheses(rate: float, noise: float) -> None:
    """Without the record as the null, large outputs reject it; with the record as the null, small ones do."""
    points = np.linspace(-9 * noise, 9 * noise + 1, 200_001)
    alpha, missed = neyman_pearson(rate, noise, points)
    rates = (0.01, 0.3, 0.7, 0.95)
    found = best_attacker([poisson(rate, noise)], rates)
    for one in rates:
        without = float(np.interp(one, alpha[::-1], 1 - missed[::-1]))
        within = float(np.interp(one, missed, 1 - alpha))
        assert found.true_positives[one] == pytest.approx(max(without, within), rel=2e-4)
        assert found.true_positives[one] >= max(without, within) * (1 - 1e-6)


def test_a_profile_is_the_larger_of_both_directions() -> None:
    pld = accountants.get("pld")
    profile = pld.profile([poisson(0.01, 1.0, 100)], 1e-6)
    assert profile(0.5) == pytest.approx(pld.delta([poisson(0.01, 1.0, 100)], 0.5), rel=1e-4)
