"""Price of publishing the best of a random number of trials, by Renyi divergences and pure epsilons.

The number of trials must itself be random, drawn without looking at the data. Not for publishing every trial (their
releases simply compose), nor for the best of a FIXED number, for which nothing better than composition is proved here.

Notation: K the number of trials, gamma the stopping probability, eta the shape of the truncated negative binomial.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.rdp import Profile, Rdp
from dpsgd_cli.accounting.mechanism import ApproximateDP, Mechanism, PureDP, Release, merge
from dpsgd_cli.accounting.search import smallest
from dpsgd_cli.errors import PrivacyError

LAWS: dict[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Shape eta of each law; the Poisson law is the limit of large shapes. Pure trials cost (2 + eta) epsilon."""


@dataclass(frozen=True)
class Choice:
    """Choice of the best of K trials, E[K] = `mean` >= 1, by one of `LAWS`; if K = 0 (Poisson) nothing is published."""

    mean: float
    law: str = "geometric"

    def __post_init__(self) -> None:
        if not (1 <= self.mean < math.inf):
            raise PrivacyError(f"the expected number of trials is {self.mean!r}, but must be at least 1 and finite")
        if self.law not in LAWS:
            raise PrivacyError(f"unknown law {self.law!r} of the number of trials; known: {', '.join(LAWS)}")

    @functools.cached_property
    def log_inverse_gamma(self) -> float:
        """The log(1/gamma) at which the truncated negative binomial has this mean, rounded up."""
        if self.law == "geometric":
            return math.log(self.mean)
        if self.mean == 1:
            return 0.0
        if self.law != "logarithmic":
            raise PrivacyError(f"the {self.law} law of the number of trials has no stopping probability")
        # Logarithmic law: E[K] = (1/gamma - 1) / log(1/gamma), increasing in 1/gamma.
        return smallest(lambda log: math.expm1(log) / log >= self.mean, 0.0, 2 * math.log(self.mean) + 2)


class BestOfTrials(Rdp):
    """Renyi accountant of the published best trial; the releases given are those of ONE trial.

    `of_any` prices runs that are one of several trials, drawn uniformly for each run: a mixture whose label is
    published, too, so its Renyi divergence is at most the largest of theirs, order by order (quasi-convexity: van
    Erven and Harremoes 2014, Theorem 13).

    Guarantee: D'(lambda) = D(lambda) + (1 + eta)((1 - 1/lambda^) D(lambda^) + log(1/gamma)/lambda^) + log E[K] /
    (lambda - 1) for any lambda^ (Papernot and Steinke 2022, Theorem 2); Poisson: D(lambda) + E[K] delta^ +
    log E[K] / (lambda - 1) for a trial that is (log(1 + 1/(lambda - 1)), delta^)-DP (Theorem 6). With eta = 1 and
    pure trials that is the 3 epsilon of Liu and Talwar 2019; in general (2 + eta) epsilon (Corollary 3).
    """

    name = "rdp"
    bound = "upper"
    note = "best of a random number of trials"

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, ApproximateDP):
            return "a choice among trials with (epsilon, delta)-DP releases, which have no Renyi divergence"
        return super().uncovered(mechanism)

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        return self.of_any([kept])[0](delta) if kept else 0.0

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        return self.of_any([kept])[1](epsilon)

    def of_any(self, trials: Sequence[Sequence[Release]]) -> tuple[Callable[[float], float], Callable[[float], float]]:
        """Return epsilon as a function of delta, and delta as a function of epsilon, of a run that is one of `trials`.

        Raises UnsupportedMechanism for releases without a Renyi divergence.
        """
        for releases in trials:
            self.check(releases)
        pure = max(self.pure(releases) for releases in trials)
        divergence = functools.cache(self.divergence(_Worst(trials)))

        def epsilon(delta: float) -> float:
            by_order = self.least(lambda order: conversions.renyi_epsilon(order, divergence(order), delta))
            return max(0.0, min(by_order, pure))

        def delta(epsilon: float) -> float:
            if pure <= epsilon:
                return 0.0
            log_delta = self.least(lambda order: conversions.renyi_log_delta(order, divergence(order), epsilon))
            return math.exp(min(log_delta, 0.0))

        return epsilon, delta

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        return Accountant.curve(self, epochs, delta)

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        del least
        return self.of_any([releases])[1]

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


class _Worst(Profile):
    """A profile that is the largest of several profiles, order by order."""

    def __init__(self, trials: Sequence[Sequence[Release]]) -> None:
        distinct = {tuple(merge(list(releases))) for releases in trials}
        self._profiles = [Profile(releases) for releases in sorted(distinct, key=repr)]
        super().__init__([release for releases in distinct for release in releases])

    def total(self, order: float) -> float:
        return max(profile.total(order) for profile in self._profiles)
