"""Claims of a paper, each a list of contrasts that it says are positive.

Paired 95% intervals confirm or refute them, never the eye.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from benchmarks.pages.rows import MISSING, Rows, Summary, markdown, side, summarised

Key = tuple[str, str]
CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "not decided"


def judged(sides: Iterable[int | None]) -> str:
    """Return `refuted` if an interval is below, `confirmed` if all are above; `not run` without one."""
    found = list(sides)
    if not found or None in found:
        return MISSING
    return REFUTED if -1 in found else CONFIRMED if set(found) == {1} else OPEN


@dataclass(frozen=True)
class Contrast:
    """Sum of the accuracies of `plus` less those of `less`, by seed."""

    label: str
    plus: tuple[Key, ...]
    less: tuple[Key, ...]

    def of(self, rows: Rows) -> Summary | None:
        """Over the seeds that all of them have; None where one has no rows."""
        parts = [(1, rows.of(*key)) for key in self.plus] + [(-1, rows.of(*key)) for key in self.less]
        told = [sign * found.set_index("seed")["test_accuracy"] for sign, found in parts if found is not None]
        if len(told) < len(parts):
            return None
        stale = any(rows.is_stale(*key) for key in (*self.plus, *self.less))
        return summarised(pd.concat(told, axis=1, join="inner").sum(axis=1), stale)


@dataclass(frozen=True)
class Claim:
    """What the paper says of a figure: that every contrast is above `-slack`."""

    figure: str
    words: str
    contrasts: tuple[Contrast, ...]
    slack: float = 0.0

    def found(self, rows: Rows) -> list[tuple[str, Summary]]:
        """The contrasts that have rows."""
        told = [(one.label, one.of(rows)) for one in self.contrasts]
        return [(label, one) for label, one in told if one is not None and one.margin is not None]

    def verdict(self, rows: Rows) -> str:
        """Whether whole intervals are above `-slack`, of the contrasts that have rows."""
        found = [side(one, -self.slack) for _, one in self.found(rows)]
        verdict = judged(found)
        return (
            f"{CONFIRMED} as far as it was run"
            if verdict == CONFIRMED and len(found) < len(self.contrasts)
            else verdict
        )

    def evidence(self, rows: Rows) -> str:
        """The differences, or of many how many are on which side."""
        found = self.found(rows)
        if len(found) <= 4:
            return "; ".join(f"{label}: {one.text(signed=True)}" for label, one in found)
        sides = [side(one) for _, one in found]
        least, most = (choose(found, key=lambda pair: pair[1].mean) for choose in (min, max))
        ends = "; ".join(f"{label}: {one.text(signed=True)}" for label, one in (least, most))
        return f"of {len(found)}, {sides.count(1)} above zero and {sides.count(-1)} below; {ends}"


def verdicts(rows: Rows, claims: Sequence[Claim]) -> str:
    """Claim by claim."""
    lines = [[one.figure, one.words, one.evidence(rows), one.verdict(rows)] for one in claims]
    return markdown(("where", "the paper says", "here, same seeds", "verdict"), lines)


def sentence(rows: Rows, claims: Sequence[Claim]) -> str:
    """The number of claims with each verdict, of those that were run."""
    found = [one.verdict(rows) for one in claims]
    words = sorted({verdict for verdict in found if verdict != MISSING})
    return ", ".join(f"{found.count(word)} are {word}" for word in words)
