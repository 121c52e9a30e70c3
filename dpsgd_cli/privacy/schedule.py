"""The noise multiplier by epoch (Yu et al. 2019, IV-A2). Epochs count from 0.

Not here: how many epochs a budget allows (`plan.py`), what an epoch costs (`accountants/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe import schema


def uniform(schedule: schema.Uniform, epoch: int) -> float:
    """The same in every epoch."""
    del epoch
    if schedule.initial == "auto":
        raise PrivacyError("schedule.initial is auto: it has no value until the plan has solved for it")
    return float(schedule.initial)


def time(schedule: schema.TimeDecay, epoch: int) -> float:
    """sigma_t = sigma_0 / (1 + k t)."""
    return schedule.initial / (1 + schedule.decay * epoch)


def exponential(schedule: schema.ExponentialDecay, epoch: int) -> float:
    """sigma_t = sigma_0 exp(-k t)."""
    return schedule.initial * math.exp(-schedule.decay * epoch)


def step(schedule: schema.StepDecay, epoch: int) -> float:
    """sigma_t = sigma_0 k^floor(t / period)."""
    return float(schedule.initial * schedule.decay ** (epoch // schedule.period))


def polynomial(schedule: schema.PolynomialDecay, epoch: int) -> float:
    """sigma_t = (sigma_0 - sigma_end) (1 - t / period)^k + sigma_end, and sigma_end from `period` on."""
    left = max(0.0, 1 - epoch / schedule.period)
    return float((schedule.initial - schedule.final) * left**schedule.decay + schedule.final)


SCHEDULES: dict[str, Callable[[Any, int], float]] = {
    "uniform": uniform,
    "time": time,
    "exponential": exponential,
    "step": step,
    "polynomial": polynomial,
}


LEAST = 1e-6
"""Less noise than this protects nothing (rho is 5e11), and its square soon leaves the range of floats."""


def noise_multiplier(schedule: schema.Schedule, epoch: int) -> float:
    """Noise multiplier of `epoch` (0, 1, ...); at least `LEAST`.

    Raises PrivacyError where the schedule has less noise than that.
    """
    value = SCHEDULES[schedule.kind](schedule, epoch)
    if value < LEAST:
        raise PrivacyError(
            f"schedule {schedule.kind} has noise multiplier {value:g} at epoch {epoch}, less than {LEAST:g}:"
            " train fewer epochs, or let it decay slower (for no privacy at all there is method sgd)"
        )
    return value


def allows(schedule: schema.Schedule, epoch: int) -> bool:
    """Whether `epoch` has a noise multiplier that may be used."""
    return SCHEDULES[schedule.kind](schedule, epoch) >= LEAST
