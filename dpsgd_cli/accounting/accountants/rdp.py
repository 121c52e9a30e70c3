"""Renyi DP over all useful orders, with the improved conversion; and as published: Markov's, and integer moments.

Privacy-loss distributions are tighter and slower (`pld.py`). Every order is a valid bound by itself, so the search for
the best one may stop early.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dpsgd_cli.accounting import conversions, renyi
from dpsgd_cli.accounting.accountants import ONLY_ZCDP, WithoutLeaks, split_delta
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, PureDP, Release, ZeroConcentrated, merge

ORDERS: tuple[float, ...] = (
    *(1.0001, 1.0002, 1.0005, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05),
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(float(round(64 * 2 ** (x / 8))) for x in range(65)),
)
"""Renyi orders, for epsilons up to tens of thousands and noise multipliers up to thousands."""

_MOMENTS = range(1, 33)


class Rdp(WithoutLeaks):
    """Accountant by the sum of Renyi divergences order by order, then the best order."""

    name = "rdp"
    bound = "upper"
    note = "best Renyi order"
    epsilon_at = staticmethod(conversions.renyi_epsilon)
    log_delta_at = staticmethod(conversions.renyi_log_delta)

    def __init__(self, orders: Sequence[float] = ORDERS) -> None:
        self.orders = tuple(sorted(orders))

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, GaussianSum) and mechanism.sampled and mechanism.batches.divergence is None:
            return f"{mechanism.batching} batches: no bound on their Renyi divergence is built in; use pld"
        return None

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        profile = Profile(kept)
        return self._best_epsilon(profile.total, delta, profile.has_kinks) if kept else 0.0

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        return self._delta_of(Profile(kept), epsilon)

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return delta as a function of epsilon; the divergence of each order is computed once."""
        del least
        self.check(releases)
        kept, leak = split_delta(releases)
        profile = Profile(kept)
        return lambda epsilon: min(1.0, leak + self._delta_of(profile, epsilon)) if kept else 0.0

    def _delta_of(self, profile: Profile, epsilon: float) -> float:
        log_delta = self.least(lambda order: self.log_delta_at(order, profile.total(order), epsilon), profile.has_kinks)
        by_kl = math.sqrt(-math.expm1(-profile.total(self.orders[0])))
        return min(by_kl, math.exp(min(log_delta, 0.0)))

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        flat = [release for releases in epochs for release in releases]
        self.check(flat)
        profile = Profile(flat)
        if np.isinf(profile.divergences(self.orders[0])).any():
            return super().curve(epochs, delta)
        columns = {mechanism: i for i, mechanism in enumerate(profile.mechanisms)}
        counts = np.zeros((len(epochs), len(columns)))
        for row, releases in enumerate(epochs):
            for release in releases:
                if release.count:
                    counts[row, columns[release.mechanism]] += release.count
        counts, spent = counts.cumsum(axis=0), dict[float, list[float]]()

        def total(order: float, epoch: int) -> float:
            if order not in spent:
                spent[order] = (counts @ profile.divergences(order)).tolist()
            return spent[order][epoch]

        return [
            self._best_epsilon(lambda order, epoch=epoch: total(order, epoch), delta, profile.has_kinks)  # type: ignore[misc]
            if counts[epoch].any()
            else 0.0
            for epoch in range(len(epochs))
        ]

    def _best_epsilon(self, total: Callable[[float], float], delta: float, kinks: bool) -> float:
        # Bretagnolle and Huber 1979: delta <= sqrt(1 - e^-KL), and KL is below every Renyi divergence.
        if -math.expm1(-total(self.orders[0])) <= delta * delta:
            return 0.0
        return max(0.0, self.least(lambda order: self.epsilon_at(order, total(order), delta), kinks))

    def least(self, objective: Callable[[float], float], kinks: bool = False) -> float:
        """Return the least value over the orders of an objective: quasi-convex, unless a divergence has `kinks`."""
        at = functools.cache(lambda index: objective(self.orders[index]))
        if kinks:
            return min(map(at, range(len(self.orders))))
        falling = range(len(self.orders) - 1)
        return at(bisect.bisect_left(falling, True, key=lambda index: at(index) <= at(index + 1)))


