"""Private release of the data-dependent price of a PATE run, by smooth sensitivity.

The sum over queries of the divergences of `methods/pate/votes.py` at one order is a function of the votes, so it is
private. It is released with Gaussian noise scaled by its smooth sensitivity (GNSS; Papernot et al. 2018, Appendix B,
Theorem 23).

The release is f(votes) + SS_beta(votes) sigma N(0, 1), where SS_beta = max over d of exp(-beta d) LS_d. LS_d bounds how
much f moves between neighbours at distance d from the votes (every adjacency moves one vote of each query). The set of
answered queries is released before and enters as a constant. Price: at every order 1 < lambda < 1 / (2 beta) Renyi
divergence lambda e^(2 beta) / sigma^2 + (beta lambda - log(1 - 2 lambda beta) / 2) / (lambda - 1); recorded as
(epsilon, delta)-DP by the conversion at the best order. beta, sigma and the order are public. The published script
chooses sigma by the smooth sensitivity itself, which its theorem does not cover.

Local sensitivity of `gnmax`: Algorithms 3 to 5 (Proposition 13), which need conditions C5 (the bound grows with q) and
C6 (so do its differences). If they do not hold, there is no proof and the release is refused. Local sensitivity of the
threshold: enumeration. LS_d is taken over everything at distance d or less. The published script takes the value at
exactly distance d of each query, and a sum of those over queries is not smooth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfc, erfcinv

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import ApproximateDP
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.pate.settings import Sanitised
from dpsgd_cli.methods.pate.votes import (
    Aggregation,
    ConfidentMax,
    GaussianMax,
    by_theorem,
    max_log_q,
    max_renyi,
    theorem_holds,
    threshold_renyi,
)

_LEAST_LOG_Q = -650.0
"""Least log q. Differences below it are taken as those at it, which bound them by C6 and stay in floats' range."""
_GRID = 4000


def price(settings: Sanitised, adjacency: Adjacency) -> ApproximateDP:
    """Return the price of the release. Raises PrivacyError unless 1 < order < 1 / (2 beta).

    >>> from dpsgd_cli.methods.pate.settings import Sanitised
    >>> round(price(Sanitised(order=20, smoothness=0.02, noise=6, delta=1e-6), "add-remove").epsilon, 4)
    1.3644
    """
    beta = settings.smoothness
    if not 1 < settings.order < 1 / (2 * beta):
        raise PrivacyError(
            f"method.sanitised: smoothness {beta:g} proves something at orders between 1 and {1 / (2 * beta):g}, and"
            f" not at {settings.order:g}; lower one of them"
        )
    orders = np.linspace(1, 1 / (2 * beta), 10_001)[1:-1]
    converted = divergence(settings, orders) + math.log(1 / settings.delta) / (orders - 1)
    return ApproximateDP(float(converted.min()), settings.delta, adjacency, "sanitised epsilon")


def divergence(settings: Sanitised, orders: np.ndarray) -> np.ndarray:
    """Return the Renyi divergence of the release at `orders` (Theorem 23)."""
    beta = settings.smoothness
    shift = (beta * orders - np.log1p(-2 * orders * beta) / 2) / (orders - 1)
    return orders * math.exp(2 * beta) / settings.noise**2 + shift


@dataclass(frozen=True)
class Sensitivity:
    """The value of f(votes) at the order, and its smooth sensitivity. NON-PRIVATE."""

    value: float
    smooth: float


def check(rule: Aggregation, classes: int, settings: Sanitised) -> Curve:
    """Return the curve that the release is about. Raises PrivacyError if nothing is proved for it."""
    if not isinstance(rule, GaussianMax):
        raise PrivacyError("method.sanitised: its theorem is about gnmax and confident-gnmax; leave it out")
    curve = Curve(rule.noise, classes, settings.order)
    held = curve.conditions()
    if held != (True, True):
        raise PrivacyError(
            f"method.sanitised: conditions C5 and C6 are {held} at noise {rule.noise:g}, {classes} classes and order"
            f" {settings.order:g}, so nothing is proved; raise the noise or lower the order"
        )
    return curve


def of_votes(
    rule: Aggregation, votes: np.ndarray, answered: np.ndarray, teachers: int, settings: Sanitised
) -> Sensitivity:
    """Return f and SS_beta of the counts (Q, K), of which some were `answered`. Raises as `check` does."""
    curve, at = check(rule, votes.shape[1], settings), np.array([settings.order])
    value = max_renyi(max_log_q(votes[answered], curve.noise), curve.noise, at).sum()
    local = _of_answers(curve, votes[answered], teachers)
    if isinstance(rule, ConfidentMax):
        by_count = threshold_renyi(np.arange(teachers + 1), rule.test.threshold, rule.test.threshold_noise, at)[:, 0]
        largest = votes.max(axis=1)
        value += by_count[largest].sum()
        local = local + _of_thresholds(by_count, largest)
    discounts = np.exp(-settings.smoothness * np.arange(len(local)))
    return Sensitivity(float(value), float((discounts * local).max()))


