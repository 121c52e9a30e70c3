"""Solve for the one number of a schedule that is left `auto`: as much of the budget as it allows, never more.

Not here: what a schedule is (`schedule.py`), what its epochs cost (the caller's `fits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.privacy import schedule as schedules
from dpsgd_cli.recipe import schema
from dpsgd_cli.wording import count

Fits = Callable[[list[float]], bool]
_MOST = 1e9
_MUCH_NOISE, _HARDLY_ANY_DECAY, _STEP = 64.0, 1e4, 2.0
_MOST_WHOLE = 1 << 40


@dataclass(frozen=True)
class Search:
    """What a free number does: is more of it cheaper, is it below 1, is it whole?"""

    cheaper_upwards: bool
    below_one: bool = False
    whole: bool = False


def search_of(schedule: schema.Schedule, path: str) -> Search:
    """How the cost of `schedule` depends on the number at `path`.

    Noise never falls when `initial`, `final` or a `period` grows, nor when a step's factor does; it never grows with
    the rate of a time or exponential decay, nor with a polynomial's power. A polynomial that climbs turns the last two.
    """
    name = path.rpartition(".")[2]
    if isinstance(schedule, schema.Piecewise):
        schedule = schedule.parts[int(path.split(".")[1])].schedule
    climbs = isinstance(schedule, schema.PolynomialDecay) and _climbs(schedule)
    if name == "decay":
        factor = schedule.kind == "step"
        return Search(cheaper_upwards=factor or climbs, below_one=factor)
    return Search(cheaper_upwards=not (name == "period" and climbs), whole=name == "period")


def _climbs(schedule: schema.PolynomialDecay) -> bool:
    return (
        not isinstance(schedule.initial, str)
        and not isinstance(schedule.final, str)
        and (schedule.final > schedule.initial)
    )


def solve_schedule(schedule: schema.Schedule, epochs: int, fits: Fits, precision: float = 0.0) -> schema.Schedule:
    """`schedule` with its free number set so that `epochs` epochs fit, and as little noise as that allows.

    `fits` says whether these noise multipliers, by epoch, stay within the budget. Guarantee: it was asked about the
    answer, and said yes. The number is found to the last bit, or to the relative `precision`; where even its most
    expensive value fits (a polynomial's power), that value is the answer.
    Raises PrivacyError for several free numbers, InfeasibleBudget when no value fits.
    """
    free = schedules.free_numbers(schedule)
    if len(free) != 1:
        raise PrivacyError(f"privacy.schedule: {' and '.join(free)} are auto, but only one number can be solved for")
    path, search = free[0], search_of(schedule, free[0])

    def affordable(value: float) -> bool:
        trial = schedules.with_number(schedule, path, value)
        try:
            return fits([schedules.noise_multiplier(trial, epoch) for epoch in range(epochs)])
        except OverflowError:
            return False
        except PrivacyError:
            if any(not schedules.allows(trial, epoch) for epoch in range(epochs)):
                return False  # a schedule that runs out of noise is dearer than any budget
            raise

    if search.whole and not search.cheaper_upwards:
        raise PrivacyError(f"privacy.schedule.{path}: auto is for noise that decays; final is above initial here")
    if search.whole:
        value: float = _least_whole(affordable)
    else:
        value = _best(affordable, search, precision)
    if math.isnan(value):
        raise InfeasibleBudget(
            f"no value of privacy.schedule.{path} lets {count(epochs, 'epoch')} fit the budget: raise the budget,"
            " train fewer epochs, or start with more noise"
        )
    return schedules.with_number(schedule, path, value)


def _best(affordable: Callable[[float], bool], search: Search, precision: float) -> float:
    """The least x with affordable(number of x); not a number when there is none.

    x runs over the positive numbers so that more is cheaper: the number itself, its inverse, or its odds where it is
    below 1.
    """

    def number(x: float) -> float:
        value = x / (1 + x) if search.below_one else x
        return value if search.cheaper_upwards else 1 / value

    def good(x: float) -> bool:
        return 0 < number(x) < (1 if search.below_one else math.inf) and affordable(number(x))

    # from the cheap side in small steps: an accountant may not know what next to no noise costs
    noise = search.cheaper_upwards and not search.below_one
    high = _MUCH_NOISE if noise else _HARDLY_ANY_DECAY
    while not good(high):
        high *= _STEP
        if high > _MOST:
            return math.nan
    low = high / _STEP
    while good(low):
        if low < 1 / _MOST:
            return number(low)
        low, high = low / _STEP, low
    while high - low > precision * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if good(middle) else (middle, high)
    return number(high)


def _least_whole(affordable: Callable[[float], bool]) -> float:
    high = 1
    while not affordable(high):
        high *= 2
        if high > _MOST_WHOLE:
            return math.nan
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if affordable(middle) else (middle, high)
    return high
