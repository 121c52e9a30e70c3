"""Price of publishing one of a random number of trials: the best, or the first that is good enough.

By Renyi divergences, pure epsilons, or the curve of one trial.

The number of trials must itself be random, drawn without looking at the data. Not for publishing every trial (their
releases simply compose), nor for the best of a FIXED number, for which nothing better than composition is proved here.

Notation: K the number of trials, gamma the stopping probability, eta the shape of the truncated negative binomial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants import EVERY_NEIGHBOUR, Accountant
from dpsgd_cli.accounting.accountants.pld import Pld
from dpsgd_cli.accounting.accountants.rdp import DIVERGENCES, Profile, Rdp
from dpsgd_cli.accounting.mechanism import ApproximateDP, Mechanism, PureDP, Release
from dpsgd_cli.accounting.search import smallest
from dpsgd_cli.errors import PrivacyError

if TYPE_CHECKING:
    from dpsgd_cli.accounting.loss_composition import Floats

_FARTHEST = 60.0
_LEAST_DELTA = 1e-12
_SHARE = 1e-3
_STRIKES = 500
_SHARES = 1500
UNTIL = "until"
"""The law of trying until a trial is good enough: at most a geometric number of trials."""
LAWS: dict[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf, UNTIL: 0.0}
"""Shape eta of each law; the Poisson law is the limit of large shapes. Pure trials cost (2 + eta) epsilon."""


@dataclass(frozen=True)
class Choice:
    """Choice of the best of K trials, E[K] = `mean` >= 1, by one of `LAWS`; if K = 0 (Poisson) nothing is published.

    Law `until`: trials are made until one is good enough, which is published, or until K were made, K geometric; then
    it is published that none was.
    """

    mean: float
    law: str = "geometric"

    def __post_init__(self) -> None:
        if not (1 <= self.mean < math.inf):
            raise PrivacyError(f"the expected number of trials is {self.mean!r}, but must be at least 1 and finite")
        if self.law not in LAWS:
            raise PrivacyError(f"unknown law {self.law!r} of the number of trials; known: {', '.join(LAWS)}")

    def weight(self, share: Floats) -> Floats:
        """Return phi(u) = sum over k of k P(K = k) u^(k - 1), the derivative of K's generating function; `share` is u.

        It grows with u, and phi(1) = E[K]. If the best of K trials has the value y, and a trial has a lower score with
        probability u, then y is phi(u) times as likely as in one trial. Law `until`: 1 / (1 - (1 - gamma) u), the
        expected number of trials if each is rejected with probability u.
        """
        import numpy as np

        if self.law == "poisson":
            return self.mean * np.exp(self.mean * (share - 1))
        gamma = math.exp(-self.log_inverse_gamma)
        rest = 1 - (1 - gamma) * share
        if self.law == UNTIL:
            return 1 / rest
        if self.law == "geometric":
            return gamma / rest**2
        return (1 - gamma) / (rest * self.log_inverse_gamma) if gamma < 1 else np.ones_like(share)

    @cached_property
    def log_inverse_gamma(self) -> float:
        """The log(1/gamma) at which the truncated negative binomial has this mean, rounded up."""
        if self.law in ("geometric", UNTIL):
            return math.log(self.mean)
        if self.mean == 1:
            return 0.0
        if self.law != "logarithmic":
            raise PrivacyError(f"the {self.law} law of the number of trials has no stopping probability")
        # Logarithmic law: E[K] = (1/gamma - 1) / log(1/gamma), increasing in 1/gamma.
        return smallest(lambda log: math.expm1(log) / log >= self.mean, 0.0, 2 * math.log(self.mean) + 2)


class BestOfTrials(Rdp):
    """Renyi accountant of the published best trial; the releases given are those of ONE trial.

    Guarantee: D'(lambda) = D(lambda) + (1 + eta)((1 - 1/lambda^) D(lambda^) + log(1/gamma)/lambda^) + log E[K] /
    (lambda - 1) for any lambda^ (Papernot and Steinke 2022, Theorem 2); Poisson: D(lambda) + E[K] delta^ +
    log E[K] / (lambda - 1) for a trial that is (log(1 + 1/(lambda - 1)), delta^)-DP (Theorem 6). With eta = 1 and
    pure trials that is the 3 epsilon of Liu and Talwar 2019; in general (2 + eta) epsilon (Corollary 3).
    """

    name = "rdp"
    bound = "upper"
    note = "best of a random number of trials"
    mechanisms = DIVERGENCES
    adjacencies = EVERY_NEIGHBOUR

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if self.choice.law == UNTIL:
            return "trials until one is good enough: their price is proved by the curve of one trial; use pld"
        if isinstance(mechanism, ApproximateDP):
            return "a choice among trials with (epsilon, delta)-DP releases, which have no Renyi divergence"
        return super().uncovered(mechanism)

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        if not kept:
            return 0.0
        divergence = self.divergence(Profile(kept))
        by_order = self.least(lambda order: conversions.renyi_epsilon(order, divergence(order), delta))
        return max(0.0, min(by_order, self.pure(kept)))

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        if self.pure(kept) <= epsilon:
            return 0.0
        divergence = self.divergence(Profile(kept))
        log_delta = self.least(lambda order: conversions.renyi_log_delta(order, divergence(order), epsilon))
        return math.exp(min(log_delta, 0.0))

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        return Accountant.curve(self, epochs, delta)

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        return Accountant.profile(self, releases, least)

    def divergence(self, profile: Profile) -> Callable[[float], float]:
        """Return D' of the published best as a function of the order, if `profile` is that of one trial."""
        constant = self.stopping_cost(profile) if self.choice.law != "poisson" else 0.0

        def at(order: float) -> float:
            extra = constant
            if self.choice.law == "poisson":
                extra = self.choice.mean * self.trial_delta(profile, -math.log1p(-1 / order))
            return profile.total(order) + extra + math.log(self.choice.mean) / (order - 1)

        return at

    def pure(self, releases: Sequence[Release]) -> float:
        """Return (2 + eta) epsilon for pure trials under a truncated negative binomial law; inf otherwise."""
        pure = [(r.count, m) for r in releases if isinstance(m := r.mechanism, PureDP)]
        if len(pure) < len(releases) or self.choice.law == "poisson":
            return math.inf
        return (2 + LAWS[self.choice.law]) * math.fsum(n * mechanism.epsilon for n, mechanism in pure)

    def trial_delta(self, profile: Profile, epsilon: float) -> float:
        """Return delta of one trial at `epsilon`, over all orders."""
        best = self.least(lambda order: conversions.renyi_log_delta(order, profile.total(order), epsilon))
        return math.exp(min(best, 0.0))

    def stopping_cost(self, profile: Profile) -> float:
        """Return the min over lambda^ of (1 + eta)((1 - 1/lambda^) D(lambda^) + log(1/gamma) / lambda^)."""
        log = self.choice.log_inverse_gamma
        return (1 + LAWS[self.choice.law]) * self.least(
            lambda order: (1 - 1 / order) * profile.total(order) + log / order
        )


