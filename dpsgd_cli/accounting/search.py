"""Search for the last value of a number that a budget, or another monotone condition, allows.

It doubles and bisects. Everything that is solved for (`auto` in a recipe, `--solve`, a factor of all noise, the rho of
an epsilon, a delta) is found here, so that equal questions give equal numbers. Sums are compared with a limit exactly,
not after rounding.

The conditions are in `accounting/budget.py` and `accounting/accountants/`; minima are found by `conversions.minimise`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dpsgd_cli.errors import UnsupportedMechanism

PRECISION = 1e-7
"""Relative precision if each price needs an accountant. If prices are exact sums, it is 0: the last bit."""


@dataclass(frozen=True)
class Interval:
    """Range of a number, from its `cheap` end to its `expensive` end. Both are positive; either may be the larger.

    The search begins at `start`, a cheap value, because an accountant may have no price for almost no noise.
    `precision` is relative; 0 is the last bit. `whole`: the number is an integer.
    """

    name: str
    cheap: float
    expensive: float
    start: float
    precision: float = 0.0
    whole: bool = False


NOISE = Interval("noise multiplier", cheap=1e12, expensive=1e-6, start=1.0, precision=PRECISION)

Excess = Callable[[float], float]
"""Function from a value to log(spent / limit): <= 0 if the value fits, inf if the excess is unknown."""


def solve_at_limit(gap: Excess, span: Interval) -> float | None:
    """Return the value nearest `span.expensive` that fits; None if not even `span.cheap` does.

    Guarantee: gap(answer) was computed and is <= 0. If `gap` grows towards `span.expensive`, no value beyond the answer
    by more than the precision fits.
    Raises UnsupportedMechanism if the value next to the answer does not fit because it was refused, not because of its
    price. The accountant then does not know how much the budget affords.
    """
    refusals: dict[float, UnsupportedMechanism] = {}

    @functools.cache
    def asked(value: float) -> float:
        try:
            return gap(value)
        except UnsupportedMechanism as refusal:
            refusals[value] = refusal
            return math.inf
        except OverflowError:
            return math.inf

    fits, fails = _bracket(asked, span)
    if fits is not None and fails is not None:
        fits, fails = narrow(asked, fits, fails, span.precision, span.whole)
    if fails is not None and fails in refusals:
        nearby = "" if fits is None else f"; at {span.name} {fits:.6g} it answers, and the budget is not spent there"
        raise UnsupportedMechanism(f"{refusals[fails]}{nearby}") from None
    return fits


def _bracket(gap: Excess, span: Interval) -> tuple[float | None, float | None]:
    """Return a value that fits and one that does not, at most a factor of 2 apart; None for one that was not found."""
    value, fits, fails = span.start, None, None
    end = span.expensive if gap(value) <= 0 else span.cheap
    while True:
        if gap(value) <= 0:
            fits = value
        else:
            fails = value
        if value == end or (fits is not None and fails is not None):
            return fits, fails
        value = min(value * 2, end) if end > value else max(value // 2 if span.whole else value / 2, end)


def narrow(gap: Excess, fits: float, fails: float, precision: float = 0.0, whole: bool = False) -> tuple[float, float]:
    """Move `fits` and `fails` together to the wanted precision, with gap(fits) <= 0 < gap(fails). Return both.

    Either may be the larger. If both gaps are finite, a step goes along the secant, to a little past the expected root
    so that the other end follows. Otherwise, or if two steps have not halved the interval, it bisects. It stops if
    there is no number between the two.
    """
    at_fits, at_fails, slow = gap(fits), gap(fails), 0
    while (width := abs(fails - fits)) > (1 if whole else precision * max(abs(fits), abs(fails))):
        share = 0.5
        if slow < 2 and math.isfinite(at_fits) and math.isfinite(at_fails):
            root = at_fits / (at_fits - at_fails)
            margin = max(precision / 3 * max(abs(fits), abs(fails)) / width, 0.01 * min(root, 1 - root))
            share = root + margin if root < 0.5 else root - margin
        low, high = min(fits, fails), max(fits, fails)
        middle = _between(low, high, share if fits < fails else 1 - share, whole)
        if middle is None:
            break
        at = gap(middle)
        if at <= 0:
            fits, at_fits = middle, at
        else:
            fails, at_fails = middle, at
        slow = slow + 1 if abs(fails - fits) > width / 2 and share != 0.5 else 0
    return fits, fails


def _between(low: float, high: float, share: float, whole: bool) -> float | None:
    """Return a number strictly between the two, at about `share` of the way; None if there is none."""
    if 0 < 4 * low < high:
        middle = math.sqrt(low) * math.sqrt(high)
    else:
        middle = low + (high - low) * share
    if whole:
        middle = min(max(math.floor(middle), low + 1), high - 1)
    if not low < middle < high:
        middle = low + (high - low) / 2
    return middle if low < middle < high else None


def smallest(holds: Callable[[float], bool], low: float, high: float, precision: float = 1e-12) -> float:
    """Return the least x in (low, high] for which the monotone `holds` is true, rounded up to the precision.

    `holds(high)` must be true; `low` is not tried.
    """
    return narrow(_of_answers(holds, low), high, low, precision)[0]


def largest(holds: Callable[[float], bool], low: float, high: float, precision: float = 1e-12) -> float:
    """Return the largest x in [low, high) for which the monotone `holds` is true, rounded down to the precision.

    `holds(low)` must be true; `high` is not tried.
    """
    return narrow(_of_answers(holds, high), low, high, precision)[0]


def _of_answers(holds: Callable[[float], bool], fails: float) -> Excess:
    return lambda value: -math.inf if value != fails and holds(value) else math.inf


def gap_of(spent: float, limit: float) -> float:
    """Return log(spent / limit), which is nearly linear in the numbers that are searched for."""
    if math.isnan(spent) or spent == math.inf:
        return math.inf
    if spent <= 0:
        return -math.inf
    gap = math.log(spent) - math.log(limit)
    return _signed(gap, spent > limit)


def gap_of_sum(terms: list[float], limit: float) -> float:
    """Return log(sum of `terms` / limit); it is > 0 if and only if the sum is above `limit` before any rounding."""
    try:
        total = math.fsum(terms)
    except OverflowError:
        total = math.inf
    beyond = exceeds(terms, limit)
    return _signed(gap_of(total, limit), beyond)


def _signed(gap: float, beyond: bool) -> float:
    """Return `gap`, corrected if its rounded sign contradicts `beyond`."""
    return max(gap, math.ulp(1.0)) if beyond else min(gap, 0.0)


class ExactSum:
    """Exact sum of terms added one at a time. `total` is correctly rounded, like `math.fsum` of all terms.

    Terms are >= 0, possibly inf.
    """

    def __init__(self) -> None:
        self._finite, self._unbounded = Fraction(0), False

    def add(self, term: float) -> None:
        if math.isfinite(term):
            self._finite += Fraction(term)
        else:
            self._unbounded = True

    def passes(self, limit: float, extra: float) -> bool:
        """Return True if the sum plus `extra` is above `limit`, exactly. NaN is above every limit."""
        return self._unbounded or not math.isfinite(extra) or not self._finite + Fraction(extra) <= limit

    def total(self, extra: float = 0.0) -> float:
        """Return the sum plus `extra`, which is not stored; inf beyond the range of floats."""
        try:
            return math.inf if self._unbounded else float(self._finite + Fraction(extra))
        except OverflowError:
            return math.inf


def exceeds(terms: Sequence[float], limit: float) -> bool:
    """Return True if the exact sum of `terms` is above `limit`. No excess is lost to rounding.

    NaN counts as above every limit.
    """
    try:
        return not math.fsum([*terms, -limit]) <= 0
    except OverflowError:
        return True
