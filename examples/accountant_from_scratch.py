"""Two accountants in one file: the epsilon of DP-SGD by Renyi divergences, and by privacy loss distributions.

    python examples/accountant_from_scratch.py

The case: T steps; each uses every record with probability q, clips its gradient to norm 1, and adds normal noise of
standard deviation z to the sum. With one record more, a step's output along that record's gradient has the density
P = (1 - q) N(0, z^2) + q N(1, z^2) instead of Q = N(0, z^2) (Mironov et al. 2019; this pair of laws dominates all).
No part of the package is used. `tests/test_examples.py` compares the results with `dpsgd account`.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, logsumexp, ndtr

# by Renyi divergences: one number for each order, added up over steps, then turned into epsilon


def renyi_divergence(q: float, z: float, order: int) -> float:
    """Return D_order(P || Q) of one step, for a whole order above 1 (Mironov et al. 2019, Section 3.3).

    E_Q[(P / Q)^order] is a binomial sum: of k times the density ratio of N(1, z^2) it has exp(k (k - 1) / (2 z^2)). The
    divergence in the other direction is never larger (their Theorem 5).
    """
    k = np.arange(order + 1)
    binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = binomial + k * math.log(q) + (order - k) * math.log1p(-q) + k * (k - 1) / (2 * z**2)
    return float(logsumexp(terms)) / (order - 1)


def epsilon_by_renyi(q: float, z: float, steps: int, delta: float) -> float:
    """Return the least epsilon over whole orders up to 256 (conversion: Canonne, Kamath and Steinke 2020, Prop. 12)."""
    found = []
    for order in range(2, 257):
        divergence = steps * renyi_divergence(q, z, order)
        found.append(divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return min(found)


# by privacy loss distributions: the law of log(P / Q), on a grid, convolved with itself


def loss_distribution(q: float, z: float, width: float, remove: bool) -> tuple[int, np.ndarray, float]:
    """Return (first cell, probabilities of cells, probability of an infinite loss) of one step's privacy loss.

    Cell i stands for the loss i `width`. Losses are rounded up, so epsilon is an upper bound. `remove`: the loss is
    log(P / Q) under P; otherwise log(Q / P) under Q. Both directions have to hold.
    """

    def log_ratio(x: np.ndarray) -> np.ndarray:
        """Return log(P(x) / Q(x)), which grows with x."""
        return np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / z**2)

    def where(loss: np.ndarray) -> np.ndarray:
        """Return the x at which log(P / Q) is `loss`; minus infinity below its least value, log(1 - q)."""
        inside = np.expm1(np.maximum(loss, math.log1p(-q) + 1e-300)) / q + 1
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(inside > 0, 0.5 + z**2 * np.log(np.maximum(inside, 0)), -np.inf)

    def below(x: np.ndarray) -> np.ndarray:
        """Return the probability of values up to x: under P if `remove`, else under Q."""
        return (1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z) if remove else ndtr(x / z)

    ends = log_ratio(np.array([-14 * z, 14 * z + 1]))
    least, most = (ends[0], ends[1]) if remove else (-ends[1], -ends[0])
    first, last = math.floor(least / width), math.ceil(most / width)
    edges = np.arange(first, last + 1) * width
    cumulative = below(where(edges)) if remove else 1.0 - below(where(-edges))
    cumulative[0] = 0.0  # what lies below the first edge is counted at the second
    return first + 1, np.maximum(np.diff(cumulative), 0.0), max(1.0 - float(cumulative[-1]), 0.0)


def epsilon_by_loss_distribution(q: float, z: float, steps: int, delta: float, width: float = 1e-5) -> float:
    """Return epsilon: delta(epsilon) = E[max(0, 1 - e^(epsilon - loss))] for the sum of all steps' losses.

    Sums of independent losses are convolutions; the transform of a window of `size` cells does all of them at once.
    Losses that leave the window wrap around, so it is far larger than what the sum reaches.
    """
    worst = 0.0
    for remove in (True, False):
        first, probabilities, infinite = loss_distribution(q, z, width, remove)
        cells = (first + np.arange(len(probabilities))) * width
        mean = float(probabilities @ cells)
        deviation = math.sqrt(steps * max(float(probabilities @ cells**2) - mean**2, 0.0))
        size = 1 << math.ceil(math.log2(2 * (15 * deviation + 10) / width + len(probabilities)))
        start = round(steps * mean / width) - size // 2  # the window is centred on the mean of the sum
        transform = np.fft.rfft(probabilities, size) ** steps
        composed = np.maximum(np.roll(np.fft.irfft(transform, size), (steps * first - start) % size), 0.0)
        losses = (start + np.arange(size)) * width
        never = -math.expm1(steps * math.log1p(-infinite))

        def spent(epsilon: float, losses: np.ndarray = losses, p: np.ndarray = composed, never: float = never) -> float:
            return float((p * -np.expm1(np.minimum(epsilon - losses, 0.0))).sum()) + never

        low, high = 0.0, 200.0
        while high - low > 1e-7:
            middle = (low + high) / 2
            low, high = (middle, high) if spent(middle) > delta else (low, middle)
        worst = max(worst, high)
    return worst


def main() -> None:
    """Print both epsilons of 1,000 steps with q = .01 and z = 1."""
    q, z, steps, delta = 0.01, 1.0, 1000, 1e-5
    print(f"rdp: epsilon {epsilon_by_renyi(q, z, steps, delta):.4f} at delta {delta:g}")
    print(f"pld: epsilon {epsilon_by_loss_distribution(q, z, steps, delta):.4f} at delta {delta:g}")


if __name__ == "__main__":
    main()
