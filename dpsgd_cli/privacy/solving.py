"""What can be afforded: solve a case for the one parameter that is left free. Never overshoots the budget.

Not here: the search itself (`calibrate.py`), what the case is (`cases.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError, UnsupportedMechanism, UsageError
from dpsgd_cli.privacy.accountants import Accountant
from dpsgd_cli.privacy.calibrate import Range, calibrate, calibrate_rho
from dpsgd_cli.privacy.cases import CHEAPER_UPWARDS, Case
from dpsgd_cli.privacy.mechanism import Release

DIGITS = 7
"""Significant digits of a solution, rounded to the affordable side."""
_MOST = 1 << 26


@dataclass(frozen=True)
class Target:
    """A budget: epsilon at the case's delta, or rho."""

    epsilon: float | None = None
    rho: float | None = None

    def cost(self, accountant: Accountant, delta: float) -> Callable[[Sequence[Release]], float]:
        """What is compared with the budget."""
        if self.rho is not None:
            from dpsgd_cli.privacy.accountants.zcdp import total_rho

            return total_rho
        return lambda releases: accountant.epsilon(releases, delta)

    @property
    def limit(self) -> float:
        """The budget's number."""
        limit = self.rho if self.rho is not None else self.epsilon
        if limit is None:
            raise UsageError("give a budget: --target-epsilon or --target-rho, or one in the recipe")
        if not 0 < limit < math.inf:
            raise UsageError(f"the budget is {limit!r}, but must be positive and finite")
        return limit


@dataclass(frozen=True)
class Solution:
    """A parameter, its value, and the case with it."""

    parameter: str
    value: float
    case: Case


def solve(case: Case, parameter: str, target: Target, accountant: Accountant) -> Solution:
    """The value of `parameter` that spends as much of the budget as it allows, and no more.

    Guarantee: the cost of the returned case, by `accountant` (zCDP for a budget in rho), is at most the budget.
    Numbers are given to 7 significant digits, rounded to the affordable side; epochs and steps are whole.
    Raises InfeasibleBudget when no value fits, UsageError for a parameter that the case does not have.
    """
    known = case.parameters()
    if parameter not in known:
        raise UsageError(f"cannot solve for {parameter} here; one of: {', '.join(known) or 'nothing'}")
    if parameter in ("epochs", "steps"):
        value: float = _most(case, parameter, target, accountant)
    elif known[parameter] == CHEAPER_UPWARDS:
        value = _least(lambda x: case.with_value(parameter, x), parameter, target, accountant, case.delta)
        value = _rounded(value, up=True)
    else:
        inverse = _least(lambda x: case.with_value(parameter, 1 / x), parameter, target, accountant, case.delta)
        value = _rounded(1 / inverse, up=False)
    return Solution(parameter, value, case.with_value(parameter, value))


def _least(
    build: Callable[[float], Case], parameter: str, target: Target, accountant: Accountant, delta: float
) -> float:
    def releases(value: float) -> Sequence[Release]:
        try:
            return build(value).counted()
        except UnsupportedMechanism:
            raise
        except PrivacyError as error:  # a schedule that has run out of noise: dearer than any budget
            raise UnsupportedMechanism(str(error)) from None

    within = Range(low=1e-6, high=1e8, precision=1e-9, name=parameter)
    if target.rho is not None:
        return calibrate_rho(releases, target.limit, within)
    return calibrate(releases, accountant, target.limit, delta, within)


def _most(case: Case, parameter: str, target: Target, accountant: Accountant) -> int:
    """The largest affordable number of epochs or steps: doubling, then bisection."""
    price = target.cost(accountant, case.delta)

    def fits(count: int) -> bool:
        try:
            return price(case.with_value(parameter, count).counted()) <= target.limit
        except UnsupportedMechanism:
            if count == 1:
                raise
            return False  # the schedule has run out of noise, or the accountant's region is left

    if not fits(1):
        raise InfeasibleBudget(f"not one of the {parameter} fits the budget {target.limit:g}; add noise or raise it")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST:
            raise InfeasibleBudget(f"more than {low} {parameter} fit the budget {target.limit:g}; nothing limits them")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rounded(value: float, up: bool) -> float:
    """`value` to `DIGITS` significant digits, never below (up) or above it."""
    exponent = math.floor(math.log10(value)) - DIGITS + 1
    scaled = value / 10.0**exponent
    whole = math.ceil(scaled) if up else math.floor(scaled)
    return float(f"{whole}e{exponent}")