@dataclass(frozen=True)
class Curve:
    """The bound of Theorem 6 at one order as a function of log q, for `noise` and a number of `classes`."""

    noise: float
    classes: int
    order: float

    def at(self, log_q: np.ndarray) -> np.ndarray:
        """Return the bound; from `log_q0` on, the bound that needs no q, which is less there."""
        free = self.order / self.noise**2
        inside = np.minimum(log_q, self.log_q0)
        return np.where(log_q < self.log_q0, self._theorem(inside), free)

    def _theorem(self, log_q: np.ndarray) -> np.ndarray:
        return by_theorem(np.atleast_1d(log_q), self.noise, np.array([self.order]))[:, 0].reshape(np.shape(log_q))

    @cached_property
    def log_q0(self) -> float:
        """The log q from which the bound without q is the lesser; below it the theorem's conditions hold.

        Raises PrivacyError if they do not hold there.
        """
        noise, order = self.noise, self.order
        high = min(-((1 + 1 / noise) ** 2), -(((order - 0.99) / noise) ** 2), -1 / noise**2)

        def beyond(log_q: float) -> float:
            return float(self._theorem(np.array([log_q]))[0] - order / noise**2)

        low = high
        if beyond(high) >= 0:
            while beyond(low) > 0:
                low *= 1.5
            low = brentq(beyond, low, high)
        if not theorem_holds(np.array([low]), noise, np.array([order]))[0, 0]:
            raise PrivacyError(f"method.sanitised: Theorem 6 does not hold at order {order:g} and noise {noise:g}")
        return float(low)

    def fewer(self, log_q: np.ndarray) -> np.ndarray:
        """Return log of the least q of a neighbour."""
        return self._moved(log_q, 1)

    def more(self, log_q: np.ndarray) -> np.ndarray:
        """Return log of the largest q of a neighbour."""
        return self._moved(log_q, -1)

    def _moved(self, log_q: np.ndarray, sign: int) -> np.ndarray:
        half = (self.classes - 1) / 2
        with np.errstate(divide="ignore"):
            found = half * erfc(sign / self.noise + erfcinv(np.exp(log_q) / half))
        return np.log(np.clip(found, 1e-300, 1.0))

    def moves(self, log_q: np.ndarray) -> np.ndarray:
        """Return how much one vote may move the bound (Algorithm 3)."""
        log_q = np.maximum(log_q, _LEAST_LOG_Q)
        first = self.log_q0
        second = float(self.fewer(np.array(first)))
        log_q = np.where((log_q >= second) & (log_q <= first), second, log_q)
        here = self.at(log_q)
        return np.maximum(self.at(self.more(log_q)) - here, here - self.at(self.fewer(log_q)))

    def conditions(self) -> tuple[bool, bool]:
        """Return whether C5 and C6 hold, on a grid of log q."""
        grid = np.linspace(_LEAST_LOG_Q, self.log_q0, _GRID)
        grows = bool((np.diff(self._theorem(grid)) >= 0).all())
        if not grows:
            return False, False
        grid = np.linspace(_LEAST_LOG_Q, float(self.fewer(np.array(self.log_q0))), _GRID)
        moves = self._theorem(self.more(grid)) - self._theorem(grid)
        return True, bool((np.diff(moves) >= -1e-12 * np.abs(moves[1:])).all())


def _of_answers(curve: Curve, votes: np.ndarray, teachers: int) -> np.ndarray:
    """Return LS_d (teachers,), added up over queries: votes move towards the plateau as fast as possible.

    Source: Algorithms 4 and 5.
    """
    first = curve.log_q0
    second = float(curve.fewer(np.array(first)))
    plateau = float(curve.moves(np.array([second]))[0])
    ordered = np.sort(votes, axis=1)[:, ::-1].copy()
    log_q = max_log_q(ordered, curve.noise)
    largest = curve.moves(log_q)
    widens, there = log_q > first, (log_q >= second) & (log_q <= first)
    total = np.zeros(teachers)
    for distance in range(teachers):
        largest = np.where(there, np.maximum(largest, plateau), np.maximum(largest, curve.moves(log_q)))
        total[distance] = largest.sum()
        if there.all():
            total[distance:] = total[distance]
            break
        step = np.where(widens, 1, -1) * ~there
        ordered[:, 0] += step
        ordered[:, 1] -= step
        ordered = np.sort(ordered, axis=1)[:, ::-1].copy()
        log_q = max_log_q(ordered, curve.noise)
        there |= np.where(widens, (log_q <= first) | (ordered[:, 1] == 0), log_q >= second)
    return total


def _of_thresholds(by_count: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return LS_d (teachers,) of the thresholds, added up over queries.

    `by_count` holds the bound for each largest count, `largest` the largest count of each query.
    """
    moves = np.abs(np.diff(by_count))
    local = np.maximum(np.append(moves, 0.0), np.insert(moves, 0, 0.0))
    distances = np.arange(len(by_count) - 1)
    up, down = largest[:, None] + distances, largest[:, None] - distances
    above = np.where(up < len(by_count), local[np.minimum(up, len(local) - 1)], 0.0)
    below = np.where(down >= 0, local[np.maximum(down, 0)], 0.0)
    return np.maximum.accumulate(np.maximum(above, below), axis=1).sum(axis=0)
