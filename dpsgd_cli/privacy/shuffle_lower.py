"""What one epoch of shuffled batches costs AT LEAST: why no Poisson epsilon may be reported for it.

Not an accountant: a lower bound proves nothing about safety. The upper bounds are in `accountants/`.
"""

from __future__ import annotations

import math

from dpsgd_cli.privacy.normal import log_upper_tail


def epsilon_at_least(noise_multiplier: float, batches: int, delta: float) -> float:
    """A lower bound on epsilon at `delta` of one epoch of `batches` >= 1 shuffled batches, under zero-out.

    Against a record whose removal moves its batch from 2 to 1 while all other batches stay at 0, the event that some
    batch exceeds C has probabilities P = 1 - Phi((C-2)/z) Phi(C/z)^(T-1) and Q the same with 1 for 2, so that
    epsilon >= log((P - delta) / Q) for every C. The best C is found on a grid, which keeps the bound true.

    >>> round(epsilon_at_least(0.5, 10_000, 1e-6), 2)
    10.99

    Source: Chua et al. 2024, "How private are DP-SGD implementations?", section 4 (lower bound for shuffling).
    """
    best = 0.0
    for i in range(1, 4001):
        threshold = i * (2 + 12 * noise_multiplier) / 4000
        others = (batches - 1) * _log_below(threshold / noise_multiplier)
        with_record = -math.expm1(_log_below((threshold - 2) / noise_multiplier) + others)
        without = -math.expm1(_log_below((threshold - 1) / noise_multiplier) + others)
        if with_record > delta and without > 0:
            best = max(best, math.log((with_record - delta) / without))
    return best


def _log_below(x: float) -> float:
    """log Phi(x), to full precision on both sides."""
    return math.log1p(-math.exp(log_upper_tail(x))) if x > 0 else log_upper_tail(-x)
