"""Solvers for a budget: the noise, the length, or the factor of all noise of a plan. They never exceed the budget.

Schedules with one free number are solved in `accounting/budget.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant, Derived
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.search import NOISE, PRECISION, Interval, gap_of, solve_at_limit
from dpsgd_cli.errors import InfeasibleBudget, UsageError

if TYPE_CHECKING:
    from dpsgd_cli.accounting.plan import Plan

Build = Callable[[float], Sequence[Release]]
_FACTOR = Interval("factor of all noise multipliers", cheap=1e9, expensive=1e-6, start=1.0, precision=PRECISION)
# a scaled schedule's formula and its scaled values differ by rounding
_ROUNDING = 1 + 1e-9
LENGTH = Interval("steps", cheap=1.0, expensive=float(1 << 26), start=1.0, whole=True)


@dataclass(frozen=True)
class Target:
    """Budget: epsilon at the case's delta, or rho."""

    epsilon: float | None = None
    rho: float | None = None

    @property
    def limit(self) -> float:
        """Value of the budget; UsageError if none is given, or if it is not positive and finite."""
        limit = self.rho if self.rho is not None else self.epsilon
        if limit is None:
            raise UsageError("give a budget: --target-epsilon or --target-rho, or one in the recipe")
        if not 0 < limit < math.inf:
            raise UsageError(f"the budget is {limit!r}, but must be positive and finite")
        return limit


def span_of(parameter: str, records: int | None = None) -> Interval:
    """Return the search range of a parameter; `records` bounds a batch size."""
    if parameter == "noise-multiplier":
        return NOISE
    most = LENGTH.expensive if records is None else float(records)
    return dataclasses.replace(LENGTH, name=parameter, expensive=most)


def afforded(
    build: Build, parameter: str, target: Target, accountant: Accountant, delta: float, records: int | None = None
) -> float:
    """Return the value of `parameter` whose releases spend as much of the budget at `delta` as possible, and no more.

    A batch size, for which `records` is given, may be as large as `records`. With fixed epochs, a partial step counts
    as whole: the next larger batch size is then too expensive, but an even larger one may not be.
    Raises InfeasibleBudget if no value fits, or if nothing limits a whole number.
    """
    span = span_of(parameter, records)
    if target.rho is not None:
        span = dataclasses.replace(span, precision=0.0)

    def gap(value: float) -> float:
        spent = accountant.epsilon(build(value), delta) if target.rho is None else total_rho(build(value))
        return gap_of(spent, target.limit)

    found = solve_at_limit(gap, span)
    if found is None and span.whole:
        what = f"not one of the {parameter}" if records is None else f"not even {parameter} 1"
        raise InfeasibleBudget(f"{what} fits the budget {target.limit:g}; add noise or raise it")
    if found is None:
        raise InfeasibleBudget(f"not even {parameter} {span.cheap:g} fits the budget {target.limit:g}; raise it")
    if found == span.expensive and span.whole and records is None:
        raise InfeasibleBudget(
            f"more than {found:.0f} {parameter} fit the budget {target.limit:g}; nothing limits them"
        )
    return found


def calibrate(build: Build, accountant: Accountant, epsilon: float, delta: float, span: Interval = NOISE) -> float:
    """Return the smallest noise multiplier, or other number in `span`, that costs at most `epsilon` at `delta`.

    Guarantee: `accountant.epsilon(build(answer), delta) <= epsilon`. If the cost is monotone, no value that is more
    expensive than the answer by more than the precision satisfies this.
    Raises InfeasibleBudget if even the cheap end of `span` costs too much, UnsupportedMechanism as the accountant
    does, and where it refuses to price what would spend the budget.
    """
    found = solve_at_limit(lambda value: gap_of(accountant.epsilon(build(value), delta), epsilon), span)
    if found is None:
        raise InfeasibleBudget(
            f"{accountant.name}: no {span.name} up to {span.cheap:g} satisfies epsilon {epsilon:g} at delta {delta:g};"
            " raise epsilon or delta, or take fewer steps"
        )
    return found


def least_factor(plan: Plan, epsilon: float, delta: float) -> float:
    """The least factor f > 0 such that `plan`, with all its noise multipliers times f, costs `epsilon` at `delta`.

    Guarantee: by the plan's accountant it costs no more, private preprocessing (whose noise stays) included; a factor
    smaller by 1e-7 of it would cost more.
    Raises InfeasibleBudget where no factor is enough, UnsupportedMechanism as the accountant does.
    """

    def scaled(factor: float) -> list[Release]:
        releases = [*plan.preprocessing_releases]
        for release in (release for epoch in plan.epochs for release in epoch):
            mechanism = release.mechanism
            assert isinstance(mechanism, GaussianSum)
            times = dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier * factor)
            releases.append(Release(times, release.count))
        return releases

    return calibrate(scaled, accountants.get(plan.accountant), epsilon, delta, _FACTOR) * _ROUNDING


class RepeatedAccountant(Derived, stated=False):
    """Accountant for `trials` published trials, given the releases of one of them."""

    def __init__(self, accountant: Accountant, trials: int) -> None:
        super().__init__(accountant)
        self._trials = trials
        self.name = f"{trials} x {accountant.name}"  # type: ignore[misc]

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.accountant.epsilon(self._all(releases), delta)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        return self.accountant.delta(self._all(releases), epsilon)

    def _all(self, releases: Sequence[Release]) -> list[Release]:
        return [Release(release.mechanism, release.count * self._trials) for release in releases]
