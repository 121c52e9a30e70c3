"""Search for the least parameter that a budget affords, a noise multiplier above all. Never overshoots the budget.

Not here: what anything costs (`accountants/`). Every answer was checked against the accountant itself, on the safe
side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsgd_cli.errors import InfeasibleBudget, UnsupportedMechanism
from dpsgd_cli.privacy.accountants.base import Accountant
from dpsgd_cli.privacy.mechanism import Release

Build = Callable[[float], Sequence[Release]]


@dataclass(frozen=True)
class Range:
    """Where the free parameter may lie, and to what relative precision it is found."""

    low: float = 1e-3
    high: float = 1e7
    precision: float = 1e-7
    name: str = "noise multiplier"


NOISE = Range()


def calibrate(build: Build, accountant: Accountant, epsilon: float, delta: float, within: Range = NOISE) -> float:
    """Smallest parameter (a noise multiplier) whose releases cost at most `epsilon` at `delta`.

    Guarantee: `accountant.epsilon(build(answer), delta) <= epsilon`, and no parameter below
    answer * (1 - precision) satisfies it, if the cost falls with the parameter.

    Args: build maps the parameter to all releases; epsilon > 0; delta in (0, 1).
    Raises InfeasibleBudget when even `within.high` costs too much; UnsupportedMechanism as the accountant does.
    """

    def cost(value: float) -> float:
        return accountant.epsilon(build(value), delta)

    def problem(value: float, spent: float) -> str:
        return (
            f"{accountant.name}: no {within.name} up to {value:g} satisfies epsilon {epsilon:g} at delta {delta:g}"
            f" (the largest still costs {spent:.6g}); raise epsilon or delta, or take fewer steps"
        )

    return _least_affordable(cost, epsilon, within, problem)


def calibrate_rho(build: Build, rho: float, within: Range = NOISE) -> float:
    """The same for a zCDP budget: smallest parameter whose releases have total rho at most `rho`."""
    from dpsgd_cli.privacy.accountants.zcdp import total_rho

    def problem(value: float, spent: float) -> str:
        return (
            f"zcdp: no {within.name} up to {value:g} satisfies rho {rho:g} (the largest still costs {spent:.6g});"
            " raise rho or take fewer epochs"
        )

    return _least_affordable(lambda value: total_rho(build(value)), rho, within, problem)


def _least_affordable(
    cost: Callable[[float], float], budget: float, within: Range, problem: Callable[[float, float], str]
) -> float:
    """Bracket the answer by growing steps from 1, then narrow the bracket."""
    refusals: dict[float, UnsupportedMechanism] = {}

    def gap(value: float) -> float:
        """log(spent / budget), nearly linear in log(noise); a refusal is a region left, infinitely expensive."""
        try:
            spent = cost(value)
        except UnsupportedMechanism as refusal:
            refusals[value] = refusal
            return math.inf
        if math.isnan(spent) or not 0 < spent < math.inf:
            return -math.inf if spent == 0 else math.inf
        return math.log(spent / budget)

    value, step = min(max(1.0, within.low), within.high), 2.0
    dear: tuple[float, float] | None = None
    fair: tuple[float, float] | None = None
    while dear is None or fair is None:
        at = gap(value)
        if at > 0:
            dear = (value, at)
            if value >= within.high:
                raise refusals.get(value) or InfeasibleBudget(problem(value, budget * math.exp(min(at, 700))))
        else:
            fair = (value, at)
            if value <= within.low:
                return value
        if dear is None:
            value = max(value / step, within.low)
        elif fair is None:
            value = min(value * step, within.high)
        step *= step
    return _narrow(gap, dear, fair, within.precision)


def _narrow(
    gap: Callable[[float], float], dear: tuple[float, float], fair: tuple[float, float], precision: float
) -> float:
    """Shrink an interval with gap(dear) > 0 >= gap(fair) to relative `precision`; returns its affordable end.

    Secant steps in log(parameter), aimed a little past the expected root so that the other end follows; a bisection
    whenever two steps have not halved the interval. Superlinear on smooth costs, safe on steps and infinities.
    """
    left, right = math.log(dear[0]), math.log(fair[0])
    left_gap, right_gap = dear[1], fair[1]
    answer, slow = fair[0], 0
    while right - left > precision:
        width = right - left
        if math.isinf(left_gap) or math.isinf(right_gap) or slow >= 2:
            point, slow = (left + right) / 2, 0
        else:
            root = left + width * left_gap / (left_gap - right_gap)
            margin = max(precision / 3, 0.01 * min(root - left, right - root))
            point = root + margin if right - root > root - left else root - margin
            point = min(max(point, left + precision / 4), right - precision / 4)
        value = math.exp(point)
        at = gap(value)
        if at > 0:
            left, left_gap = point, at
        else:
            right, right_gap, answer = point, at, value
        slow = slow + 1 if right - left > width / 2 else 0
    return answer
