"""Budgets: checks of releases against a budget, and the filters that enforce it.

Filters are asked BEFORE a release is made, each with its theorem. Prices are in `accountants/`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar, TypeVar

from pydantic import Field

from dpsgd_cli.accounting.accountants import Accountant, split_delta
from dpsgd_cli.accounting.accountants.additive import rho_of, total_mu_squared, total_rho
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, Threshold
from dpsgd_cli.accounting.search import ExactSum, Interval, gap_of, gap_of_sum, solve_at_limit
from dpsgd_cli.common.sections import Delta, Positive, Section
from dpsgd_cli.errors import BudgetExceeded, InfeasibleBudget, PrivacyError


class RhoBudget(Section):
    rho: Positive = Field(description="Total zCDP.")


class EpsilonBudget(Section):
    epsilon: Positive = Field(description="Total epsilon.")
    delta: Delta = Field(description="At this delta.")


MOST_DELTA = 1e-5


def usual_delta(records: int) -> float:
    """Return the delta that is proposed for a number of records: at most 1e-5, and at most a tenth of 1 / records.

    It is a power of ten. A mechanism that publishes each record with probability delta satisfies the definition, so
    delta has to be far below one in the number of records.

    >>> usual_delta(500), usual_delta(100_000), usual_delta(10_000_000)
    (1e-05, 1e-06, 1e-08)
    """
    return float(min(MOST_DELTA, 10.0 ** -math.ceil(math.log10(10 * max(records, 1)) - 1e-12)))


Limit = RhoBudget | EpsilonBudget
Budget = Limit | None
T = TypeVar("T")

# Summing equal terms one by one or as a product rounds differently by a few units of 2^-53. An exact budget is
# shrunk by far more than that, so that no order of summation can state an epsilon above it.
_ROUNDING = 1e-11


class Filter(ABC):
    """Rule that decides if a release may still happen. It counts what it admits, so each ledger has its own filter."""

    @abstractmethod
    def admit(self, release: Release) -> None:
        """Count `release`. Raises BudgetExceeded, and counts nothing, if it would exceed the budget."""

    @property
    def left(self) -> Sequence[Release]:
        """Planned releases that were not made yet; empty if nothing is planned."""
        return ()


class TotalFilter(Filter):
    """Filter that admits releases while their costs add up to at most `limit`.

    The running total is held exactly and is rounded once, not once a release. So a release costs the same whether it is
    the first or the ten-thousandth.
    """

    unit: ClassVar[str]

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._spent = ExactSum()

    @abstractmethod
    def cost(self, release: Release) -> float:
        """Return the cost in the unit of the limit. Raises UnsupportedMechanism for a release without such a cost."""

    def admit(self, release: Release) -> None:
        cost = self.cost(release)
        if self._spent.passes(self.limit, cost):
            total = self._spent.total(cost)
            raise BudgetExceeded(
                f"this release would bring {self.unit} to {total:.6g}, over the budget {self.limit:.6g}"
            )
        self._spent.add(cost)


class RhoFilter(TotalFilter):
    """Filter of a total zCDP.

    Sound even if every release is chosen after seeing all earlier ones (fully adaptive composition of Renyi divergence
    bounds: Feldman and Zrnic 2021, Theorem 4.3).
    """

    unit = "rho"

    def cost(self, release: Release) -> float:
        return total_rho([release])


class GaussianRhoFilter(RhoFilter):
    """`RhoFilter` whose total is also sqrt(2 rho)-Gaussian-DP: a non-Gaussian release counts mu^2 / 2 of its mu."""

    def cost(self, release: Release) -> float:
        gaussian = isinstance(release.mechanism, GaussianSum)
        return super().cost(release) if gaussian else total_mu_squared([release]) / 2


class GaussianFilter(TotalFilter):
    """Filter of an exact (epsilon, delta) as a total of mu^2 (1 / z^2 of an unsampled Gaussian).

    Every release is mu-Gaussian-DP for a mu of its own. The sum of mu^2 is capped at the one whose Gaussian trade-off
    meets the budget. Fully adaptive (Smith and Thakurta 2022, "Fully adaptive composition for Gaussian differential
    privacy"). Planned thresholds, whose deltas the limit leaves out (`_after`), are admitted once each.
    """

    unit = "mu^2"

    def __init__(self, limit: float, thresholds: Sequence[Release] = ()) -> None:
        super().__init__(limit)
        self._thresholds = list(thresholds)

    def admit(self, release: Release) -> None:
        if release in self._thresholds:
            self._thresholds.remove(release)
        else:
            super().admit(release)

    def cost(self, release: Release) -> float:
        return total_mu_squared([release])


class PlannedFilter(Filter):
    """Filter that admits exactly the `planned` releases, in this order; they were priced as a whole before training.

    It serves accountants without a fully adaptive filter (pld, rdp with a free order). It is sound because nothing is
    adaptive.
    """

    def __init__(self, planned: Sequence[Release]) -> None:
        self.planned = planned
        self._done = 0

    @property
    def left(self) -> Sequence[Release]:
        return self.planned[self._done :]

    def admit(self, release: Release) -> None:
        if self._done >= len(self.planned):
            raise BudgetExceeded(f"all {self._done} releases that the plan priced were made; there is none left")
        if release != self.planned[self._done]:
            raise BudgetExceeded(f"release {self._done + 1} is {release}, which is not what the plan priced")
        self._done += 1


def format_budget(budget: Budget) -> str:
    """Describe a budget in words."""
    if budget is None:
        return "none"
    if isinstance(budget, RhoBudget):
        return f"rho {budget.rho:g}"
    return f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"


def over_budget(budget: Budget, accountant: Accountant, releases: Sequence[Release]) -> float:
    """log(spent / budget) of all `releases` together, for `accounting/search.py`; <= 0 exactly where they fit.

    Raises PrivacyError for a rho budget on releases that have no rho.
    """
    if budget is None:
        return -math.inf
    if isinstance(budget, RhoBudget):
        costs = _each(lambda release: rho_of([release]), releases)
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            raise PrivacyError(
                "a budget in rho does not fit sampled batches (zCDP is not amplified by sampling);"
                " give privacy.budget as {epsilon: ..., delta: ...}"
            )
        return gap_of_sum(known, budget.rho)
    if accountant.name == "gaussian":
        rest, thresholds = _thresholds_apart(releases)
        most = _most_mu_squared(_after(budget, thresholds))
        return gap_of_sum(_each(lambda release: total_mu_squared([release]), rest), most)
    return gap_of(accountant.epsilon(releases, budget.delta), budget.epsilon)


def _each(cost: Callable[[Release], T], releases: Sequence[Release]) -> list[T]:
    """Return the cost of each item; an object that occurs many times is priced once."""
    known = {id(release): release for release in releases}
    costs = {name: cost(release) for name, release in known.items()}
    return [costs[id(release)] for release in releases]


def enforce(budget: Budget, accountant: Accountant, planned: Sequence[Release]) -> Filter:
    """Return a filter of the budget: adaptive if a theorem allows it, else exactly the `planned` releases."""
    if isinstance(budget, RhoBudget):
        return RhoFilter(budget.rho)
    if budget is not None and accountant.name == "gaussian":
        thresholds = _thresholds_apart(planned)[1]
        return GaussianFilter(_most_mu_squared(_after(budget, thresholds)), thresholds)
    return PlannedFilter(tuple(planned))


def enforce_on_choices(budget: Limit) -> Filter:
    """Return the filter of a budget that `one_gaussian` states: all that it admits is mu-Gaussian-DP together."""
    if isinstance(budget, RhoBudget):
        return GaussianRhoFilter(budget.rho)
    return GaussianFilter(_most_mu_squared(budget))


def one_gaussian(budget: Budget, accountant: str, adjacency: Adjacency) -> GaussianSum | None:
    """Return the whole budget as one Gaussian mechanism; None if no filter of mu^2 enforces it.

    Guarantee: releases that `enforce_on_choices` admits are, together, mu-Gaussian-DP, whatever was chosen on the
    way (Smith and Thakurta 2022): neighbours are at least as hard to distinguish as under this one mechanism. So every
    accountant's bound on it is a bound on them.
    """
    if not isinstance(budget, RhoBudget) and (budget is None or accountant != "gaussian"):
        return None
    most = mu_squared_left(budget, ())
    multiplier = most**-0.5
    while 1 / multiplier**2 > most:
        multiplier = math.nextafter(multiplier, math.inf)
    return GaussianSum(multiplier, adjacency, label="budget")


def mu_squared_left(budget: Limit, spent: Sequence[Release]) -> float:
    """Return the budget left after `spent`, as a sum of 1 / z^2 over full or shuffled Gaussians (twice their zCDP)."""
    if isinstance(budget, RhoBudget):
        return 2 * budget.rho - total_mu_squared(spent)
    rest, thresholds = _thresholds_apart(spent)
    return _most_mu_squared(_after(budget, thresholds)) - total_mu_squared(rest)


def released_before(
    budget: Limit | None, before: Sequence[Release], shares: Sequence[float], made: GaussianSum
) -> tuple[Release, ...]:
    """Return `before`, followed by Gaussians as `made`, one for each of `shares` of the mu^2 that `before` leaves.

    `made` is a sum over all records, whose own noise multiplier does not count. The new ones are 1 / sqrt(share mu^2):
    1 / z^2 is what Gaussians on all records add up (Dong, Roth and Su 2022, Corollary 2). The budget left for the steps
    is solved for with the whole list, by the accountant that prices it. So shares decide how the budget is divided and
    never how large it is. Without a budget there is nothing to divide.

    Raises InfeasibleBudget if `before` leaves nothing.
    """
    if budget is None:
        return tuple(before)
    left = mu_squared_left(budget, before)
    if not left > 0:
        raise InfeasibleBudget(f"private preprocessing alone spends the budget ({format_budget(budget)}); raise it")
    return (*before, *(Release(replace(made, noise_multiplier=(share * left) ** -0.5)) for share in shares))


def _thresholds_apart(releases: Sequence[Release]) -> tuple[list[Release], list[Release]]:
    """Return the releases without thresholds, and the thresholds, which have a delta and no mu."""
    thresholds = [release for release in releases if isinstance(release.mechanism, Threshold)]
    return [release for release in releases if not isinstance(release.mechanism, Threshold)], thresholds


def _after(budget: EpsilonBudget, thresholds: Sequence[Release]) -> EpsilonBudget:
    """Return the budget that all other releases have to meet (`split_delta` has the theorem).

    Raises InfeasibleBudget if the thresholds alone spend delta.
    """
    leak = split_delta(thresholds)[1]
    if not leak < budget.delta:
        raise InfeasibleBudget(
            f"the deltas of named categories, {leak:g}, alone spend the budget's delta {budget.delta:g}; make them"
            " smaller"
        )
    return budget.changed(delta=budget.delta - leak) if thresholds else budget


@cache
def _most_mu_squared(budget: EpsilonBudget) -> float:
    """Return the largest mu^2 of a Gaussian that stays within the budget, from below; both curves are exact."""
    span = Interval("mu", cheap=1e-150, expensive=1e150, start=1.0)
    mu = solve_at_limit(lambda mu: gap_of(gaussian_epsilon(mu, budget.delta), budget.epsilon), span)
    return (mu or 0.0) ** 2 * (1 - _ROUNDING)
