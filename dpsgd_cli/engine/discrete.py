"""Laplace noise and private choices by integer arithmetic and fair coins, without floating-point decisions.

Every score and count s becomes the integer m = rint(s 2^42 / scale), in exact rational arithmetic. The mechanisms are
exact for these integers. Rounding moves an m by at most 1 more than its score moves. The epsilon of the draw is reduced
accordingly (`drawn_epsilon`), so the charged epsilon is valid.

Discrete Laplace: P[Z = z] is proportional to exp(-|z| 2^-42). The distribution of m + Z is that of m' + Z up to a
factor exp(|m - m'| 2^-42), point by point. So a release of m + Z is epsilon-DP if |m - m'|_1 2^-42 <= epsilon.

Noisy-min: the least m_i + Z_i; among equal ones, the first. Given the noise of the others, i wins if Z_i is at most an
integer t. If all m move in one direction, t moves by at most max |m - m'| (Dwork and Roth 2014, Claim 3.9, whose proof
is about P[Z_i <= t] alone; the rule for ties only determines t).

Exponential: i with probability proportional to exp(-m_i 2^-42). A uniform i is accepted with probability
exp(-(m_i - min m) 2^-42), else drawn again. The exponents move by numbers in an interval of length epsilon.

Source: Canonne, Kamath and Steinke 2020, "The discrete Gaussian for differential privacy", Algorithms 1 and 2. The
time of a draw depends on its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

Coins = Callable[[int], int]
"""Function of n that draws a uniform integer of n bits, independent of all other draws."""

BITS = 42
_SCALE = 1 << BITS


def on_grid(value: float, unit: Fraction) -> int:
    """Return the integer nearest to value / unit 2^42."""
    return round(Fraction(value) / unit * _SCALE)


def drawn_epsilon(epsilon: float, moved: int) -> Fraction:
    """Return the epsilon of the draw: `epsilon` minus `moved` 2^-42, where rounding moves integers by `moved` in all.

    Raises ValueError if the result is not positive.
    """
    left = Fraction(epsilon) - Fraction(moved, _SCALE)
    if left <= 0:
        raise ValueError(f"epsilon {epsilon:g} is not above {moved} 2^-42, which rounding to the grid costs")
    return left


def laplace(coins: Coins) -> int:
    """Draw Z with P[Z = z] proportional to exp(-|z| 2^-42)."""
    while True:
        below = coins(BITS)
        if not _accepted(below, _SCALE, coins):
            continue
        whole = 0
        while _accepted(1, 1, coins):
            whole += 1
        size = below + whole * _SCALE
        if coins(1):
            return size
        if size:
            return -size


def least_noisy(scores: Sequence[int], coins: Coins) -> int:
    """Return the index of the least score plus Laplace noise."""
    noisy = [score + laplace(coins) for score in scores]
    return noisy.index(min(noisy))


def least_likely(scores: Sequence[int], coins: Coins) -> int:
    """Draw an index i with probability proportional to exp(-score_i 2^-42)."""
    least = min(scores)
    while True:
        place = _below(len(scores), coins)
        above, rest = divmod(scores[place] - least, _SCALE)
        # one factor exp(-1) after the other: usually the first few decide
        while above and _accepted(1, 1, coins):
            above -= 1
        if not above and _accepted(rest, _SCALE, coins):
            return place


def _accepted(numerator: int, denominator: int, coins: Coins) -> bool:
    """Return True with probability exp(-numerator / denominator), for a fraction in [0, 1]."""
    turn = 1
    while _below(denominator * turn, coins) < numerator:
        turn += 1
    return turn % 2 == 1


def _below(count: int, coins: Coins) -> int:
    """Draw a uniform integer of 0..count-1."""
    bits = (count - 1).bit_length()
    while (found := coins(bits) if bits else 0) >= count:
        pass
    return found


def finite(value: float) -> float:
    """Return the score, with NaN and infinity replaced by +-1e300; NaN becomes +1e300, which is never preferred."""
    return value if math.isfinite(value) else math.copysign(1e300, 1.0 if math.isnan(value) else value)
