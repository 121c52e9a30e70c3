"""What can be afforded: solve a case for the one parameter that is left free. Never overshoots the budget.

Not here: the search itself (`search.py`), what the case is (`cases.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsgd_cli.account.cases import Case
from dpsgd_cli.errors import InfeasibleBudget, UsageError
from dpsgd_cli.privacy.accountants import Accountant
from dpsgd_cli.privacy.mechanism import Mechanism, Release
from dpsgd_cli.privacy.search import NOISE, Gap, Span, dearest, gap_of

Build = Callable[[float], Sequence[Release]]
LENGTH = Span("steps", cheap=1.0, dear=float(1 << 26), start=1.0, whole=True)


@dataclass(frozen=True)
class Target:
    """A budget: epsilon at the case's delta, or rho."""

    epsilon: float | None = None
    rho: float | None = None

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

    Guarantee: the cost of the returned case, by `accountant` (zCDP for a budget in rho), is at most the budget. For a
    recipe it is the value that its plan gives to `auto`.
    Raises InfeasibleBudget when no value fits, UsageError for a parameter that the case does not have.
    """
    known = case.parameters()
    if parameter not in known:
        raise UsageError(f"cannot solve for {parameter} here; one of: {', '.join(known) or 'nothing'}")
    assert target.limit > 0
    value = case.afforded(parameter, target, accountant)
    return Solution(parameter, value, case.with_value(parameter, value))


def afforded_by_search(case: Case, parameter: str, target: Target, accountant: Accountant) -> float:
    """What `solve` finds for a case that is priced by its numbers alone."""

    def build(value: float) -> Sequence[Release]:
        return case.with_value(parameter, value).trials()[0]

    span = NOISE if target.rho is None else dataclasses.replace(NOISE, precision=0.0)
    if parameter in ("epochs", "steps"):
        span = dataclasses.replace(LENGTH, name=parameter)
    by_epsilon = _epsilon_gap(build, accountant, target.limit, case.delta)
    found = dearest(by_epsilon if target.rho is None else _rho_gap(build, target.rho), span)
    if found is None and span.whole:
        raise InfeasibleBudget(f"not one of the {parameter} fits the budget {target.limit:g}; add noise or raise it")
    if found is None:
        raise InfeasibleBudget(f"not even {parameter} {span.cheap:g} fits the budget {target.limit:g}; raise it")
    if found == LENGTH.dear and span.whole:
        raise InfeasibleBudget(
            f"more than {found:.0f} {parameter} fit the budget {target.limit:g}; nothing limits them"
        )
    return found


def calibrate(build: Build, accountant: Accountant, epsilon: float, delta: float, span: Span = NOISE) -> float:
    """Smallest noise multiplier, or whatever `span` is about, whose releases cost at most `epsilon` at `delta`.

    Guarantee: `accountant.epsilon(build(answer), delta) <= epsilon`, and nothing dearer than the answer by more than
    the precision satisfies it, if the cost is monotone.
    Raises InfeasibleBudget when even the cheap end of `span` costs too much; UnsupportedMechanism as the accountant
    does, and where it refuses to price what would spend the budget.
    """
    found = dearest(_epsilon_gap(build, accountant, epsilon, delta), span)
    if found is None:
        raise InfeasibleBudget(
            f"{accountant.name}: no {span.name} up to {span.cheap:g} satisfies epsilon {epsilon:g} at delta {delta:g};"
            " raise epsilon or delta, or take fewer steps"
        )
    return found


def _epsilon_gap(build: Build, accountant: Accountant, epsilon: float, delta: float) -> Gap:
    return lambda value: gap_of(accountant.epsilon(build(value), delta), epsilon)


def _rho_gap(build: Build, rho: float) -> Gap:
    from dpsgd_cli.privacy.accountants.zcdp import total_rho

    return lambda value: gap_of(total_rho(build(value)), rho)


class Together(Accountant):
    """What an accountant says of `trials` trials, all of them published, when it is given the releases of one."""

    def __init__(self, accountant: Accountant, trials: int) -> None:
        self._accountant, self._trials = accountant, trials
        self.name = f"{trials} x {accountant.name}"  # type: ignore[misc]
        self.by_divergence = accountant.by_divergence  # type: ignore[misc]

    def refusal(self, mechanism: Mechanism) -> str | None:
        return self._accountant.refusal(mechanism)

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self._accountant.epsilon(self._all(releases), delta)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        return self._accountant.delta(self._all(releases), epsilon)

    def _all(self, releases: Sequence[Release]) -> list[Release]:
        return [Release(release.mechanism, release.count * self._trials) for release in releases]
