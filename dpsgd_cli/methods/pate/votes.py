"""Rules of PATE: how the votes of n teachers on one query become a released label, or none, and the price of that.

One record is in one teacher's part (`methods/pate/run.py`), so neighbouring data change at most one vote: one count
falls by 1 and another rises by 1, or nothing changes. That holds whether a record is added, removed or replaced, so
every adjacency has the same sensitivities: of all K counts L1 2 and L2 sqrt(2), of their maximum 1.

Each aggregation rule is one class here (and its section in `methods/pate/settings.py`). It states the charge for asking
a query, the charge for answering it, the two decisions, and, if a theorem gives one, a bound that depends on the votes.

`renyi` is NON-PRIVATE: a function of the votes. As published, it bounds one direction: the Renyi divergence of the
release with these votes from the release with a neighbour's, query by query. The divergence of the neighbour's release
from this one may be many times larger, so the number is no differential privacy and must not be published.

Sources: Papernot et al. 2017 (arXiv 1610.05755), Papernot et al. 2018 (arXiv 1802.08908).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
from scipy.special import log_ndtr, logsumexp

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, PureDP
from dpsgd_cli.methods.pate.settings import ConfidentGnMax, GnMax, LnMax


class VoteNoise(Protocol):
    """Source of noise for the statistics of one query; each purpose is used at most once in it (`noise/run.py`)."""

    def gaussian(self, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        """Return `exact` plus Gaussian noise of the mechanism's multiplier times its sensitivity."""

    def laplace(self, purpose: str, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int) -> np.ndarray:
        """Return `exact` plus Laplace noise of scale `sensitivity` / `epsilon`; a record changes `changed` numbers."""


ALL_COUNTS_L1 = 2.0
ALL_COUNTS_L2 = math.sqrt(2.0)
LARGEST_COUNT = 1.0

ORDERS = np.concatenate([np.arange(1.5, 100, 0.5), np.logspace(2, 3, 40)])
"""Renyi orders at which the bounds that depend on the votes are added up."""


class Aggregation(ABC):
    """One aggregation rule with its settings. `votes` are counts, shape (K,), or (Q, K) for Q queries; K >= 2."""

    @abstractmethod
    def asked(self, adjacency: Adjacency) -> Mechanism | None:
        """Return the release of every query, answered or not; charged before `accepts` is called. None: no release."""

    @abstractmethod
    def answered(self, adjacency: Adjacency) -> Mechanism | None:
        """Return the further release of an answer; charged before `label` is called. None: no release."""

    @property
    def is_adaptive(self) -> bool:
        """True if the spending of a run depends on what was released: answers cost, and queries may stay unanswered."""
        return self.asked("add-remove") is not None and self.answered("add-remove") is not None

    @abstractmethod
    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        """Return whether the query is answered. May read nothing that `asked` does not charge."""

    @abstractmethod
    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        """Return the released label."""

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray | None:
        """Return the divergence at each of `ORDERS`, added up over queries (Q, K), some `answered`. NON-PRIVATE.

        Returns None if no theorem gives one.
        """
        del votes, answered
        return None


class LaplaceMax(Aggregation):
    """Rule `lnmax` (Papernot et al. 2017, section 2.1): the largest of the counts, each with Laplace noise of scale b.

    It releases the index. Counts have L1 sensitivity 2, so all noisy counts, and the index with them, are (2 / b)-DP.
    """

    def __init__(self, settings: LnMax) -> None:
        self.scale = solved(settings.noise)

    def asked(self, adjacency: Adjacency) -> None:
        """Return None: every query is answered."""

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        del votes, noise
        return True

    def answered(self, adjacency: Adjacency) -> PureDP:
        return PureDP(ALL_COUNTS_L1 / self.scale, adjacency, "pure", "vote")

    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        epsilon = ALL_COUNTS_L1 / self.scale
        return int(np.argmax(noise.laplace("vote", votes, epsilon, ALL_COUNTS_L1, changed=2)))

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        del answered
        return laplace_renyi(laplace_log_q(votes, self.scale), self.scale).sum(axis=0)


