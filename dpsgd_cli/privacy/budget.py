"""What a trial may spend: whether releases fit a budget, what is left of it, and the filter that enforces it.

Not here: what anything costs (`accountants/`), how noise or epochs are chosen to fit (`plan.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.privacy.accountants import Accountant
from dpsgd_cli.privacy.ledger import (
    Filter,
    GaussianFilter,
    GaussianRhoFilter,
    PlannedFilter,
    RhoFilter,
    mu_squared_of,
)
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget, RhoBudget
from dpsgd_cli.search import Span, gap_of, gap_of_sum, most_expensive

Budget = RhoBudget | EpsilonBudget | None
T = TypeVar("T")

# Summing equal terms one by one or as a product rounds differently by a few units of 2^-53. An exact budget is
# shrunk by far more than that, so that no order of summation can state an epsilon above it.
_ROUNDING = 1e-11


def describe(budget: Budget) -> str:
    """A budget in words."""
    if budget is None:
        return "none"
    if isinstance(budget, RhoBudget):
        return f"rho {budget.rho:g}"
    return f"epsilon {budget.epsilon:g} at delta {budget.delta:g}"


def rho_of(releases: Sequence[Release]) -> float | None:
    """Total zCDP of unsampled releases; None where there is none (sampled batches, other guarantees)."""
    from dpsgd_cli.privacy.accountants.zcdp import Zcdp, total_rho

    if any(Zcdp().refusal(release.mechanism) for release in releases):
        return None
    return total_rho(releases)


def fits(budget: Budget, accountant: Accountant, releases: Sequence[Release]) -> bool:
    """Whether all `releases` together stay within the budget, as `enforce` judges it. Raises as `excess` does."""
    return excess(budget, accountant, releases) <= 0


def excess(budget: Budget, accountant: Accountant, releases: Sequence[Release]) -> float:
    """log(spent / budget) of all `releases` together, for `search.py`; <= 0 exactly where they fit.

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
        return gap_of_sum(_each(mu_squared_of, releases), _most_mu_squared(budget))
    return gap_of(accountant.epsilon(releases, budget.delta), budget.epsilon)


def _each(cost: Callable[[Release], T], releases: Sequence[Release]) -> list[T]:
    """The cost of each; one that stands there many times is priced once."""
    known = {id(release): release for release in releases}
    costs = {name: cost(release) for name, release in known.items()}
    return [costs[id(release)] for release in releases]


def enforce(budget: Budget, accountant: Accountant, planned: Sequence[Release]) -> Filter:
    """A filter of the budget: adaptive where a theorem allows it, else exactly the `planned` releases."""
    if isinstance(budget, RhoBudget):
        return RhoFilter(budget.rho)
    if budget is not None and accountant.name == "gaussian":
        return GaussianFilter(_most_mu_squared(budget))
    return PlannedFilter(tuple(planned))


def enforce_on_choices(budget: RhoBudget | EpsilonBudget) -> Filter:
    """The filter of a budget that `one_gaussian` states: all that it admits is mu-Gaussian-DP together."""
    if isinstance(budget, RhoBudget):
        return GaussianRhoFilter(budget.rho)
    return GaussianFilter(_most_mu_squared(budget))


def one_gaussian(budget: Budget, accountant: str, adjacency: Adjacency) -> GaussianSum | None:
    """The whole budget as one Gaussian mechanism; None where no filter of mu^2 polices it.

    Guarantee: releases that `enforce_on_choices` admits are, together, mu-Gaussian-DP, whatever was chosen on the
    way (Smith and Thakurta 2022): neighbours are at least as hard to tell apart as on this one mechanism. So every
    accountant's bound on it is a bound on them.
    """
    if not isinstance(budget, RhoBudget) and (budget is None or accountant != "gaussian"):
        return None
    most = mu_squared_left(budget, ())
    multiplier = most**-0.5
    while 1 / multiplier**2 > most:
        multiplier = math.nextafter(multiplier, math.inf)
    return GaussianSum(multiplier, adjacency, label="budget")


def mu_squared_left(budget: RhoBudget | EpsilonBudget, spent: Sequence[Release]) -> float:
    """What `spent` leaves of the budget, as a sum of 1 / z^2 over full or shuffled Gaussians (twice their zCDP)."""
    most = 2 * budget.rho if isinstance(budget, RhoBudget) else _most_mu_squared(budget)
    return most - math.fsum(mu_squared_of(release) for release in spent)


@cache
def _most_mu_squared(budget: EpsilonBudget) -> float:
    """The largest mu^2 whose exact Gaussian epsilon at delta stays within the budget, from below."""
    from dpsgd_cli.privacy.conversions import gaussian_epsilon

    span = Span("mu", cheap=1e-150, expensive=1e150, start=1.0)
    mu = most_expensive(lambda mu: gap_of(gaussian_epsilon(mu, budget.delta), budget.epsilon), span)
    return (mu or 0.0) ** 2 * (1 - _ROUNDING)
