"""Privacy-loss distributions against dp-accounting's own composition, closed forms, and the hockey-stick integral."""

from __future__ import annotations

import functools
import math
import time

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import stats
from scipy.signal import fftconvolve

from dpsgd_cli.accounting.accountants.additive import Gaussian
from dpsgd_cli.accounting.accountants.pld import Pld
from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.conversions import gaussian_delta
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, GroupSum, Release
from tests.accounting.releases import full, poisson, pure, shuffled


def one_step_delta(rate: float, noise: float, epsilon: float) -> float:
    """The larger direction's hockey-stick divergence, in closed form."""
    with mp.workdps(40):
        q, z, e = mp.mpf(rate), mp.mpf(noise), mp.mpf(epsilon)

        def upper(x: mp.mpf) -> mp.mpf:
            return mp.erfc(x / mp.sqrt(2)) / 2

        point = z * z * mp.log((mp.exp(e) - 1 + q) / q) + mp.mpf(1) / 2
        remove = q * upper((point - 1) / z) - (mp.exp(e) - 1 + q) * upper(point / z)
        add = mp.mpf(0)
        if mp.exp(-e) > 1 - q:
            point = z * z * mp.log((mp.exp(-e) - 1 + q) / q) + mp.mpf(1) / 2
            below = 1 - upper(point / z)
            add = below - mp.exp(e) * ((1 - q) * below + q * (1 - upper((point - 1) / z)))
        return float(max(remove, add))


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.5, 1.0), (0.3, 4.0), (0.9, 0.6), (1e-3, 0.5)])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 2.0])
def test_one_step_is_the_closed_form_from_above(rate: float, noise: float, epsilon: float) -> None:
    exact = one_step_delta(rate, noise, epsilon)
    mine = Pld().delta([poisson(rate, noise, 1)], epsilon)
    assert mine >= exact * (1 - 1e-9)
    assert mine <= exact * 1.01 + 1e-13


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [
        (0.01, 4.0, 10**4, 1e-5),
        (0.004, 1.1, 14000, 1e-5),
        (0.08, 10.0, 875, 1e-6),
        (0.5, 1.0, 10, 1e-5),
        (0.01, 0.5, 1000, 1e-8),
        (0.999, 5.0, 30, 1e-5),
    ],
)
def test_composition_agrees_with_dp_accounting(rate: float, noise: float, steps: int, delta: float) -> None:
    theirs = oracle.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-4)
    composed = theirs.self_compose(steps).get_epsilon_for_delta(delta)
    assert Pld().epsilon([poisson(rate, noise, steps)], delta) == pytest.approx(composed, rel=1e-3)


def test_unlike_mechanisms_agree_with_dp_accounting() -> None:
    releases = [poisson(0.02, 2.0, 300), poisson(0.05, 3.0, 100), full(10.0, 2)]
    first, second, third = (
        oracle.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=1e-4)
        for noise, rate in ((2.0, 0.02), (3.0, 0.05), (10 / math.sqrt(2), 1.0))
    )
    composed = first.self_compose(300).compose(second.self_compose(100)).compose(third).get_epsilon_for_delta(1e-6)
    assert Pld().epsilon(releases, 1e-6) == pytest.approx(composed, rel=1e-3)


def test_pure_and_approximate_releases_agree_with_dp_accounting() -> None:
    releases = [pure(0.2, 20), Release(ApproximateDP(0.1, 1e-7, "add-remove"), 2)]
    loss, leaky = (
        oracle.from_privacy_parameters(
            common.DifferentialPrivacyParameters(epsilon, delta), value_discretization_interval=1e-4
        ).self_compose(count)
        for epsilon, delta, count in ((0.2, 0.0, 20), (0.1, 1e-7, 2))
    )
    composed = loss.compose(leaky).get_epsilon_for_delta(1e-5)
    assert Pld().epsilon(releases, 1e-5) == pytest.approx(composed, rel=1e-3)


@pytest.mark.parametrize("delta", [0.1, 1e-5])
def test_bounded_losses_are_the_sum_of_their_densities(delta: float) -> None:
    """Renyi orders aim past all of them. Six uses of an exponential mechanism: density e^(l/2) on [-1, 1], each."""
    releases = [pure(1.0, 6, "exponential")]
    middles = (np.arange(8000) + 0.5) / 4000 - 1
    one = np.exp(middles / 2) / np.exp(middles / 2).sum()
    whole = functools.reduce(fftconvolve, [one] * 6)
    losses = 6 * np.linspace(middles[0], middles[-1], len(whole))
    found = Pld().epsilon(releases, delta)
    exact = float((whole * np.maximum(-np.expm1(found - losses), 0)).sum())
    assert delta * 0.97 < exact < delta
    assert Pld().delta(releases, found) == pytest.approx(delta, rel=0.01)
    assert Pld().delta(releases, 6.0) == 0


