"""Trade-off curves: the largest true-positive rate of an attack for each false-positive rate.

The attacker knows every record but one, sees all that was released, and says whether the one was there (or which of its
two values it had). The false-positive rate alpha is the probability of "it was there" on data without it. The
true-positive rate beta is the probability of "it was there" on data with it.

Derivation. Take releases that are (epsilon, delta(epsilon))-DP for every epsilon >= 0, in both directions. They have,
for any test (a set S of outputs, randomised or not):

    beta = P(S) <= e^epsilon Q(S) + delta(epsilon) = e^epsilon alpha + delta(epsilon).
    1 - alpha = Q(not S) <= e^epsilon P(not S) + delta(epsilon), so beta <= 1 - e^-epsilon (1 - alpha - delta(epsilon)).

Each epsilon gives a true bound. The least of them is the trade-off curve itself if delta(epsilon) is the exact privacy
profile (Dong, Roth and Su 2022, Proposition 2.12: the curve is the convex conjugate of the profile). So a few
epsilons can only overstate the attacker.

For compositions of Gaussians the profile is that of mu-Gaussian DP, and beta = Phi(Phi^-1(alpha) + mu) exactly (their
Theorem 2.7 and Corollary 3.3).

The nearest Gaussian. For any other releases, `nearest_gaussian` states the least mu such that no attack whose two error
rates (alpha and 1 - beta) are both at least `LEAST_ERROR` does better than it would against N(0, 1) and N(mu, 1). There
is no such mu without a least error: T sampled Gaussians of multiplier z all use the record with a tiny probability, and
at errors below that they are no better than sqrt(T) / z. The regret says how far that Gaussian is off: the largest
distance, in both error rates at once, from its curve to the proved one. It is 0 for Gaussians.

Proof. Write p = 1 - beta. Every test is above all lines p = 1 - delta(epsilon) - e^epsilon alpha, and above the same
lines with alpha and p exchanged (the two bounds above). The largest of the first lines is convex and piecewise linear.
The curve of the Gaussian is convex, so if it is not above at two corners, it is not above between them. The corners are
those with `LEAST_ERROR` <= alpha <= p, the point at that least error, and the point where alpha = p. Exchanging alpha
and p, which maps the Gaussian's curve to itself, covers the rest. At a corner the least mu is Phi^-1(1 - alpha) +
Phi^-1(1 - p). Each direction of the adjacency is bounded by itself, so the larger mu holds.
Source: Gomez, Kulynych et al. 2025 (arXiv 2503.10945).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import total_mu_squared
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import UnsupportedMechanism

if TYPE_CHECKING:
    from dpsgd_cli.accounting.losses import Floats

    Line = tuple[Floats, Floats]  # ascending epsilons and their deltas, for one direction

RATES = (0.01, 0.001)
"""The false-positive rates that reports use."""
LEAST_ERROR = 1e-10
"""The least error rate for which `nearest_gaussian` speaks."""
_LINES = 240
"""Epsilons at which a profile without lines is asked."""
_POINTS = 4000
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Attacker:
    """The best attack: its true-positive rate by false-positive rate, and its accuracy.

    `right`: the accuracy if both cases are equally likely. `mu`: the least Gaussian-DP parameter, >= 0, possibly inf,
    for error rates of at least `LEAST_ERROR`. `regret`, in [0, 1]: how far that Gaussian is off; 0 if it is exact.
    `proved_by`: the accountant whose profile this is.
    """

    true_positives: dict[float, float]
    right: float
    proved_by: str
    mu: float
    regret: float

    @property
    def exact(self) -> bool:
        """True if an attack reaches these bounds, because the curve is that of one Gaussian."""
        return self.regret == 0 and self.mu < math.inf


def best_attacker(releases: Sequence[Release], rates: Sequence[float] = RATES) -> Attacker:
    """Return bounds on any attack that sees `releases`, at these false-positive rates.

    Guarantee: no test has a larger true-positive rate at these false-positive rates, under the adjacency
    of the releases, nor a larger accuracy if both cases are equally likely. Equality for unsampled Gaussians.
    Raises UnsupportedMechanism, with the reasons, if no accountant has a profile of the releases.

    >>> found = best_attacker([Release(GaussianSum(noise_multiplier=2, adjacency="add-remove"), count=4)])
    >>> found.mu, found.regret, round(found.true_positives[0.01], 4), round(found.right, 4)
    (1.0, 0.0, 0.0924, 0.6915)
    """
    return curve_of(releases, min(*rates, LEAST_ERROR)).attacker(rates)


@dataclass(frozen=True)
class TradeoffCurve:
    """The largest true-positive rate by false-positive rate; `gap` is delta at epsilon 0, their largest difference.

    `mu`: the Gaussian-DP parameter if the curve is that of one Gaussian; otherwise None, and `lines` are known.
    """

    power: Callable[[float], float]
    gap: float
    proved_by: str
    mu: float | None = None
    lines: Sequence[Line] = ()

    @classmethod
    def of_profile(cls, profile: Callable[[float], float], proved_by: str) -> TradeoffCurve:
        """Return the curve of a function from epsilon >= 0 to delta.

        A profile without `lines` of its own is asked at some epsilons, any of which give true bounds.
        """
        import numpy as np

        if (lines := getattr(profile, "lines", None)) is None:
            grid = -math.log(LEAST_ERROR) * np.linspace(0.0, 1.0, _LINES) ** 2
            lines = [(grid, np.array([profile(float(epsilon)) for epsilon in grid]))]
        return cls(partial(_power_of_lines, lines), profile(0.0), proved_by, lines=lines)

    def attacker(self, rates: Sequence[float] = RATES) -> Attacker:
        """Return the best attacker at these false-positive rates."""
        powers = {rate: self.power(rate) for rate in rates}
        if self.mu is not None:
            return Attacker(powers, _gaussian_right(self.mu), self.proved_by, self.mu, 0.0)
        return Attacker(powers, (1 + self.gap) / 2, self.proved_by, *nearest_gaussian(self.lines))


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
            return TradeoffCurve.of_profile(accountants.get(name).profile(used, least), name)
        except UnsupportedMechanism as refusal:
            reasons.append(str(refusal))
    raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))


def strongest(attackers: Sequence[Attacker]) -> Attacker:
    """Return the bounds that hold for every one of several.

    The regret is that of the largest mu: that Gaussian's curve is below all, so it is as near to the lowest of them.
    """
    rates = attackers[0].true_positives
    found = {rate: max(one.true_positives[rate] for one in attackers) for rate in rates}
    names = ", ".join(dict.fromkeys(one.proved_by for one in attackers))
    widest = max(attackers, key=lambda one: (one.mu, -one.regret))
    return Attacker(found, max(one.right for one in attackers), names, widest.mu, widest.regret)


def nearest_gaussian(directions: Sequence[Line]) -> tuple[float, float]:
    """Return the least mu whose curve lies below that of `directions`, and its regret; see the module's proof.

    mu is inf if nothing hides the record.
    """
    import numpy as np
    from scipy.special import ndtr, ndtri

    if max(float(deltas[0]) for _, deltas in directions) >= 1:
        return math.inf, 0.0
    corners = [_corners(epsilons, deltas) for epsilons, deltas in directions]
    mu = max(0.0, *(float(np.max(ndtri(found) - ndtri(alpha))) for alpha, found in corners)) * (1 + _ROUNDING)
    # the distance along alpha = p, on a grid of points with alpha - p = place
    t = np.linspace(mu / 2, 9 + mu, _POINTS)
    gaussian_alpha, gaussian_missed = ndtr(-t), ndtr(t - mu)
    places = gaussian_alpha - gaussian_missed
    nearest = np.full(_POINTS, np.inf)
    for alpha, found in corners:
        order = np.argsort(alpha - (1 - found))
        place, height = (alpha - (1 - found))[order], (alpha + (1 - found))[order]
        nearest = np.minimum(nearest, np.interp(places, place, height, left=-np.inf))
    regret = float(np.max((nearest - gaussian_alpha - gaussian_missed) / 2))
    return mu, min(1.0, max(regret, sys.float_info.epsilon))


def _corners(epsilons: Floats, deltas: Floats) -> tuple[Floats, Floats]:
    """Return the corners of the largest of the lines 1 - delta - e^epsilon alpha, as alpha and true-positive rates."""
    import numpy as np

    useful = epsilons <= 1 - math.log(LEAST_ERROR)  # steeper lines meet the others at smaller alpha
    factors, deltas = np.exp(epsilons[useful]), deltas[useful]
    middle = (1 - deltas[0]) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        alphas = (deltas[:-1] - deltas[1:]) / np.diff(factors)
    powers = deltas[:-1] + factors[:-1] * alphas
    inside = (alphas >= LEAST_ERROR) & (alphas < middle) & (powers < 1) & (powers > alphas)
    least = min(LEAST_ERROR, middle)
    ends = np.array([least, middle]), np.array([float(np.min(deltas + factors * least)), 1 - middle])
    alphas, powers = np.append(alphas[inside], ends[0]), np.append(powers[inside], ends[1])
    return alphas, np.clip(powers, 0.0, 1.0)


def _power_of_lines(directions: Sequence[Line], false_positive_rate: float) -> float:
    """Return the largest true-positive rate that lines allow; see the derivation above.

    Guarantee: a true bound whenever the deltas are, at most 1 and no less than the false-positive rate.

    Both bounds of the derivation are least at one of the lines. The first is of one direction and the second of the
    other (of the same, if there is one), whichever of the two data sets the attacker takes for the null hypothesis.
    """
    import numpy as np

    alpha = false_positive_rate
    with np.errstate(over="ignore"):
        of_true = [float(np.min(deltas + np.exp(epsilons) * alpha)) for epsilons, deltas in directions]
    of_false = [float(np.min(1 - np.exp(-epsilons) * (1 - alpha - deltas))) for epsilons, deltas in directions]
    least = max(min(own, other) for own, other in zip(of_true, reversed(of_false), strict=True))
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