class BestByCurve(Accountant):
    """Accountant of the published best trial, from the privacy profile of ONE trial.

    Guarantee: let a trial, in both directions of the adjacency, have the profile delta(t). A trial's score is any
    function of what the trial releases, of public numbers and of coins of its own; ties go to the first. Let P and
    Q be a pair that has this profile, and v = e^epsilon q / p. Then the published best is (epsilon, H(epsilon))-DP for
    every epsilon >= 0:

        H(epsilon) = E_P[G(v)],  G(v) = max over u in [0, 1] of (phi(u) - v phi(L(u)))_+,
        L(u) = max over t >= 0 of 0, e^-t (u - delta(t)) and 1 - delta(t) - e^t (1 - u).

    Proof. Break ties by an independent uniform number: trials with equal scores are exchangeable, so that the first of
    them and one drawn at random have one law. Scores are then continuous. The best of K is y with score s with density
    p(y, s) sum_k P(K = k) k F_P(s)^(k - 1) = p(y, s) phi(F_P(s)) on one data set, F_P(s) the probability of a lower
    score, and q(y, s) phi(F_Q(s)) on the other. "A lower score" is an event of one trial, so P <= e^t Q + delta(t) and
    1 - Q <= e^t (1 - P) + delta(t) give F_Q(s) >= L(F_P(s)). phi grows, so

        sup over events of P_best - e^epsilon Q_best = integral of (p phi(F_P) - e^epsilon q phi(F_Q))_+
            <= integral of p max_u (phi(u) - e^epsilon (q / p) phi(L(u)))_+ = E_P[G(e^epsilon q / p)].

    If K = 0, nothing is published, with equal probability on both. G is convex in q / p, so the last number is an
    f-divergence. It is at most that of any pair which dominates one trial's, and it is a sum of the pair's hockey-stick
    divergences: a chord of G over a grid of q / p is above G, and is sum_k c_k (s_k - q / p)_+ with c_k >= 0. Its mean
    under P is sum_k c_k s_k delta(-log s_k). For t < 0, delta(t) is at most 1 - e^t (1 - delta(-t)). Between two u of a
    grid, phi is taken at the larger and phi(L) at the smaller one. So every approximation is upwards.

    Until a trial is good enough (`UNTIL`). A trial is accepted or rejected by a rule that is fixed beforehand, from
    what it releases, public numbers and coins of its own; after a rejection all ends with probability gamma, else there
    is another trial. The first accepted trial is published, or that there was none. With w(u) = 1 / (1 - (1 - gamma) u)
    and rejection probabilities u on one data set and r on the other, an accepted y has density p(y) w(u) on the one and
    q(y) w(r) on the other, and nothing is published with probability gamma u w(u), or gamma r w(r). Rejection is an
    event of one trial, so r >= L(u); w(r) and r w(r) grow. Accepted y have the mass 1 - u under P. So the published
    trial is (epsilon, H(epsilon))-DP with H(epsilon) the max over u in [0, 1] of

        w(u) min(1 - u, delta(epsilon + log(w(L(u)) / w(u)))) + gamma (u w(u) - e^epsilon L(u) w(L(u)))_+.

    For pure trials that is 2 epsilon (Liu and Talwar 2019, arXiv 1811.07971, Theorem 3.1), as w and u w change by a
    factor e^epsilon at most.

    Renyi divergences pay for scores that no trade-off curve allows. At epsilon .9 (one Gaussian, delta 1e-5) the best
    of 10 costs 1.41 by this and 2.10 by Papernot and Steinke 2022, of 100 1.89 and 2.65. Source of the idea, to see a
    selection through the curve of one trial: Xiang, Wang and Wang 2024 (arXiv 2402.13087). The bound is ours.
    """

    name = "pld"
    bound = "upper"
    note = "best of a random number of trials, by one trial's curve"
    mechanisms = ("gaussian", "correlated", "last-iterate", "truncated", "pure", "approximate", "threshold")
    adjacencies = EVERY_NEIGHBOUR

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._trial = Pld()

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.least_epsilon(self.profile(releases, delta), delta)

    def least_epsilon(self, at: Callable[[float], float], delta: float) -> float:
        """Return the least epsilon at which `at`, a profile, is at most `delta`; inf beyond 60."""
        if at(0.0) <= delta:
            return 0.0
        return (
            smallest(lambda epsilon: at(epsilon) <= delta, 0.0, _FARTHEST, 1e-6) if at(_FARTHEST) <= delta else math.inf
        )

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        return self.profile(releases, _LEAST_DELTA)(epsilon)

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return H as a function of epsilon >= 0."""
        self.check(releases)
        if not any(release.count for release in releases):
            return lambda epsilon: 0.0
        return self.of_trial(self._trial.profile(releases, self.least_of_trial(least)))

    def least_of_trial(self, least: float) -> float:
        """Return the delta of a trial's profile that matters for a delta of `least`."""
        return least * _SHARE / self.choice.mean

    def of_trial(self, one: Callable[[float], float]) -> Callable[[float], float]:
        """Return H as a function of epsilon >= 0, if `one` is the profile of one trial."""
        import numpy as np

        # finer where deltas change: at small losses
        positive = _FARTHEST * np.linspace(0.0, 1.0, _STRIKES) ** 2
        deltas = np.array([min(1.0, one(float(t))) for t in positive])
        behind = -np.expm1(-positive) + np.exp(-positive) * deltas
        losses, sticks = np.concatenate([-positive[:0:-1], positive]), np.concatenate([behind[:0:-1], deltas])
        # finer near 1, where phi grows
        shares = 1 - np.append(np.geomspace(1.0, 1e-12, _SHARES), 0.0)
        if self.choice.law == UNTIL:
            shares = np.unique(np.concatenate([shares, np.geomspace(1e-18, 0.1, _SHARES)]))
        lower = _least_share(shares, positive, deltas)
        above, below = self.choice.weight(shares[1:]), self.choice.weight(lower[:-1])
        if self.choice.law == UNTIL:
            none, none_behind = shares[1:] * above / self.choice.mean, lower[:-1] * below / self.choice.mean

            def until(epsilon: float) -> float:
                factor = math.exp(epsilon)
                # convex in the ratio, so a chord is above it
                seen = np.interp(factor * below / above, np.append(0.0, np.exp(losses)), np.append(1.0, sticks))
                accepted = above * np.minimum(seen, 1 - shares[:-1])
                return min(1.0, float((accepted + np.maximum(none - factor * none_behind, 0.0)).max()))

            return until
        envelope = _Envelope(above, below)
        most = float(self.choice.weight(np.ones(1))[0])

        def at(epsilon: float) -> float:
            ratios = np.exp(-losses)  # falling
            # convex in the ratio, and phi(1) at 0, which comes last
            values = np.append(envelope.at(np.exp(epsilon) * ratios), most)
            strikes = np.append(ratios, 0.0)
            slopes = np.diff(values) / -np.diff(strikes)
            bends = np.diff(slopes, prepend=0.0)
            held = np.maximum(bends, 0.0) * ratios * sticks
            return min(1.0, float(held.sum()) + float(values[0]))

        return at


