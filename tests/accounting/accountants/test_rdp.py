"""Renyi accountants against dp-accounting and an exhaustive search over orders; the moments as direct integrals."""

from __future__ import annotations

import itertools
import math

import mpmath as mp
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as oracle

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants.rdp import ORDERS, MarkovRdp, Moments, Profile, Rdp
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from tests.accounting.releases import full, poisson

INTEGERS = [2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 128, 256]


@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 6.0])
def test_epsilon_agrees_with_dp_accounting_on_the_same_orders(rate: float, noise: float) -> None:
    once = oracle._compute_rdp_poisson_subsampled_gaussian(rate, noise, INTEGERS)
    for steps, delta in itertools.product((1, 1000, 10**7), (1e-5, 1e-12)):
        theirs, _ = oracle.compute_epsilon(INTEGERS, steps * once, delta)
        mine = Rdp(INTEGERS).epsilon([poisson(rate, noise, steps)], delta)
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("noise", "steps"), [(0.5, 10), (1.0, 3000), (4.0, 10**5)])
def test_delta_agrees_with_dp_accounting_on_the_same_orders(noise: float, steps: int) -> None:
    rdp = steps * oracle._compute_rdp_poisson_subsampled_gaussian(0.01, noise, INTEGERS)
    for epsilon in (0.5, 2.0, 10.0):
        theirs, _ = oracle.compute_delta(INTEGERS, rdp, epsilon)
        mine = Rdp(INTEGERS).delta([poisson(0.01, noise, steps)], epsilon)
        assert mine == pytest.approx(theirs, rel=1e-8)


@pytest.mark.parametrize(
    "release",
    [
        poisson(0.01, 4, 10**4),
        poisson(0.2, 0.5, 50),
        poisson(1e-4, 0.7, 10**5),
        poisson(0.01, 0.3, 10**6),
        poisson(0.05, 40, 3),
        Release(GaussianSum(5.0, "zero-out", "shuffle"), 20),
        Release(GaussianSum(500.0, "add-remove", "full"), 1),
        Release(GaussianSum(9.0, "replace-one", "fixed", 0.01), 500),
        Release(PureDP(0.3, "add-remove"), 12),
    ],
)
def test_the_search_over_orders_finds_the_least(release: Release) -> None:
    profile = Profile([release])
    every = min(conversions.renyi_epsilon(order, profile.total(order), 1e-5) for order in ORDERS)
    assert Rdp().epsilon([release], 1e-5) == pytest.approx(max(0.0, every), rel=1e-12, abs=1e-15)


def test_many_noise_multipliers_cost_the_same_in_arrays_as_one_by_one() -> None:
    releases = [poisson(0.01, 10 * math.exp(-0.02 * i), 100) for i in range(40)]
    near = [order for order in ORDERS if 5 <= order <= 40]
    total = {order: sum(Profile([r]).total(order) for r in releases) for order in near}
    slow = min(conversions.renyi_epsilon(order, value, 1e-5) for order, value in total.items())
    assert Rdp().epsilon(releases, 1e-5) == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize("epochs", [3, 25])
def test_curve_is_the_epsilon_of_every_prefix(epochs: int) -> None:
    plan = [[poisson(0.01, 5 * 0.97**i, 100)] for i in range(epochs)]
    plan[0].insert(0, Release(GaussianSum(16.0, "add-remove"), 1))
    slow = [Rdp().epsilon([r for epoch in plan[: i + 1] for r in epoch], 1e-5) for i in range(epochs)]
    assert Rdp().curve(plan, 1e-5) == pytest.approx(slow, rel=1e-9)


def test_improved_conversion_beats_markovs() -> None:
    releases = [poisson(0.01, 4, 10**4)]
    assert Rdp().epsilon(releases, 1e-5) < MarkovRdp().epsilon(releases, 1e-5)


def log_moment(rate: float, noise: float, moment: int) -> mp.mpf:
    """max of log E_mix (mix/p0)^lambda and log E_p0 (p0/mix)^lambda (Abadi et al. 2016, equations 3 and 4)."""
    with mp.workdps(25):
        q, z = mp.mpf(rate), mp.mpf(noise)

        def ratio(x: mp.mpf) -> mp.mpf:
            return 1 - q + q * mp.exp(x / z - 1 / (2 * z * z))

        high = (moment + 1) / noise + 12
        cuts = [-12 + i * (high + 12) / 12 for i in range(13)]
        first = mp.quad(lambda x: mp.npdf(x) * ratio(x) ** (moment + 1), cuts)
        second = mp.quad(lambda x: mp.npdf(x) * ratio(x) ** -moment, cuts)
        return mp.log(max(first, second))


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "near"),
    [(0.01, 4.0, 10**4, range(17, 21)), (0.06, 1.0, 100, range(3, 7)), (0.5, 3.0, 20, range(4, 8))],
)
def test_epsilon_is_the_best_integer_moment(rate: float, noise: float, steps: int, near: range) -> None:
    releases = [poisson(rate, noise, steps)]
    direct = min((steps * log_moment(rate, noise, moment) + mp.log(10**5)) / moment for moment in near)
    assert Moments().epsilon(releases, 1e-5) == pytest.approx(float(direct), rel=1e-9)


def test_moments_end_at_32() -> None:
    """With so much noise a larger moment would be better, and the published accountant may not take it."""
    releases = [full(100.0)]
    assert Moments().epsilon(releases, 1e-5) == pytest.approx(33 / (2 * 100**2) + mp.log(10**5) / 32)
