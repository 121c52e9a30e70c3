"""How much all noise of a plan must grow, or may shrink, for another budget; the epochs stay.

Not here: schedules with one free number, which their own solver solves for (`schedule_solver.py`).
"""

from __future__ import annotations

import dataclasses

from dpsgd_cli.account.solving import calibrate
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.privacy.search import PRECISION, Span
from dpsgd_cli.recipe.schema.schedule import Piecewise, Schedule

_FACTOR = Span("factor of all noise multipliers", cheap=1e9, dear=1e-6, start=1.0, precision=PRECISION)
# a scaled schedule's formula rounds otherwise than its scaled values
_ROUNDING = 1 + 1e-9


def least_factor(plan: Plan, epsilon: float, delta: float) -> float:
    """The least factor f > 0 such that `plan`, with all its noise multipliers times f, costs `epsilon` at `delta`.

    Guarantee: by the plan's accountant it costs no more, private preprocessing (whose noise stays) included; a factor
    smaller by 1e-7 of it would cost more.
    Raises InfeasibleBudget where no factor is enough, UnsupportedMechanism as the accountant does.
    """

    def scaled(factor: float) -> list[Release]:
        return [*plan.before, *(_times(release, factor) for epoch in plan.epochs for release in epoch)]

    return calibrate(scaled, accountants.get(plan.accountant), epsilon, delta, _FACTOR) * _ROUNDING


def _times(release: Release, factor: float) -> Release:
    mechanism = release.mechanism
    assert isinstance(mechanism, GaussianSum)
    return Release(dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * factor), release.count)


def scaled_schedule(schedule: Schedule, factor: float) -> Schedule:
    """`schedule` with every noise multiplier times `factor`; none of its numbers is free."""
    if isinstance(schedule, Piecewise):
        parts = [
            part.model_copy(update={"schedule": scaled_schedule(part.schedule, factor)}) for part in schedule.parts
        ]
        return schedule.model_copy(update={"parts": parts})
    noise = {name: getattr(schedule, name) * factor for name in ("initial", "final") if hasattr(schedule, name)}
    return schedule.model_copy(update=noise)
