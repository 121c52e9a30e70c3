"""Solve for the one number of a schedule that is left `auto`: as much of the budget as it allows, never more.

Not here: what a schedule is (`schedule.py`), what its epochs cost (the caller's `excess`), the search (`search.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.privacy import schedule as schedules
from dpsgd_cli.privacy.search import NOISE, Span, dearest
from dpsgd_cli.recipe.schema.schedule import PolynomialDecay, Schedule, StepDecay, Uniform
from dpsgd_cli.wording import count

Excess = Callable[[list[float]], float]
_MUCH_NOISE = 64.0
_DECAY = Span("decay", cheap=1e-9, dear=1e9, start=1e-4)
_CLIMB = Span("decay", cheap=1e9, dear=1e-9, start=64.0)
_ODDS = Span("decay / (1 - decay)", cheap=1e9, dear=1e-9, start=1e4)
_PERIOD = Span("period", cheap=float(1 << 40), dear=1.0, start=64.0, whole=True)


def cheaper_upwards(schedule: Schedule, path: str) -> bool:
    """Whether more of the number at `path` is more noise.

    Noise never falls when `initial`, `final` or a `period` grows, nor when a step's factor does; it never grows with
    the rate of a time or exponential decay, nor with a polynomial's power. A polynomial that climbs turns the last two.
    """
    own, name = schedules.section_of(schedule, path)
    if name == "decay":
        return isinstance(own, StepDecay) or _climbs(own)
    return not (name == "period" and _climbs(own))


def solve_schedule(schedule: Schedule, epochs: int, excess: Excess, precision: float = 0.0) -> Schedule:
    """`schedule` with its free number set so that `epochs` epochs fit, and as little noise as that allows.

    `excess` says how far beyond the budget these noise multipliers, by epoch, are (<= 0: within). Guarantee: it was
    asked about the answer, and said within. The number is found to the last bit, or to the relative `precision`; where
    even its most expensive value fits (a polynomial's power), that value is the answer.
    Raises PrivacyError for several free numbers, InfeasibleBudget when no value fits, UnsupportedMechanism as `excess`.
    """
    free = schedules.free_numbers(schedule)
    if len(free) != 1:
        raise PrivacyError(f"privacy.schedule: {' and '.join(free)} are auto, but only one number can be solved for")
    path = free[0]
    span, number = _span(schedule, path, precision)

    def gap(value: float) -> float:
        trial = schedules.with_number(schedule, path, number(value))
        if not all(schedules.allows(trial, epoch) for epoch in range(epochs)):
            return math.inf  # a schedule that runs out of noise is dearer than any budget
        return excess([schedules.noise_multiplier(trial, epoch) for epoch in range(epochs)])

    found = dearest(gap, span)
    if found is None:
        raise InfeasibleBudget(
            f"no value of privacy.schedule.{path} lets {count(epochs, 'epoch')} fit the budget: raise the budget,"
            " train fewer epochs, or start with more noise"
        )
    return schedules.with_number(schedule, path, number(found))


def _span(schedule: Schedule, path: str, precision: float) -> tuple[Span, Callable[[float], float]]:
    """Where to search, and the number that a value of the search stands for."""
    own, name = schedules.section_of(schedule, path)
    if name == "period":
        if _climbs(own):
            raise PrivacyError(f"privacy.schedule.{path}: auto is for noise that decays; final is above initial here")
        return _PERIOD, int
    if name in ("initial", "final"):
        start = NOISE.start if isinstance(own, Uniform) else _MUCH_NOISE
        return replace(NOISE, start=start, precision=precision), float
    if isinstance(own, StepDecay):
        return replace(_ODDS, precision=precision), lambda odds: odds / (1 + odds)
    return replace(_CLIMB if _climbs(own) else _DECAY, precision=precision), float


def _climbs(own: Schedule) -> bool:
    return (
        isinstance(own, PolynomialDecay)
        and not isinstance(own.initial, str)
        and not isinstance(own.final, str)
        and own.final > own.initial
    )
