"""No accountant is below the truth on mixed ledgers at the edge of what floats hold (random ones: `tests/account/`).

The floor is mpmath's, of the part of the ledger that has a closed form. What is left out of a floor only lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath as mp
import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.pld import Pld
from dpsgd_cli.accounting.mechanism import ApproximateDP, Release
from dpsgd_cli.errors import UnsupportedMechanism
from tests.accounting.releases import full, poisson, pure

UPPER = [name for name in accountants.NAMES if accountants.get(name).bound == "upper"]


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
