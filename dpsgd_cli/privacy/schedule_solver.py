"""How much of a schedule a budget buys: the one number that is left `auto`, or the number of epochs. Never too much.

Not here: what a schedule is (`recipe/schema/schedule.py`), what its epochs cost (the caller's `excess`), the search
(`search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.recipe.schema.schedule import LEAST, Schedule
from dpsgd_cli.search import Span, most_expensive
from dpsgd_cli.wording import count

Excess = Callable[[list[float]], float]
"""How far beyond the budget these noise multipliers, by epoch, are (<= 0: within)."""


def solve_schedule(schedule: Schedule, epochs: int, excess: Excess, precision: float = 0.0) -> Schedule:
    """`schedule` with its free number set so that `epochs` epochs fit, and as little noise as that allows.

    Guarantee: `excess` was asked about the answer, and said within. The number is found to the last bit, or to the
    relative `precision`; where even its most expensive value fits (a polynomial's power), that value is the answer.
    Raises PrivacyError for several free numbers, InfeasibleBudget when no value fits, UnsupportedMechanism as `excess`.
    """
    free = schedule.free_numbers()
    if len(free) != 1:
        raise PrivacyError(f"privacy.schedule: {' and '.join(free)} are auto, but only one number can be solved for")
    path, number = free[0], schedule.numbers()[free[0]]
    if number.refused:
        raise PrivacyError(f"privacy.schedule.{path}: {number.refused}")

    def gap(value: float) -> float:
        return _gap(schedule.with_number(path, number.value(value)), epochs, excess)

    found = most_expensive(gap, number if number.whole else replace(number, precision=precision))
    if found is None:
        raise InfeasibleBudget(
            f"no value of privacy.schedule.{path} lets {count(epochs, 'epoch')} fit the budget: raise the budget,"
            " train fewer epochs, or start with more noise"
        )
    return schedule.with_number(path, number.value(found))


def epochs_that_fit(schedule: Schedule, most: int, excess: Excess) -> int:
    """Longest prefix of the schedule within the budget (spending only grows), no longer than `most` epochs."""
    span = Span("epochs", cheap=1.0, expensive=float(most), start=1.0, whole=True)
    return int(most_expensive(lambda epochs: _gap(schedule, int(epochs), excess), span) or 0)


def _gap(schedule: Schedule, epochs: int, excess: Excess) -> float:
    """A schedule that runs out of noise is more expensive than any budget."""
    noise = [schedule.noise(epoch) for epoch in range(epochs)]
    return excess(noise) if min(noise) >= LEAST else math.inf
