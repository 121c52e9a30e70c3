"""Trade-off curves: the largest true-positive rate of an attack for each false-positive rate.

The attacker knows every record but one, sees all that was released, and says whether the one was there (or which of its
two values it had). The false-positive rate alpha is the probability of "it was there" on data without it. The
true-positive rate beta is the probability of "it was there" on data with it.

Derivation. Take releases that are (epsilon, delta(epsilon))-DP for every epsilon >= 0, in both directions. They have,
for any test (a set S of outputs, randomised or not):

    beta = P(S) <= e^epsilon Q(S) + delta(epsilon) = e^epsilon alpha + delta(epsilon).
    1 - alpha = Q(not S) <= e^epsilon P(not S) + delta(epsilon), so beta <= 1 - e^-epsilon (1 - alpha - delta(epsilon)).

Each epsilon gives a true bound. The least of them is the trade-off curve itself if delta(epsilon) is the exact privacy
profile (Dong, Roth and Su 2022, Proposition 2.12: the curve is the convex conjugate of the profile). So a search that
stops early can only overstate the attacker. Neither bound has more than one valley, since delta is convex in e^epsilon.

For compositions of Gaussians the profile is that of mu-Gaussian DP, and beta = Phi(Phi^-1(alpha) + mu) exactly (their
Theorem 2.7 and Corollary 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import total_mu_squared
from dpsgd_cli.accounting.conversions import minimise
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import UnsupportedMechanism

RATES = (0.01, 0.001)
"""The false-positive rates that reports use."""
_MOST_EPSILON = 60.0
_GRID = 24


@dataclass(frozen=True)
class Attacker:
    """The best attack: its true-positive rate by false-positive rate, and its accuracy.

    `right`: the accuracy if both cases are equally likely. `mu`: the Gaussian-DP parameter if the trade-off curve is
    exactly that of one Gaussian; else None. `proved_by`: the accountant whose profile this is.
    """

    true_positives: dict[float, float]
    right: float
    proved_by: str
    mu: float | None = None


def best_attacker(releases: Sequence[Release], rates: Sequence[float] = RATES) -> Attacker:
    """Return bounds on any attack that sees `releases`, at these false-positive rates.

    Guarantee: no test has a larger true-positive rate at these false-positive rates, under the adjacency
    of the releases, nor a larger accuracy if both cases are equally likely. Equality for unsampled Gaussians.
    Raises UnsupportedMechanism, with the reasons, if no accountant has a profile of the releases.

    >>> found = best_attacker([Release(GaussianSum(noise_multiplier=2, adjacency="add-remove"), count=4)])
    >>> found.mu, round(found.true_positives[0.01], 4), round(found.right, 4)
    (1.0, 0.0924, 0.6915)
    """
    found = curve_of(releases, min(rates))
    right = _gaussian_right(found.mu) if found.mu is not None else (1 + found.gap) / 2
    return Attacker({rate: found.power(rate) for rate in rates}, right, found.proved_by, found.mu)


@dataclass(frozen=True)
class TradeoffCurve:
    """The largest true-positive rate by false-positive rate; `gap` is delta at epsilon 0, their largest difference."""

    power: Callable[[float], float]
    gap: float
    proved_by: str
    mu: float | None = None


def curve_of(releases: Sequence[Release], least: float = min(RATES)) -> TradeoffCurve:
    """Return the trade-off curve that is proved for `releases`: exact for unsampled Gaussians, else that of a profile.

    `least` is the smallest false-positive rate that you will ask for. Raises as `best_attacker` does.
    """
    used = [release for release in releases if release.count]
    if all(isinstance(r.mechanism, GaussianSum) and not r.mechanism.sampled for r in used):
        mu = math.sqrt(total_mu_squared(used))
        return TradeoffCurve(partial(gaussian_power, mu), 2 * _gaussian_right(mu) - 1, "gaussian", mu)
    reasons = []
    for name in ("pld", "rdp"):  # tightest first
        try:
            profile = accountants.get(name).profile(used, least)
            return TradeoffCurve(partial(power, profile), profile(0.0), name)
        except UnsupportedMechanism as refusal:
            reasons.append(str(refusal))
    raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))


def strongest(attackers: Sequence[Attacker]) -> Attacker:
    """Return the bounds that hold for every one of several; exact only if all are alike."""
    if all(one == attackers[0] for one in attackers):
        return attackers[0]
    rates = attackers[0].true_positives
    found = {rate: max(one.true_positives[rate] for one in attackers) for rate in rates}
    names = ", ".join(dict.fromkeys(one.proved_by for one in attackers))
    return Attacker(found, max(one.right for one in attackers), names)


def power(profile: Callable[[float], float], false_positive_rate: float) -> float:
    """Return the largest true-positive rate that `profile` (epsilon >= 0 to delta) allows; see the derivation above.

    Guarantee: a true bound whenever `profile` is, at most 1 and no less than the false-positive rate.
    """
    alpha = false_positive_rate

    def of_true(epsilon: float) -> float:
        return math.exp(epsilon) * alpha + profile(epsilon)

    def of_false(epsilon: float) -> float:
        return 1 - math.exp(-epsilon) * (1 - alpha - profile(epsilon))

    least = min(_least(of_true), _least(of_false))
    return max(alpha, min(1.0, least))


def gaussian_power(mu: float, false_positive_rate: float) -> float:
    """Return Phi(Phi^-1(alpha) + mu): the exact trade-off curve of a mu-Gaussian-DP release.

    >>> round(gaussian_power(1.0, 0.05), 4)
    0.2595
    """
    normal = NormalDist()
    return normal.cdf(normal.inv_cdf(false_positive_rate) + mu) if mu < math.inf else 1.0


def _gaussian_right(mu: float) -> float:
    """Return (1 + total variation) / 2 of N(0, 1) and N(mu, 1)."""
    return NormalDist().cdf(mu / 2)


def _least(of: Callable[[float], float]) -> float:
    """Return the least value found over epsilon in [0, `_MOST_EPSILON`]: on a growing grid, then in its best cell."""
    grid = [_MOST_EPSILON * (i / _GRID) ** 3 for i in range(_GRID + 1)]
    best = min(range(len(grid)), key=lambda i: of(grid[i]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, _GRID)]
    return min(of(grid[best]), of(minimise(of, low, high)))
