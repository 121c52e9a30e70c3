"""Conversions from zCDP, Renyi divergences and Gaussian DP to (epsilon, delta), and back. Plain floats, no accountants.

Notation: rho zCDP parameter, alpha Renyi order, mu Gaussian-DP parameter. Every function here is a theorem:
its result is a true statement whenever its arguments are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dpsgd_cli.accounting.search import smallest

_PEAK_DENSITY = 1 / math.sqrt(2 * math.pi)


def bun_steinke_epsilon(rho: float, delta: float) -> float:
    """Return rho + 2 sqrt(rho log(1/delta)): the published conversion of zCDP.

    Guarantee: a rho-zCDP release is (epsilon, delta)-DP. Source: Bun and Steinke 2016, Proposition 1.3.
    """
    return rho + 2 * math.sqrt(rho * math.log(1 / delta)) if rho < math.inf else math.inf


def bun_steinke_delta(rho: float, epsilon: float) -> float:
    """Return the inverse of `bun_steinke_epsilon` in delta; 1 where it proves nothing (epsilon <= rho)."""
    if rho == 0:
        return 0.0
    if epsilon <= rho or rho == math.inf:
        return 1.0
    return math.exp(-((epsilon - rho) ** 2) / (4 * rho))


def tight_zcdp_epsilon(rho: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 over all Renyi orders of a rho-zCDP release.

    epsilon = inf over alpha > 1 of alpha rho + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1).
    Guarantee: any order gives a true statement, so stopping the search early can only loosen it.
    Source: Canonne, Kamath and Steinke 2020, Proposition 12 and Corollary 13.
    """
    if rho == 0:
        return 0.0
    if rho == math.inf:
        return math.inf

    def at(log_order: float) -> float:
        excess = math.exp(log_order)
        return _epsilon(excess, rho * (1 + excess), delta)

    # The Bun-Steinke order 1 + sqrt(log(1/delta) / rho) is near the best one.
    centre = math.log(math.log(1 / delta) / rho) / 2
    return max(0.0, at(minimise(at, centre - 6, centre + 6)))


def tight_zcdp_delta(rho: float, epsilon: float) -> float:
    """Return the smallest delta over all Renyi orders of a rho-zCDP release; the inverse of `tight_zcdp_epsilon`.

    The logarithm is convex in alpha, with derivative (2 alpha - 1) rho - epsilon + log(1 - 1/alpha), whose root is
    searched for. Source: Canonne, Kamath and Steinke 2020, Corollary 13.
    """
    if rho == 0:
        return 0.0
    if rho == math.inf:
        return 1.0

    def past_the_root(excess: float) -> bool:
        return (2 * excess + 1) * rho - epsilon + math.log(excess) - math.log1p(excess) >= 0

    # any order gives a true statement, so a root that lies further out can only loosen it
    excess = smallest(past_the_root, math.exp(-40.0), 2 + (epsilon + 1) / rho, 1e-13)
    return math.exp(min(0.0, _log_delta(excess, rho * (1 + excess), epsilon)))


def renyi_epsilon(order: float, divergence: float, delta: float) -> float:
    """Return epsilon at `delta` of a release whose Renyi divergence of one order is bounded.

    May be negative: 0 then holds. Source: Canonne, Kamath and Steinke 2020, Proposition 12.
    """
    return _epsilon(order - 1, divergence, delta)


def renyi_log_delta(order: float, divergence: float, epsilon: float) -> float:
    """Return log delta at `epsilon`; the inverse of `renyi_epsilon`. May be positive: delta = 1 then holds."""
    return _log_delta(order - 1, divergence, epsilon)


def _epsilon(excess: float, divergence: float, delta: float) -> float:
    """Return `renyi_epsilon` in terms of alpha - 1, which keeps its digits where alpha comes near 1."""
    return divergence + math.log(excess) - math.log1p(excess) - (math.log(delta) + math.log1p(excess)) / excess


def _log_delta(excess: float, divergence: float, epsilon: float) -> float:
    return excess * (divergence - epsilon + math.log(excess) - math.log1p(excess)) - math.log1p(excess)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta at `epsilon` >= 0 of a mu-Gaussian-DP release.

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), written with Mills ratios so that
    neither tails nor small mu cancel. Guarantee: equality for compositions of Gaussians with mu^2 = sum 1/z_i^2.
    Source: Balle and Wang 2018, Theorem 8; Dong, Roth and Su 2022, Corollary 1.
    """
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return 1.0
    near = epsilon / mu - mu / 2
    far = epsilon / mu + mu / 2
    if near < -5:
        return math.erfc(near / math.sqrt(2)) / 2 - math.exp(-near * near / 2) * _PEAK_DENSITY * mills_ratio(far)
    return math.exp(-near * near / 2) * _PEAK_DENSITY * (mills_ratio(near) - mills_ratio(far))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon >= 0 with `gaussian_delta(mu, epsilon)` <= `delta`, from above to 1e-12 relative."""
    if mu == math.inf:
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    return smallest(lambda epsilon: gaussian_delta(mu, epsilon) <= delta, 0.0, bun_steinke_epsilon(mu * mu / 2, delta))


def mills_ratio(x: float) -> float:
    """Return the upper tail of the standard normal over its density at x, (1 - Phi(x)) / phi(x); inf below -37."""
    from scipy.special import erfcx  # SciPy, which most questions do without

    return math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2)))


def minimise(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-7) -> float:
    """Return where a quasi-convex function is about least in [low, high]: a point at which it was computed."""
    import numpy as np
    from scipy.optimize import minimize_scalar

    with np.errstate(invalid="ignore"):  # differences of values that are both inf
        return float(minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": tolerance}).x)
