"""The law of an estimate that solves noisy linear equations, and 95% intervals from it. Uses NumPy only.

Estimate. H b = g is known through H~ = H + E and g~ = g + e. E is symmetric noise with standard deviation h on the
diagonal and h / sqrt(2) off it; e has standard deviation d. b is a vector T t of a public or released `coding` T
(D, D'): features that others add up to, as the categories of a column do, are left out. The estimate is b~ = G g~ with
the generalised inverse G = T (T^T H~ T)^-1 T^T. Let b be the population's value and g = H b + x with a sampling error x
of mean 0 and covariance M, so that

    b~ - b = G (x + e - E b).

E b has covariance (h^2 / 2) (|b|^2 I + b b^T). With b~ in the place of b, the covariance of b~ is

    V = G (M + d^2 I + (h^2 / 2) (|b~|^2 I + b~ b~^T)) G.

M holds the sampling, the other terms hold the noise that was added for privacy. The interval of <c, b> is
<c, b~> +- 1.96 sqrt(c^T V c).

Where it holds. The first-order law ignores that E and G depend on each other. With a = G c, the next order has variance
(h^2 / 2) (|a|^2 tr V + a^T V a). If that is more than `UNTOLD` times the first order, noise hides the curvature along
c, and no interval is given (`Intervals.told`). For logistic models the equations are a Newton step from theta, and the
curvature changes along it. Let m be the sum of p (1 - p) over the records. A step b moves g by at most (sqrt(3) / 2)
b^T H b / sqrt(m) standard deviations (in the norm of H, for rows with the kurtosis of a normal law). No interval is
given either if that is more than `UNSETTLED`.

`benchmarks/inference.py` measures the coverage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

UNTOLD = 0.1
UNSETTLED = 2.0
NORMAL = 1.959964
"""97.5% quantile of the standard normal law."""


@dataclass(frozen=True)
class Intervals:
    """Values (m,), ends (m,) of 95% intervals, and whether each interval may be told, bool (m,)."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    told: np.ndarray


@dataclass(frozen=True)
class Law:
    """Law of an estimate (D,): its covariance V (D, D), and what decides whether its intervals may be told.

    `inverse` (D, D) is G, `spread` is h, and `settled` is False if the last Newton step was too long.
    """

    estimate: np.ndarray
    covariance: np.ndarray
    inverse: np.ndarray
    spread: float
    settled: bool = True

    def of(self, functionals: np.ndarray) -> Intervals:
        """Return the intervals of <c, b> for the rows c of `functionals` (m, D)."""
        value = functionals @ self.estimate
        first = np.einsum("ij,jk,ik->i", functionals, self.covariance, functionals)
        ways = functionals @ self.inverse
        own = np.einsum("ij,jk,ik->i", ways, self.covariance, ways)
        second = self.spread**2 / 2 * (np.square(ways).sum(axis=1) * np.trace(self.covariance) + own)
        told = (first > 0) & (second <= UNTOLD * first) & self.settled
        half = NORMAL * np.sqrt(np.maximum(first, 0.0))
        return Intervals(value, value - half, value + half, told)


def inverse_of(curvature: np.ndarray, coding: np.ndarray) -> np.ndarray | None:
    """Return G (D, D) for H~ (D, D) and T (D, D'); None if T^T H~ T is not positive definite: noise hides it."""
    values, vectors = np.linalg.eigh(coding.T @ curvature @ coding)
    if not len(values) or not values[0] > 0:
        return None
    ways = coding @ vectors
    return np.asarray((ways / values) @ ways.T)


def solved(inverse: np.ndarray, gradient: np.ndarray, sampling: np.ndarray, spread: float, noise: float) -> Law:
    """Return the law of G g~, from G (D, D), g~ (D,), M (D, D), and the standard deviations h and d of the noise."""
    estimate, every = inverse @ gradient, np.eye(len(gradient))
    of_curvature = spread**2 / 2 * (estimate @ estimate * every + np.outer(estimate, estimate))
    covariance = inverse @ (sampling + noise**2 * every + of_curvature) @ inverse
    return Law(estimate, covariance, inverse, spread)


def sampling_of(curvature: np.ndarray, squares: np.ndarray, inverse: np.ndarray, deviation: float) -> np.ndarray:
    """Return the covariance M of the sampling error of a logistic gradient, from the noisy sum S of r^2 u u^T.

    If the model is right, M is the curvature H. S is therefore pulled towards k H~ with k = tr(G S) / D', by as much of
    its distance from that as noise of standard deviation `deviation` explains (James and Stein 1961).
    """
    size, rank = len(curvature), float(np.trace(inverse @ curvature))
    factor = float(np.trace(inverse @ squares)) / max(rank, 1.0)
    apart = squares - factor * curvature
    explained = deviation**2 * size * (size + 1) / 2
    kept = max(0.0, 1 - explained / max(float(np.square(apart).sum()), 1e-300))
    return np.asarray(max(factor, 0.25) * curvature + kept * apart)


def is_settled(step: np.ndarray, curvature: np.ndarray, weighted: float) -> bool:
    """Return True if a Newton step (D,) is short enough; `weighted` is m, known with noise."""
    return float(step @ curvature @ step) * math.sqrt(3) / 2 <= UNSETTLED * math.sqrt(max(weighted, 1.0))
