"""Numbers in printed text, with the digits that matter; epsilons are rounded up. Files hold numbers in full."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal

_LEAST, _MOST = 0.01, 1e6


def epsilon_text(epsilon: float) -> str:
    """Return an epsilon, rounded up to four decimals, or to four digits if it is very small or large.

    >>> epsilon_text(2.99991), epsilon_text(1e-6), epsilon_text(0.000123412), epsilon_text(12345678.9)
    ('3.0000', '1e-06', '0.0001235', '1.235e+07')
    """
    if epsilon == 0 or not math.isfinite(epsilon):
        return f"{epsilon:.4f}"
    # the shortest decimal of this number: 0.1 must not become 0.1001 because of its binary digits
    exact = Decimal(repr(float(epsilon)))
    if _LEAST <= epsilon < _MOST:
        return str(exact.quantize(Decimal("0.0001"), rounding=ROUND_CEILING))
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).plus(exact)):.4g}"


def metric_text(value: float) -> str:
    """Return a loss or an accuracy, rounded to four decimals, or to four digits if it is very small or large.

    >>> metric_text(0.91254), metric_text(0.0), metric_text(2.5e-7), metric_text(3262659971121966963065094144.0)
    ('0.9125', '0.0000', '2.5e-07', '3.263e+27')
    """
    return f"{value:.4f}" if value == 0 or _LEAST <= abs(value) < _MOST else f"{value:.4g}"


def interval_text(value: float, half: float | None, sign: str = "") -> str:
    """Return a value with the half-width of its interval, if it has one, both in the format of the larger.

    >>> interval_text(0.91254, 0.0012), interval_text(-0.0012, 0.02, "+"), interval_text(2.5e-7, 1e-8)
    ('0.9125 +- 0.0012', '-0.0012 +- 0.0200', '2.5e-07 +- 1e-08')
    """
    size = max(abs(value), half or 0.0)
    digits = ".4f" if size == 0 or _LEAST <= size < _MOST else ".4g"
    return f"{value:{sign}{digits}}" + ("" if half is None else f" +- {half:{digits}}")
