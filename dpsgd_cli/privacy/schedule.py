"""The noise multiplier by epoch (Yu et al. 2019, IV-A2), and which of a schedule's numbers are left free.

Epochs count from 0. Not here: how many epochs a budget allows (`plan.py`), solving for a free number
(`schedule_solver.py`), schedules that look at the model (`adaptive_schedule.py`), what an epoch costs (`accountants/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.schema.schedule import (
    Auto,
    ExponentialDecay,
    Piecewise,
    PolynomialDecay,
    Schedule,
    StepDecay,
    TimeDecay,
    Uniform,
    Validation,
)


def uniform(schedule: Uniform, epoch: int) -> float:
    """The same in every epoch."""
    del epoch
    return _number(schedule.initial)


def time(schedule: TimeDecay, epoch: int) -> float:
    """sigma_t = sigma_0 / (1 + k floor(t / period))."""
    return _number(schedule.initial) / (1 + _number(schedule.decay) * (epoch // schedule.period))


def exponential(schedule: ExponentialDecay, epoch: int) -> float:
    """sigma_t = sigma_0 exp(-k floor(t / period))."""
    return _number(schedule.initial) * math.exp(-_number(schedule.decay) * (epoch // schedule.period))


def step(schedule: StepDecay, epoch: int) -> float:
    """sigma_t = sigma_0 k^floor(t / period)."""
    times = epoch // int(_number(schedule.period))
    return float(_number(schedule.initial) * _number(schedule.decay) ** times)


def polynomial(schedule: PolynomialDecay, epoch: int) -> float:
    """sigma_t = (sigma_0 - sigma_end) (1 - t / period)^k + sigma_end, and sigma_end from `period` on.

    With `every` above 1, t is the last multiple of it.
    """
    left = max(0.0, 1 - (epoch - epoch % schedule.every) / _number(schedule.period))
    final = _number(schedule.final)
    return float((_number(schedule.initial) - final) * left ** _number(schedule.decay) + final)


def piecewise(schedule: Piecewise, epoch: int) -> float:
    """The part that `epoch` falls into, its own clock starting at 0."""
    for part in schedule.parts:
        if part.epochs is None or epoch < part.epochs:
            return SCHEDULES[part.schedule.kind](part.schedule, epoch)
        epoch -= part.epochs
    raise PrivacyError("schedule piecewise ended before the training")


def validation(schedule: Validation, epoch: int) -> float:
    """The noise of epoch 0, and the most that any epoch has: later ones follow the validation accuracy."""
    del epoch
    return schedule.initial


SCHEDULES: dict[str, Callable[[Any, int], float]] = {
    "uniform": uniform,
    "time": time,
    "exponential": exponential,
    "step": step,
    "polynomial": polynomial,
    "piecewise": piecewise,
    "validation": validation,
}


LEAST = 1e-6
"""Less noise than this protects nothing (rho is 5e11), and its square soon leaves the range of floats."""


def noise_multiplier(schedule: Schedule, epoch: int) -> float:
    """Noise multiplier of `epoch` (0, 1, ...); at least `LEAST`.

    Raises PrivacyError where the schedule has less noise than that, or a number that is still `auto`.
    """
    value = SCHEDULES[schedule.kind](schedule, epoch)
    if value < LEAST:
        raise PrivacyError(
            f"schedule {schedule.kind} has noise multiplier {value:g} at epoch {epoch}, less than {LEAST:g}:"
            " train fewer epochs, or let it decay slower (for no privacy at all there is method sgd)"
        )
    return value


def allows(schedule: Schedule, epoch: int) -> bool:
    """Whether `epoch` has a noise multiplier that may be used."""
    return SCHEDULES[schedule.kind](schedule, epoch) >= LEAST


def free_numbers(schedule: Schedule) -> list[str]:
    """The keys that are `auto`, as paths inside the section: `decay`, `parts.1.initial`.

    >>> free_numbers(ExponentialDecay(initial=10, decay="auto"))
    ['decay']
    """
    return [path for path in solvable_numbers(schedule) if number_at(schedule, path) == "auto"]


def solvable_numbers(schedule: Schedule) -> list[str]:
    """The keys that may be `auto`, as paths inside the section.

    >>> solvable_numbers(ExponentialDecay(initial=10, decay=0.1))
    ['initial', 'decay']
    """
    if isinstance(schedule, Piecewise):
        return [
            f"parts.{i}.{name}" for i, part in enumerate(schedule.parts) for name in solvable_numbers(part.schedule)
        ]
    return [name for name, field in type(schedule).model_fields.items() if Auto in get_args(field.annotation)]


def section_of(schedule: Schedule, path: str) -> tuple[Schedule, str]:
    """The schedule that holds the number at `path` (a part of a piecewise one), and its key there."""
    if not isinstance(schedule, Piecewise):
        return schedule, path
    _, index, name = path.split(".")
    return schedule.parts[int(index)].schedule, name


def number_at(schedule: Schedule, path: str) -> Any:
    """The number at one of `solvable_numbers`, or `auto`."""
    section, name = section_of(schedule, path)
    return getattr(section, name)


def with_number(schedule: Schedule, path: str, value: float | str) -> Schedule:
    """The schedule with one of its `solvable_numbers` set."""
    if not isinstance(schedule, Piecewise):
        return schedule.model_copy(update={path: value})
    _, index, name = path.split(".")
    changed = schedule.parts[int(index)]
    changed = changed.model_copy(update={"schedule": with_number(changed.schedule, name, value)})
    parts = [changed if i == int(index) else part for i, part in enumerate(schedule.parts)]
    return schedule.model_copy(update={"parts": parts})


def _number(value: float | str) -> float:
    if isinstance(value, str):
        raise PrivacyError("a number of the schedule is auto: it has no value until the plan has solved for it")
    return value
