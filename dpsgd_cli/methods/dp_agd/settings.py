"""DP-AGD as recipes give it; its budget and PrivGene's in zCDP: the plan, and the rates at which DP-AGD spends it.

Guarantee: a trial's ledger refuses a release that would pass `rho`. rho is the largest zCDP whose conversion (that of
the plan's accountant) meets the epsilon of the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.budget import EpsilonBudget, Filter, RhoBudget, RhoFilter
from dpsgd_cli.accounting.conversions import bun_steinke_epsilon, tight_zcdp_epsilon
from dpsgd_cli.accounting.mechanism import ZeroConcentrated
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.search import largest
from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, Experiment, FullBatch


class DpAgdMethod(FullBatch):
    """DP-AGD: Lee and Kifer 2018, Algorithm 2, with their defaults."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_agd.run:DpAgd",
        planner="dpsgd_cli.methods.dp_agd.settings:dp_agd",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="bounds",
        only_convex=False,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["dp-agd"] = "dp-agd"
    splits: Positive = Field(
        60.0, description="Published rates: eps / (2 splits) a release. Shares: rho / splits a step."
    )
    gradient_share: Fraction | None = Field(
        None, description="Share of an iteration's rho that the gradient gets; left out, the published rates."
    )
    gamma: Positive = Field(0.1, description="Growth of the gradient's budget when no candidate improves.")
    step_candidates: Count = Field(20, description="Step lengths tried besides 0, equally spaced.")
    alpha_max: Positive = Field(2.0, description="Longest step tried at first.")
    refresh: Count = Field(10, description="Steps after which the longest step is set anew.")
    alpha_growth: Positive = Field(0.1, description="It becomes (1 + this) times the longest step taken since.")
    alpha_shrink: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Factor on the longest step tried after a choice to stay; 1 as published."
    )
    momentum: Fraction | None = Field(
        None, description="What a direction keeps of the one before; left out, each is of one gradient, as published."
    )
    objective_clip: Positive = Field(3.0, description="C_obj, bound on one record's loss in a selection.")
    gradient_clip: Positive = Field(3.0, description="C_grad, L2 bound on one record's gradient.")
    selection: Literal["laplace", "exponential"] = Field(
        "laplace", description="How a step is chosen: noisy-min (eps^2/2-zCDP) or exponential mechanism (eps^2/8-zCDP)."
    )


# Equal parts of a budget must not pass it by the rounding of their sum.
_BELOW = 1 - 1e-8


@dataclass(frozen=True)
class AdaptivePlan(Plan):
    """Plan whose releases are chosen during the run: `rho_total` is all that a trial may spend.

    Private preprocessing is part of that if the budget covers it. Guarantee: the releases of a trial are, together,
    rho_total-zCDP, whatever it chose (Feldman and Zrnic 2021, Theorem 4.3). `is_adaptive` is False for a method that
    only divides the budget into parts of known number and size, which are its `epochs`: then its ledger is the bound.
    """

    rho_total: float = 0.0
    is_adaptive: bool = True

    @property
    def budget_cap(self) -> ZeroConcentrated | None:
        return ZeroConcentrated(self.rho_total, self.sampling.adjacency) if self.is_adaptive else None

    @property
    def rho_for_training(self) -> float:
        """The budget left by private preprocessing, in rho."""
        return self.rho_total - (total_rho(self.preprocessing_releases) if self.covers_before else 0.0)

    def _filter(self) -> Filter:
        return RhoFilter(self.rho_total)


def largest_rho(epsilon: float, delta: float, accountant: str) -> float:
    """Return the largest rho whose conversion meets (epsilon, delta), from below to 1e-12 relative.

    `accountant`: `zcdp` is rho + 2 sqrt(rho log(1/delta)), as Lee and Kifer use it; `zcdp-tight` the best Renyi order.

    >>> round(largest_rho(0.8, 1e-8, "zcdp"), 6)
    0.008502
    """
    convert = bun_steinke_epsilon if accountant == "zcdp" else tight_zcdp_epsilon
    return largest(lambda rho: convert(rho, delta) <= epsilon, 0.0, epsilon)


@dataclass(frozen=True)
class AgdRates:
    """Division of DP-AGD's budget: total zCDP, zCDP of a first gradient and of a selection, epsilon of a selection."""

    rho: float
    gradient_rho: float
    selection_epsilon: float
    selection_rho: float

    @property
    def most_selections(self) -> int:
        """The largest number of selections of a run."""
        return int(self.rho / self.selection_rho)


def agd_rates(settings: DpAgdMethod, plan: AdaptivePlan) -> AgdRates:
    """Return the rates of DP-AGD as published, or by shares if `gradient_share` is set.

    Published (Lee and Kifer 2018, section 5): eps_0 = eps / (2 splits) for both; a selection is eps_0-DP, and a
    gradient has the noise of the classical Gaussian mechanism at (eps_0, delta): eps_0^2 / (4 log(1.25 / delta))-zCDP.
    By shares: an iteration may spend rho / splits, `gradient_share` of it on the gradient.

    Raises InfeasibleBudget if one gradient and one selection exceed the budget.
    """
    rho = plan.rho_for_training
    per_rho = 8.0 if settings.selection == "exponential" else 2.0
    if settings.gradient_share is None:
        budget = plan.budget
        whole = budget.epsilon if isinstance(budget, EpsilonBudget) else bun_steinke_epsilon(rho, plan.delta)
        epsilon = whole / (2 * settings.splits)
        gradient = epsilon**2 / (4 * math.log(1.25 / plan.delta))
    else:
        each = rho * _BELOW / settings.splits
        gradient = settings.gradient_share * each
        epsilon = math.sqrt(per_rho * (1 - settings.gradient_share) * each)
    rates = AgdRates(rho, gradient, epsilon, epsilon**2 / per_rho)
    if rates.gradient_rho + rates.selection_rho > rho:
        raise InfeasibleBudget(
            f"dp-agd: one gradient and one selection cost rho {rates.gradient_rho + rates.selection_rho:.3g}, more than"
            f" the {rho:.3g} that there are; raise method.splits or the budget"
        )
    return rates


def adaptive_plan(recipe: Experiment, facts: Facts) -> AdaptivePlan:
    """A budget in zCDP, for methods that choose while they run what to release next."""
    privacy = recipe.required_privacy
    budget, delta = privacy.budget, privacy.stated_delta
    if budget is None:
        raise PrivacyError(f"method {recipe.method.kind} spends a budget: give privacy.budget")
    accountant = "zcdp-tight" if privacy.accountant == "auto" else privacy.accountant
    if accountant not in ("zcdp", "zcdp-tight"):
        raise PrivacyError(
            f"method {recipe.method.kind} chooses what to release as it goes, which the budget of accountant"
            f" {accountant} does not cover; use zcdp or zcdp-tight"
        )
    rho = budget.rho if isinstance(budget, RhoBudget) else largest_rho(budget.epsilon, delta, accountant)
    return recipe.planned(AdaptivePlan, facts, accountant=accountant, rho_total=rho, is_adaptive=True)


def dp_agd(recipe: Experiment, facts: Facts) -> Plan:
    """Return the plan of a zCDP budget whose parts `methods/dp_agd/run.py` chooses during the run."""
    assert isinstance(recipe.method, DpAgdMethod)
    plan = adaptive_plan(recipe, facts)
    agd_rates(recipe.method, plan)
    return plan
