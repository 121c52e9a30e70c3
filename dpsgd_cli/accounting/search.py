"""The one search of this package: how far a number may go before a budget, or another monotone question, says no.

By doubling and bisection. Everything that is solved for (`auto` in a recipe, `--solve`, a factor of all noise, the rho
behind an epsilon, a delta) is found here, so that two places which ask the same question give the same number. Sums
are held to a limit exactly, not after rounding.
Not here: what is asked (`accounting/budget.py`, `accounting/accountants/`), least values of functions
(`privacy/conversions.minimise`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsgd_cli.errors import UnsupportedMechanism

PRECISION = 1e-7
"""Relative, where an accountant must be asked for each price; where prices are exact sums it is 0, the last bit."""


@dataclass(frozen=True)
class Span:
    """Where a number may lie, from its `cheap` end to its `expensive` end, either of which may be the larger.

    `start` is where the search begins: among the cheap ones, since an accountant may not know what next to no noise
    costs. `precision` is relative; 0 is the last bit. Both ends are positive.
    """

    name: str
    cheap: float
    expensive: float
    start: float
    precision: float = 0.0
    whole: bool = False


NOISE = Span("noise multiplier", cheap=1e12, expensive=1e-6, start=1.0, precision=PRECISION)

Gap = Callable[[float], float]
"""How far beyond the limit a value is, log(spent / limit): <= 0 where it fits, inf where nobody can say how far."""


def most_expensive(gap: Gap, span: Span) -> float | None:
    """The value nearest `span.expensive` that fits; None where not even `span.cheap` does.

    Guarantee: gap(answer) was asked, and is <= 0; where `gap` grows towards `span.expensive`, no value beyond the
    answer by more than the precision fits.
    Raises UnsupportedMechanism where it is a refusal, and no price, that lies behind the last value that fits: how much
    the budget affords is then not known to whoever was asked.
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


def _bracket(gap: Gap, span: Span) -> tuple[float | None, float | None]:
    """Two values, one that fits and one that does not, at most a factor of 2 apart; None for what was not found."""
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


def narrow(gap: Gap, fits: float, fails: float, precision: float = 0.0, whole: bool = False) -> tuple[float, float]:
    """Shrink gap(fits) <= 0 < gap(fails), either of which may be the larger, until they are as near as wanted.

    Steps along the secant where both gaps are known, aimed a little past the expected root so that the other end
    follows; a bisection where not, or when two steps have not halved the interval. Stops where no number is between.
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
    """A number strictly between, at about `share` of the way; None where there is none."""
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
    """Least x in (low, high] where the monotone `holds` is true, from above; `high` must hold, `low` is not asked."""
    return narrow(_of_answers(holds, low), high, low, precision)[0]


def largest(holds: Callable[[float], bool], low: float, high: float, precision: float = 1e-12) -> float:
    """Largest x in [low, high) where the monotone `holds` is true, from below; `low` must hold, `high` is not asked."""
    return narrow(_of_answers(holds, high), low, high, precision)[0]


def _of_answers(holds: Callable[[float], bool], fails: float) -> Gap:
    return lambda value: -math.inf if value != fails and holds(value) else math.inf


def gap_of(spent: float, limit: float) -> float:
    """log(spent / limit), nearly linear in what is searched for."""
    if math.isnan(spent) or spent == math.inf:
        return math.inf
    if spent <= 0:
        return -math.inf
    gap = math.log(spent) - math.log(limit)
    return _signed(gap, spent > limit)


def gap_of_sum(terms: list[float], limit: float) -> float:
    """The same of a sum: > 0 exactly where the sum of `terms` is above `limit`, before any rounding."""
    try:
        total = math.fsum(terms)
    except OverflowError:
        total = math.inf
    beyond = exceeds(terms, limit)
    return _signed(gap_of(total, limit), beyond)


def _signed(gap: float, beyond: bool) -> float:
    """`gap`, whose rounding must not say otherwise than `beyond`."""
    return max(gap, math.ulp(1.0)) if beyond else min(gap, 0.0)


class ExactSum:
    """Terms added one at a time; `total` is what `math.fsum` gives for all of them, correctly rounded.

    The exact value is held as a few floats whose digits do not overlap (Shewchuk 1997, "Adaptive precision
    floating-point arithmetic", Grow-Expansion). Terms are >= 0, possibly inf.
    """

    def __init__(self) -> None:
        self._parts: list[float] = []

    def add(self, term: float) -> None:
        parts = []
        for part in self._parts:
            large, small = (term, part) if abs(term) >= abs(part) else (part, term)
            term = large + small
            lost = small - (term - large)
            if lost and math.isfinite(term):
                parts.append(lost)
        self._parts = [*parts, term] if math.isfinite(term) else [term]

    def passes(self, limit: float, extra: float) -> bool:
        """Whether the sum with `extra` on top is above `limit`."""
        return exceeds([*self._parts, extra], limit)

    def total(self, extra: float = 0.0) -> float:
        """The sum, with `extra` on top that is not kept; inf where it passes the range of floats."""
        try:
            return math.fsum([*self._parts, extra])
        except OverflowError:
            return math.inf


def exceeds(terms: Sequence[float], limit: float) -> bool:
    """Whether the sum of `terms` is above `limit`: exactly, not after rounding, so that nothing slips below an ulp.

    What is no number is above every limit.
    """
    try:
        return not math.fsum([*terms, -limit]) <= 0
    except OverflowError:
        return True