class MarkovRdp(Rdp):
    """Accountant with the first conversion, by Markov's inequality: D + log(1/delta) / (alpha - 1).

    Source: Mironov 2017, Proposition 3. With fractional orders, TensorFlow Privacy's tutorials print it as the moments
    accountant.
    """

    name = "rdp-markov"
    bound = "upper"
    note = "Markov conversion, fractional orders"

    @staticmethod
    def epsilon_at(order: float, divergence: float, delta: float) -> float:
        return divergence - math.log(delta) / (order - 1)

    @staticmethod
    def log_delta_at(order: float, divergence: float, epsilon: float) -> float:
        return (order - 1) * (divergence - epsilon)


class Moments(WithoutLeaks):
    """The moments accountant as published, for Poisson and full batches: not the best use of the same moments.

    epsilon = min over lambda of (alpha(lambda) + log(1/delta)) / lambda, lambda = 1, ..., 32.

    alpha(lambda) = lambda D_{lambda+1} is the log moment of the privacy loss, the larger of both directions, and
    adds up.
    Source: Abadi et al. 2016, Theorem 2; the direction by Mironov, Talwar and Zhang 2019, Theorem 5.
    """

    name = "moments"
    bound = "upper"
    note = "integer moments to 32, Markov conversion"

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return ONLY_ZCDP if isinstance(mechanism, ZeroConcentrated) else None
        if mechanism.batching == "shuffle":
            return (
                "shuffled batches: its moments are those of Poisson sampling, and shuffling is not Poisson sampling"
                " (its epsilon can be several times larger: Chua et al. 2024); use zcdp, gaussian, rdp or pld, which"
                " charge an epoch as one Gaussian"
            )
        if mechanism.sampled and not mechanism.comes_and_goes:
            return (
                f"{mechanism.batching} batches under {mechanism.adjacency} adjacency: its moments are those of Poisson"
                " batches with a record more or less; use pld"
            )
        return None

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        profile, log_budget = Profile(kept), math.log(1 / delta)
        return min(profile.total(moment + 1.0) + log_budget / moment for moment in _MOMENTS) if kept else 0.0

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        profile = Profile(kept)
        best = min(moment * (profile.total(moment + 1.0) - epsilon) for moment in _MOMENTS)
        return math.exp(min(best, 0.0))


class Profile:
    """Distinct mechanisms of some releases, with the cost of each at an order."""

    def __init__(self, releases: Sequence[Release]) -> None:
        merged = merge(list(releases))
        self.mechanisms = [release.mechanism for release in merged]
        self._counts = [release.count for release in merged]
        poisson = {i: m for i, m in enumerate(self.mechanisms) if isinstance(m, GaussianSum) and m.comes_and_goes}
        self._poisson = list(poisson)
        self._rates = np.array([mechanism.sampling_rate for mechanism in poisson.values()])
        self._noises = np.array([mechanism.noise_multiplier for mechanism in poisson.values()])
        self._totals: dict[float, float] = {}

    @property
    def has_kinks(self) -> bool:
        """True if a divergence is the least of two bounds, so that there may be several local best orders."""
        return any(isinstance(m, PureDP) and m.source == "exponential" for m in self.mechanisms)

    def total(self, order: float) -> float:
        """Return the Renyi divergence of everything together."""
        if order not in self._totals:
            costs = self.divergences(order).tolist()
            self._totals[order] = math.fsum(n * cost for n, cost in zip(self._counts, costs, strict=True))
        return self._totals[order]

    def divergences(self, order: float) -> renyi.Floats:
        """Return the divergence of one use of each distinct mechanism; all Poisson-sampled ones at once."""
        costs = np.empty(len(self.mechanisms))
        costs[self._poisson] = renyi.poisson_gaussian_divergences(self._rates, self._noises, order)
        for i in set(range(len(costs))) - set(self._poisson):
            found = self.mechanisms[i].divergence(order)
            costs[i] = math.inf if found is None else found
        return costs