class _Envelope:
    """The largest of 0 and of lines `above` - v `below`, both ascending, as a function of v >= 0."""

    def __init__(self, above: Floats, below: Floats) -> None:
        import numpy as np

        kept: list[tuple[float, float]] = []
        turns: list[float] = []  # falling: up to each, the next line is above the one before
        for line in zip(above.tolist(), below.tolist(), strict=True):
            while kept:
                rise, run = line[0] - kept[-1][0], line[1] - kept[-1][1]
                turn = rise / run if run > 0 else math.inf
                if turns and turn >= turns[-1]:
                    turns.pop()
                    kept.pop()
                    continue
                if turn == math.inf:
                    kept.pop()
                    continue
                turns.append(turn)
                break
            kept.append(line)
        self._above, self._below = np.array(kept).T
        self._turns = np.array(turns[::-1])

    def at(self, v: Floats) -> Floats:
        """Return the values at `v`."""
        import numpy as np

        line = len(self._turns) - np.searchsorted(self._turns, v, side="left")
        return np.maximum(self._above[line] - v * self._below[line], 0.0)


def _least_share(shares: Floats, losses: Floats, deltas: Floats) -> Floats:
    """Return L: the least probability, on the other data set, of an event that has probability `shares` on one."""
    import numpy as np

    found = np.zeros_like(shares)
    for t, delta in zip(losses, deltas, strict=True):
        found = np.maximum(found, np.exp(-t) * (shares - delta))
        found = np.maximum(found, 1 - delta - np.exp(min(t, 700.0)) * (1 - shares))
    return found
