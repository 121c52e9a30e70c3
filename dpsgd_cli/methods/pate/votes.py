"""Bounds on the releases of PATE that depend on the votes, as published.

They are NON-PRIVATE: functions of the votes. As published, a bound is on one direction: the Renyi divergence of the
release with these votes from the release with a neighbour's, query by query. The divergence of the neighbour's release
from this one may be many times larger, so the number is no differential privacy and must not be published.

Sources: Papernot et al. 2017 (arXiv 1610.05755), Papernot et al. 2018 (arXiv 1802.08908).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import log_ndtr, logsumexp

ORDERS = np.concatenate([np.arange(1.5, 100, 0.5), np.logspace(2, 3, 40)])
"""Renyi orders at which the bounds that depend on the votes are added up."""


def max_log_q(votes: np.ndarray, noise: float) -> np.ndarray:
    """Return log of a bound on the probability that the largest count (Q, K) does not win (2018, Proposition 7)."""
    ordered = np.sort(votes, axis=1)[:, ::-1].astype(float)
    behind = ordered[:, :1] - ordered[:, 1:]
    return _at_most_by_chance(logsumexp(log_ndtr(-behind / (noise * math.sqrt(2))), axis=1), votes.shape[1])


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
    return max_renyi(np.minimum(log_p, log_rest), math.sqrt(2) * noise, orders)


def laplace_renyi(log_q: np.ndarray, scale: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Return the divergence (Q, orders) of `lnmax` with Laplace noise of `scale`, given log q (Q,) (2017, Theorem 3).

    It is never above the bounds of pure epsilon = 2 / scale: epsilon, and lambda epsilon^2 / 2.
    """
    epsilon, power = 2 / scale, orders - 1
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