class GaussianMax(Aggregation):
    """Rule `gnmax` (Papernot et al. 2018, section 4.1): the largest of the counts, each with noise N(0, sigma^2).

    It releases the index, a function of all noisy counts. Those are one Gaussian mechanism of L2 sensitivity sqrt(2),
    so of noise multiplier sigma / sqrt(2).
    """

    def __init__(self, settings: GnMax | ConfidentGnMax) -> None:
        self.noise = solved(settings.noise)

    def asked(self, adjacency: Adjacency) -> GaussianSum | None:
        """Return None: every query is answered."""
        del adjacency
        return None

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        del votes, noise
        return True

    def answered(self, adjacency: Adjacency) -> GaussianSum:
        return gaussian(self.noise, ALL_COUNTS_L2, adjacency, "vote")

    def label(self, votes: np.ndarray, noise: VoteNoise) -> int:
        return int(np.argmax(noise.gaussian("vote", votes, self.answered("add-remove"))))

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        return max_renyi(max_log_q(votes[answered], self.noise), self.noise).sum(axis=0)


class ConfidentMax(GaussianMax):
    """Rule `confident-gnmax` (Papernot et al. 2018, Algorithm 1): `gnmax`, for queries on which enough teachers agree.

    It releases, for every query, whether its largest count plus N(0, sigma_1^2) reaches the threshold: a Gaussian
    mechanism of sensitivity 1. For a query that reaches it, it also releases the answer of `gnmax`, with noise of its
    own. The spending depends on how many queries reach the threshold, so only the most that the filter ever admits is a
    bound (Smith and Thakurta 2022).
    """

    def __init__(self, settings: ConfidentGnMax) -> None:
        super().__init__(settings)
        self.test = settings

    def asked(self, adjacency: Adjacency) -> GaussianSum:
        return gaussian(self.test.threshold_noise, LARGEST_COUNT, adjacency, "threshold")

    def accepts(self, votes: np.ndarray, noise: VoteNoise) -> bool:
        noisy = noise.gaussian("threshold", votes.max(keepdims=True), self.asked("add-remove"))
        return bool(noisy[0] >= self.test.threshold)

    def renyi(self, votes: np.ndarray, answered: np.ndarray) -> np.ndarray:
        compared = threshold_renyi(votes.max(axis=1), self.test.threshold, self.test.threshold_noise)
        return super().renyi(votes, answered) + compared.sum(axis=0)


def solved(noise: float | str) -> float:
    """Return `noise`, which the plan has replaced by a number if it was `auto`."""
    assert not isinstance(noise, str)
    return noise


def gaussian(noise: float, sensitivity: float, adjacency: Adjacency, label: str) -> GaussianSum:
    """Return the mechanism of noise of standard deviation `noise` on votes of L2 `sensitivity`."""
    return GaussianSum(noise / sensitivity, adjacency, sensitivity=sensitivity, label=label)


def max_log_q(votes: np.ndarray, noise: float) -> np.ndarray:
    """Return log of a bound on the probability that the largest count (Q, K) does not win (2018, Proposition 7)."""
    ordered = np.sort(votes, axis=1)[:, ::-1].astype(float)
    behind = ordered[:, :1] - ordered[:, 1:]
    return _at_most_by_chance(logsumexp(log_ndtr(-behind / (noise * ALL_COUNTS_L2)), axis=1), votes.shape[1])


def laplace_log_q(votes: np.ndarray, scale: float) -> np.ndarray:
    """Return log of that bound (see `max_log_q`) for Laplace noise of `scale` (2017, Lemma 4)."""
    ordered = np.sort(votes, axis=1)[:, ::-1].astype(float)
    behind = (ordered[:, :1] - ordered[:, 1:]) / scale
    return _at_most_by_chance(logsumexp(np.log((2 + behind) / 4) - behind, axis=1), votes.shape[1])


def _at_most_by_chance(log_q: np.ndarray, classes: int) -> np.ndarray:
    return np.minimum(log_q, math.log1p(-1 / classes))


