"""Gaussian DP: exact for compositions of Gaussians on full or shuffled batches.

Not for sampled batches, whose privacy loss is not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants.base import EVERY_NEIGHBOUR, Additive
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, PureDP, Release


def mechanism_mu(mechanism: Mechanism) -> float:
    """Return mu of one use.

    Gaussian: 1/z, also for an epoch of shuffled batches (given the partition, only one of them differs). Pure epsilon:
    2 Phi^-1(e^epsilon / (1 + e^epsilon)), because the trade-off curve of mu-GDP is convex and meets that of
    epsilon-DP at its corner (Dong, Roth and Su 2022, Proposition 2.10 and Definition 2.6). Below epsilon 1e-4, where
    that formula loses its digits, sqrt(pi/2) epsilon, which is larger: with c = sqrt(pi/8), Phi(c epsilon) - 1/2 >=
    epsilon/4 - pi epsilon^3/192, and e^epsilon / (1 + e^epsilon) - 1/2 = tanh(epsilon/2)/2 <= epsilon/4 - epsilon^3/48
    + epsilon^5/480. Rounded up. All others: inf.
    """
    if isinstance(mechanism, GaussianSum):
        return 1 / mechanism.noise_multiplier if mechanism.noise_multiplier**2 > 0 else math.inf
    if isinstance(mechanism, PureDP):
        if mechanism.epsilon == 0:
            return 0.0
        if mechanism.epsilon < 1e-4:
            return math.sqrt(math.pi / 2) * mechanism.epsilon * (1 + 1e-15)
        from statistics import NormalDist  # takes longer to load than most queries to answer

        tail = 1 / (1 + math.exp(mechanism.epsilon)) if mechanism.epsilon < 700 else 0.0
        # rounding error of 1 / (1 + e^epsilon) relative to 1/2
        rounding = 1 + 1e-15 / min(mechanism.epsilon, 1.0)
        return -2 * NormalDist().inv_cdf(tail) * rounding if tail > 0 else math.inf
    return math.inf


class Gaussian(Additive):
    """Accountant of Gaussian DP: mu^2 adds up; epsilon and delta follow from Phi.

    Guarantee: equality for Gaussians, an upper bound if pure releases take part. Holds for noise multipliers that
    are fixed beforehand. If they are chosen after seeing earlier outputs, the bound is the total that a filter was
    given beforehand (Smith and Thakurta 2022, fully adaptive Gaussian DP), as one Gaussian.
    """

    name = "gaussian"
    bound = "upper"
    note = "exact for Gaussians"
    mechanisms = ("gaussian", "correlated", "pure", "approximate", "threshold")
    adjacencies = EVERY_NEIGHBOUR

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, GaussianSum) and mechanism.sampled:
            return (
                f"{mechanism.batching} batches: the privacy loss of a sampled Gaussian is not Gaussian; use pld"
                f"{' or rdp' if mechanism.batches.divergence else ''}"
            )
        return None

    def cost(self, mechanism: Mechanism) -> float:
        return mechanism_mu(mechanism) ** 2

    def epsilon_of(self, total: float, delta: float) -> float:
        return conversions.gaussian_epsilon(math.sqrt(total), delta)

    def delta_of(self, total: float, epsilon: float) -> float:
        return conversions.gaussian_delta(math.sqrt(total), epsilon)


def total_mu_squared(releases: Sequence[Release]) -> float:
    """Return mu^2 of all releases together. Raises UnsupportedMechanism for sampled batches."""
    gaussian = Gaussian()
    gaussian.check(releases)
    return gaussian.total(releases)
