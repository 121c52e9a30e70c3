"""The paper's claims, one by one, and where rows confirm or refute them: by paired 95% intervals, never by eye.

Not here: the tables that they are read from (`page.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from benchmarks.lee2018.cases import EPSILONS, named
from benchmarks.pages.rows import MISSING, Rows, markdown, side

RIVALS = ("objective-perturbation", "output-perturbation", "privgene", "sgd-adv", "sgd-ma")
OBJECTIVE = "nonprivate_train_objective"
SMALL, LARGE = EPSILONS[:2], EPSILONS[-1:]
CONFIRMED, REFUTED, OPEN = "confirmed", "refuted", "not decided"
Verdict = str | None
"""One of the three words; None where there are no rows."""


def differences(rows: Rows, table: str, one: str, epsilon: float, others: Sequence[str]) -> list[int | None]:
    """Of a method and each of some others at one budget."""
    own = (table, named(one, epsilon))
    return [side(rows.minus(own, (table, named(other, epsilon)))) for other in others]


def _ahead(one: str, budgets: Sequence[float], others: Sequence[str]) -> Callable[[Rows, str], Verdict]:
    """Whether a method is above all others at all of these budgets; one that is above it is enough to refute."""

    def judge(rows: Rows, table: str) -> Verdict:
        return _all(found for e in budgets for found in differences(rows, table, one, e, others))

    return judge


def _steps(rows: Rows, table: str, column: str) -> list[int | None]:
    """How a column of DP-AGD moves each time the budget is doubled."""
    cases = [(table, named("dp-agd", epsilon)) for epsilon in EPSILONS]
    return [side(rows.minus(more, less, column)) for more, less in itertools.pairwise(reversed(cases))]


def _objective_falls(rows: Rows, table: str) -> Verdict:
    return _all(None if one is None else -one for one in _steps(rows, table, OBJECTIVE))


def _accuracy_falls_somewhere(rows: Rows, table: str) -> Verdict:
    found = _steps(rows, table, "test_accuracy")
    if None in found:
        return None
    return CONFIRMED if -1 in found else REFUTED if set(found) == {1} else OPEN


def _all(sides: Iterable[int | None]) -> Verdict:
    found = list(sides)
    if None in found:
        return None
    return REFUTED if -1 in found else CONFIRMED if set(found) == {1} else OPEN


CLAIMS: dict[str, tuple[str, Callable[[Rows, str], Verdict]]] = {
    "DP-AGD is the most accurate at epsilon .05 and .1": ("", _ahead("dp-agd", SMALL, RIVALS)),
    "DP-AGD with the better split is the most accurate at epsilon .05 and .1": (
        "",
        _ahead("dp-agd-better", SMALL, RIVALS),
    ),
    "SGD-MA is the most accurate above epsilon .8": ("", _ahead("sgd-ma", LARGE, ("dp-agd", *RIVALS[:-1]))),
    "DP-AGD's objective falls whenever the budget is doubled": ("", _objective_falls),
    "DP-AGD's accuracy on an SVM sometimes falls with more budget": ("svm", _accuracy_falls_somewhere),
}
"""What is claimed, for which tables (their end), and what judges it."""


def verdicts(rows: Rows, tables: dict[str, str]) -> str:
    """A line a claim: where it is confirmed, refuted, and not decided."""
    lines = []
    for claim, (end, judge) in CLAIMS.items():
        found = {title: judge(rows, table) for table, title in tables.items() if table.endswith(end)}
        cells = ["; ".join(title for title, one in found.items() if one == word) for word in (CONFIRMED, REFUTED, OPEN)]
        if any(cells):
            lines.append([claim, *cells])
    return markdown(("claim", CONFIRMED, REFUTED, OPEN), lines) if lines else MISSING


def behind(rows: Rows, tables: Iterable[str], method: str) -> list[bool]:
    """Of each table that has rows of all rivals, whether one of them is above a method at a small budget."""
    found = [[one for e in SMALL for one in differences(rows, table, method, e, RIVALS)] for table in tables]
    return [-1 in sides for sides in found if None not in sides]


def counted(rows: Rows, tables: dict[str, str]) -> str:
    """A line a table and split: how many of the rivals DP-AGD is above, and how many are above it, at each budget."""
    lines = []
    for table, title in tables.items():
        for method in ("dp-agd", "dp-agd-better"):
            cells = [differences(rows, table, method, epsilon, RIVALS) for epsilon in EPSILONS]
            if all(None not in cell for cell in cells):
                split = "as published" if method == "dp-agd" else "better split"
                lines.append([title, split, *(f"{cell.count(1)} / {cell.count(-1)}" for cell in cells)])
    return markdown(("", "", *(f"eps {epsilon:g}" for epsilon in EPSILONS)), lines) if lines else MISSING
