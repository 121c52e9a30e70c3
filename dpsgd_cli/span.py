"""Where a number is looked for, from the end that costs least to the end that costs most.

Not here: the search (`privacy/search.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