@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
def test_full_batches_are_the_exact_gaussian(delta: float) -> None:
    releases = [shuffled(3.0, 20), Release(GaussianSum(8.0, "zero-out", "full"), 1)]
    assert Pld().epsilon(releases, delta) == pytest.approx(Gaussian().epsilon(releases, delta), rel=1e-9)


@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-12])
def test_a_sampled_step_beside_a_gaussian_costs_little_more_than_the_gaussian(delta: float) -> None:
    gaussian = full(2.0)
    alone = Gaussian().epsilon([gaussian], delta)
    together = Pld().epsilon([gaussian, poisson(1e-6, 4.0, 1)], delta)
    assert alone * (1 - 1e-9) <= together <= alone * 1.002


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta"),
    [(1e-6, 1.0, 1000, 1e-10), (0.01, 4.0, 10**7, 1e-5), (0.9, 1.0, 100, 1e-12)],
)
def test_extremes_stay_below_rdp_and_round_trip(rate: float, noise: float, steps: int, delta: float) -> None:
    releases = [poisson(rate, noise, steps)]
    epsilon = Pld().epsilon(releases, delta)
    assert 0 <= epsilon <= Rdp().epsilon(releases, delta)
    assert Pld().delta(releases, epsilon) == pytest.approx(delta, rel=0.02)


def test_deltas_far_below_rounding_keep_their_precision() -> None:
    releases = [poisson(0.01, 4.0, 10**4)]
    epsilon = Pld().epsilon(releases, 1e-18)
    assert math.log(Rdp().delta(releases, epsilon)) > math.log(1e-18)
    assert epsilon == pytest.approx(2.19, abs=0.1)
    assert Pld().delta(releases, epsilon) == pytest.approx(1e-18, rel=0.01)


def test_curve_is_the_epsilon_of_every_prefix() -> None:
    plan = [[poisson(0.01, 4 * 0.95**i, 100)] for i in range(12)]
    plan[0].insert(0, full(16.0))
    slow = [Pld().epsilon([r for epoch in plan[: i + 1] for r in epoch], 1e-5) for i in range(12)]
    assert Pld().curve(plan, 1e-5) == pytest.approx(slow, rel=2e-3)


def test_curve_never_falls_and_an_empty_epoch_costs_nothing() -> None:
    plan = [[], [poisson(0.02, 1.5, 50)], [], [poisson(0.02, 1.5, 50)]]
    curve = Pld().curve(plan, 1e-5)
    assert curve[0] == 0
    assert curve[1] == pytest.approx(curve[2], rel=1e-9)
    assert curve[3] > curve[2]


def revealed(noise: float, epsilon: float, steps: int = 100, rate: float = 0.01) -> float:
    """delta of k Gaussians, k of `steps` Poisson batches: what is stated if the steps with the record are revealed."""
    k = np.arange(1, steps + 1)
    return float(stats.binom.pmf(k, steps, rate) @ [gaussian_delta(math.sqrt(one) / noise, epsilon) for one in k])


@pytest.mark.parametrize("noise", [0.039, 0.01])
def test_little_noise_is_charged_for_the_steps_that_hold_a_record(noise: float) -> None:
    """One unsampled Gaussian for each of all steps was charged: 33,966 at .039. Little noise reveals which hold it."""
    made = [poisson(0.01, noise, 100)]
    found = Pld().epsilon(made, 1e-5)
    assert revealed(noise, found) <= 1e-5 < revealed(noise, found / 1.4)


def test_a_delta_too_small_for_masses_is_stated_by_renyi_orders() -> None:
    made = [poisson(0.01, 5.0, 1000)]
    assert Pld().epsilon(made, 1e-300) <= Rdp().epsilon(made, 1e-300)


def test_a_group_of_thousands_is_priced_in_seconds_and_no_less_than_its_mean_costs() -> None:
    """5,000 of a group and a rate of .01: about 50 are in a batch, and 1,000 steps of 30 alone are a Gaussian."""
    begun = time.process_time()
    made = [Release(GroupSum(1.0, "add-remove", "poisson", 0.01, size=5000), 1000)]
    found = Pld().epsilon(made, 1e-5)
    assert Pld().epsilon([full(1 / 30, 1000)], 1e-5) < found < Pld().epsilon([full(1 / 5000, 1000)], 1e-5) / 1000
    assert time.process_time() - begun < 20