def max_renyi(log_q: np.ndarray, noise: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Return the Renyi divergence (Q, orders) of `gnmax` with noise sigma, given log q (Q,) (2018, Theorem 6).

    It is the least of lambda / sigma^2, which needs no q, and, if its conditions hold, log((1 - q) A^(lambda - 1) +
    q B^(lambda - 1)) / (lambda - 1).
    """
    free = np.broadcast_to(orders / noise**2, (len(log_q), len(orders)))
    return np.where(theorem_holds(log_q, noise, orders), np.minimum(free, by_theorem(log_q, noise, orders)), free)


def theorem_holds(log_q: np.ndarray, noise: float, orders: np.ndarray) -> np.ndarray:
    """Return a boolean array (Q, orders): true where the conditions of Theorem 6 hold."""
    second, epsilon2 = _of_theorem(log_q, noise)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = (second - 1) * epsilon2 - second * np.log((second + 1) / second * second / (second - 1))
        by_query = (second > 1) & (-log_q > epsilon2) & (log_q <= most)
    return by_query[:, None] & (orders <= second[:, None] + 1)


def by_theorem(log_q: np.ndarray, noise: float, orders: np.ndarray) -> np.ndarray:
    """Return the bound of Theorem 6 (Q, orders), without checking its conditions."""
    second, epsilon2 = _of_theorem(log_q, noise)
    epsilon1 = (second + 1) / noise**2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log_rest = np.log1p(-np.exp(log_q))
        log_a = log_rest - np.log1p(-np.exp((log_q + epsilon2) * (1 - 1 / second)))
        log_b = epsilon1 - log_q / second
        power = orders - 1
        both = np.logaddexp(log_rest[:, None] + power * log_a[:, None], log_q[:, None] + power * log_b[:, None])
        return both / power


def _of_theorem(log_q: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mu_2 and epsilon_2 of Theorem 6; mu_1 is mu_2 + 1."""
    second = noise * np.sqrt(-log_q)
    return second, second / noise**2


def threshold_renyi(largest: np.ndarray, threshold: float, noise: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Return the divergence (Q, orders) of comparing the largest counts (Q,), plus N(0, noise^2), with `threshold`.

    In the theorem of `max_renyi`, q is the probability of the rarer answer, and sigma is sqrt(2) noise: one count has
    sensitivity 1.
    """
    log_p = log_ndtr((largest - threshold) / noise)
    log_rest = log_ndtr((threshold - largest) / noise)
    return max_renyi(np.minimum(log_p, log_rest), ALL_COUNTS_L2 * noise, orders)


def laplace_renyi(log_q: np.ndarray, scale: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Return the divergence (Q, orders) of `lnmax` with Laplace noise of `scale`, given log q (Q,) (2017, Theorem 3).

    It is never above the bounds of pure epsilon = 2 / scale: epsilon, and lambda epsilon^2 / 2.
    """
    epsilon, power = ALL_COUNTS_L1 / scale, orders - 1
    free = np.broadcast_to(np.minimum(epsilon, orders * epsilon**2 / 2), (len(log_q), len(orders)))
    holds = log_q <= -math.log1p(math.exp(epsilon))
    with np.errstate(divide="ignore", invalid="ignore"):
        log_rest = np.log1p(-np.exp(log_q))
        log_a = log_rest - np.log1p(-np.exp(log_q + epsilon))
        both = np.logaddexp(log_rest[:, None] + power * log_a[:, None], log_q[:, None] + power * epsilon)
    return np.where(holds[:, None], np.minimum(free, both / power), free)


def epsilon_at(renyi: np.ndarray, delta: float, orders: np.ndarray = ORDERS) -> float:
    """Return the epsilon of divergences at `orders` by the published conversion, renyi + log(1 / delta) / (lambda - 1).

    Source: Mironov 2017, Proposition 3. The papers use it, so their numbers and these are comparable.
    """
    return float(np.min(renyi + math.log(1 / delta) / (orders - 1)))
