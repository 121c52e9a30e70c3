"""The standard normal distribution in plain floats, accurate far into the tails.

For accountants that must answer without NumPy's import time. Not for arrays: see `privacy/loss/`.
"""

from __future__ import annotations

import math

_SQRT_HALF_PI = math.sqrt(math.pi / 2)
_CONTINUED_FRACTION_FROM = 6.0


def mills_ratio(x: float) -> float:
    """Upper tail of the standard normal over its density at x, (1 - Phi(x)) / phi(x).

    Relative error below 1e-13 for x >= -30; inf where the ratio passes the range of floats (x < -38).
    """
    if x < _CONTINUED_FRACTION_FROM:
        exponent = x * x / 2
        return _SQRT_HALF_PI * math.exp(exponent) * math.erfc(x / math.sqrt(2)) if exponent < 700 else math.inf
    value = x
    for k in range(60, 0, -1):
        value = x + k / value
    return 1 / value


def log_upper_tail(x: float) -> float:
    """log(1 - Phi(x)), finite for every finite x."""
    if x < _CONTINUED_FRACTION_FROM:
        return math.log(math.erfc(x / math.sqrt(2)) / 2)
    return math.log(mills_ratio(x)) - x * x / 2 - math.log(2 * math.pi) / 2


def normal_quantile(probability: float) -> float:
    """The x with Phi(x) = `probability` in (0, 1)."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
