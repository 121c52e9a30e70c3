"""A running sum of floats that never rounds what it holds: a total after n terms costs one step, not n.

Not here: what is summed (`ledger.py`, `budget.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


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
