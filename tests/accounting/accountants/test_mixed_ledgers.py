"""No accountant is below the truth: random mixed ledgers, and ledgers at the edge of what floats hold.

The floor of the mixed ones is dp-accounting's optimistic loss distribution; that of the extreme ones mpmath's, of the
part of the ledger that has a closed form. What is left out of a floor only lowers it.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from functools import cache, reduce

import mpmath as mp
import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.pld import Pld
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, Release
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.errors import UnsupportedMechanism
from tests.accounting.releases import full, poisson, pure

UPPER = [name for name in accountants.NAMES if accountants.get(name).bound == "upper"]
INTERVAL = 2e-4


def drawn(seed: int) -> tuple[list[Release], float]:
    """Two to four unlike mechanisms with counts, and a delta."""
    coin = random.Random(seed)
    shuffled = seed % 4 == 0
    adjacency: Adjacency = "zero-out" if shuffled else "add-remove"
    releases = []
    for _ in range(coin.randint(2, 4)):
        count, noise = coin.randint(1, 60), math.exp(coin.uniform(-0.3, 3))
        epsilon = math.exp(coin.uniform(-4, 0.7))
        kinds: list[Mechanism] = [
            GaussianSum(noise * count**0.5, adjacency, "shuffle" if shuffled else "full"),
            GaussianSum(noise, adjacency, "poisson", math.exp(coin.uniform(-6, -0.5))),
            GaussianSum(noise / 2, adjacency, "poisson", math.exp(coin.uniform(-6, -2))),
            PureDP(epsilon, adjacency, "laplace"),
            PureDP(epsilon, adjacency, "exponential"),
            PureDP(epsilon, adjacency),
            ApproximateDP(epsilon, 1e-14, adjacency),
        ]
        releases.append(Release(coin.choice(kinds), count))
    return releases, math.exp(coin.uniform(math.log(1e-11), math.log(0.05)))


def floor_of(mechanism: Mechanism) -> oracle.PrivacyLossDistribution:
    """A loss that the mechanism can have, rounded down."""
    rounded = {"pessimistic_estimate": False, "value_discretization_interval": INTERVAL}
    buckets = {**rounded, "use_connect_dots": False}
    if isinstance(mechanism, GaussianSum):
        rate = mechanism.sampling_rate
        return oracle.from_gaussian_mechanism(mechanism.noise_multiplier, sampling_prob=rate, **buckets)
    assert isinstance(mechanism, PureDP | ApproximateDP)
    epsilon = mechanism.epsilon
    if isinstance(mechanism, PureDP) and mechanism.source == "laplace":
        return oracle.from_laplace_mechanism(1 / epsilon, **buckets)
    if isinstance(mechanism, PureDP) and mechanism.source == "exponential":
        epsilon /= 2  # two outcomes whose scores move to opposite sides: range eps, loss eps/2
    return oracle.from_randomized_response(2 / (1 + math.exp(epsilon)), 2, **rounded)


@cache
def floor(seed: int) -> float:
    releases, delta = drawn(seed)
    leak = -math.expm1(
        sum(r.count * math.log1p(-r.mechanism.delta) for r in releases if isinstance(r.mechanism, ApproximateDP))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        floors = [floor_of(release.mechanism).self_compose(release.count) for release in releases]
        whole = reduce(lambda one, other: one.compose(other), floors)
        return float(whole.get_epsilon_for_delta((delta - leak) / (1 - leak)))


@pytest.mark.parametrize("seed", range(12))
def test_no_upper_bound_is_below_the_optimistic_loss_distribution(seed: int) -> None:
    releases, delta = drawn(seed)
    stated = {}
    for name in UPPER:
        try:
            stated[name] = accountants.get(name).epsilon(releases, delta)
        except UnsupportedMechanism:
            continue
    assert {"pld", "rdp"} <= set(stated)
    assert min(stated.values()) >= floor(seed) * (1 - 1e-6)
    epsilon, best = BestAccountant().best(releases, delta)
    assert epsilon == min(stated[name] for name in accountants.USUAL if name in stated)
    assert stated[best] == epsilon


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, 7])
def test_loss_distributions_are_close_to_what_they_bound(seed: int) -> None:
    """The control: a floor that nothing could fall below would prove nothing."""
    releases, delta = drawn(seed)
    known = [r for r in releases if not (isinstance(r.mechanism, PureDP) and r.mechanism.source == "exponential")]
    if len(known) == len(releases):
        uses = sum(release.count for release in releases)
        assert Pld().epsilon(releases, delta) <= floor(seed) * 1.01 + 1.5 * INTERVAL * uses


def gaussian_delta(noise: float, count: int, epsilon: float) -> float:
    """Exact, with 60 digits."""
    with mp.workdps(60):
        mu, e = mp.sqrt(count) / mp.mpf(noise), mp.mpf(epsilon)
        if e / mu - mu / 2 > 100:  # beyond Phi(-100), of which nothing is left
            return 0.0
        return float(mp.ncdf(mu / 2 - e / mu) - mp.exp(e) * mp.ncdf(-mu / 2 - e / mu))


def response_delta(epsilon: float, count: int, at: float) -> float:
    """That of `count` randomised responses that all go one way."""
    with mp.workdps(60):
        likely = (1 / (1 + mp.exp(-mp.mpf(epsilon)))) ** count
        return float(max(likely * (1 - mp.exp(mp.mpf(at) - count * mp.mpf(epsilon))), 0))


def poisson_delta(rate: float, noise: float, count: int, at: float) -> float:
    """No floor but 0: what is asked of it is a number."""
    return 0.0


EXTREMES: list[tuple[list[Release], Callable[..., float], tuple[float, ...]]] = [
    # losses above 709 beside sampled steps: 1150, where 41.07 was printed
    (
        [full(0.6976276956978756, 941), poisson(0.04, 1.8178821871051982, 746)],
        gaussian_delta,
        (0.6976276956978756, 941),
    ),
    ([poisson(1.0, 0.05, 3), poisson(0.3, 1.0, 10)], gaussian_delta, (0.05, 3)),
    ([full(0.01, 10), poisson(0.01, 1.0, 100)], gaussian_delta, (0.01, 10)),
    ([full(0.01, 10), pure(3.0, 2)], gaussian_delta, (0.01, 10)),
    ([full(1.0), pure(2000.0)], response_delta, (2000.0, 1)),
    ([pure(2000.0)], response_delta, (2000.0, 1)),
    ([pure(2000.0, 3, "laplace"), poisson(0.1, 1.0, 5)], gaussian_delta, (1e6, 1)),
    ([pure(2000.0, 3, "exponential")], response_delta, (1000.0, 3)),
    ([Release(ApproximateDP(800.0, 1e-17, "add-remove"))], response_delta, (800.0, 1)),
    ([Release(ApproximateDP(800.0, 1e-17, "add-remove"), 2), full(1.0)], response_delta, (800.0, 2)),
    ([full(2.0, 10**9)], gaussian_delta, (2.0, 10**9)),
    ([full(1e5, 10**9), pure(0.1)], gaussian_delta, (1e5, 10**9)),
    ([poisson(1e-9, 1.0, 10**9)], poisson_delta, (1e-9, 1.0, 10**9)),
    ([poisson(1e-9, 1.0, 10**6), pure(1.0)], response_delta, (1.0, 1)),
    ([poisson(0.5, 0.02, 7)], poisson_delta, (0.5, 0.02, 7)),
    ([full(1e-50), poisson(0.1, 1.0)], poisson_delta, (0.1, 1.0, 1)),
    ([pure(1e50), poisson(0.1, 1.0)], poisson_delta, (0.1, 1.0, 1)),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", range(len(EXTREMES)))
def test_extremes_are_stated_truly_or_refused(case: int) -> None:
    releases, true_delta, part = EXTREMES[case]
    for delta in (0.999, 1e-5, 1e-15):
        answered = []
        for name in UPPER:
            try:
                epsilon = accountants.get(name).epsilon(releases, delta)
            except UnsupportedMechanism:
                continue
            assert epsilon >= 0
            if epsilon < math.inf:
                assert true_delta(*part, epsilon) <= delta * (1 + 1e-6), name
                assert 0 <= accountants.get(name).delta(releases, epsilon) <= 1
                answered.append(name)
        assert answered


def test_sums_of_losses_above_709_are_not_left_out() -> None:
    """The value: the Gaussians alone cost 1153.3, and sampled steps add little."""
    releases, _, part = EXTREMES[0]
    alone = accountants.get("gaussian").epsilon([full(part[0], int(part[1]))], 1e-5)
    assert 1153 < alone < 1154
    assert alone <= Pld().epsilon(releases, 1e-5) <= alone * 1.001
    assert Pld().delta(releases, 1100.0) > 1e-3
