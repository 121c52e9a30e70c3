"""Private selection as recipes give it, and its plan: one for each candidate's part, and the charge for the whole.

Guarantee: `methods/private_selection/run.py` proves that training all candidates on disjoint parts and choosing one
costs the larger of the most expensive training and the choice. The ledger is charged their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.accounting.accountants.additive import rho_of, total_rho
from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.accounting.budget import RhoBudget
from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.common.sections import Positive
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.dp_sgd.settings import DpSgdMethod, Gradient
from dpsgd_cli.methods.experiment import Descriptor, Experiment, Privacy, plan_for
from dpsgd_cli.schedules.settings import Decay, Schedule


class PrivateSelectionMethod(Gradient):
    """Private selection (Yu et al. 2019, IV-A3): candidates train on separate parts; the last part chooses one."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.private_selection.run:PrivateSelection",
        planner="dpsgd_cli.methods.private_selection.settings:plan_selection",
        privacy="needed",
        adjacencies=("replace-one", "zero-out"),
        discovers="bounds",
        only_convex=False,
    )
    kind: Literal["private-selection"] = "private-selection"
    candidates: Annotated[list[Decay], Field(min_length=2)] = Field(
        description="Schedules, as under privacy.schedule; a part of the records for each, and one more.",
        examples=[[{"kind": "uniform", "initial": 8}, {"kind": "exponential", "initial": 10, "decay": 0.01}]],
    )
    epsilon: Positive = Field(1.0, description="Of the exponential mechanism that chooses: rho epsilon^2 / 8.")


@dataclass(frozen=True)
class SelectionPlan(Plan):
    """Plan in which `candidates[i]` trains recipe `recipes[i]` on its part; `epochs` are the charges for the whole."""

    candidates: tuple[Plan, ...] = ()
    recipes: tuple[Experiment, ...] = ()


def plan_selection(recipe: Experiment, facts: Facts) -> SelectionPlan:
    """Return the plan of a `private-selection` recipe; its budget is in rho, preprocessing included.

    Raises PrivacyError under add-remove, where the partition depends on who is in the data, and InfeasibleBudget if
    the choice leaves nothing for training.
    """
    method, privacy = recipe.method, recipe.privacy
    assert isinstance(method, PrivateSelectionMethod) and privacy is not None
    if not isinstance(privacy.budget, RhoBudget):
        raise PrivacyError("method private-selection divides a budget between training and choice: give budget: {rho}")
    adjacency = recipe.adjacency
    if NEIGHBOURS[adjacency].counted:
        raise PrivacyError(
            "method private-selection cuts the records into parts, which one record more or less would move; state"
            " privacy.adjacency zero-out or replace-one"
        )
    choice = Release(PureDP(method.epsilon, adjacency, "exponential", "choice"))
    counted = [*facts.preprocessing_releases] if privacy.budget_covers == "total" else []
    left = (privacy.budget.rho - total_rho([choice])) * (1 - 1e-12) - total_rho(counted)
    if left <= 0:
        raise InfeasibleBudget(
            f"a choice at method.epsilon {method.epsilon:g} costs rho {method.epsilon**2 / 8:g}, which leaves nothing"
            f" of the budget {privacy.budget.rho:g} for training; lower epsilon"
        )
    part = facts.records // (len(method.candidates) + 1)
    recipes = tuple(_candidate(recipe, privacy, schedule, left) for schedule in method.candidates)
    plans = tuple(plan_for(one, Facts(part, (), facts.groups)) for one in recipes)
    costliest = max(plans, key=lambda plan: rho_of(plan.releases) or 0.0)
    longest = max(len(plan.epochs) for plan in plans)
    epochs = [*costliest.epochs, *[()] * (longest - len(costliest.epochs))]
    epochs[-1] = (*epochs[-1], choice)
    accountant: str = privacy.accountant
    if accountant == "auto":
        accountant = BestAccountant().best(
            [*facts.preprocessing_releases, *(r for epoch in epochs for r in epoch)], costliest.delta
        )[1]
    return recipe.planned(
        SelectionPlan,
        facts,
        sampling=replace(costliest.sampling, records=facts.records),
        noise_multipliers=costliest.noise_multipliers,
        sensitivity=costliest.sensitivity,
        epochs=tuple(epochs),
        accountant=accountant,
        candidates=plans,
        recipes=recipes,
    )


def _candidate(recipe: Experiment, privacy: Privacy, schedule: Schedule, rho: float) -> Experiment:
    """Return the recipe that trains one candidate alone."""
    settings = recipe.method.model_dump(exclude={"kind", "candidates", "epsilon"})
    own = privacy.changed(schedule=schedule, budget=RhoBudget(rho=rho), accountant="auto", budget_covers="total")
    return recipe.changed(method=DpSgdMethod(**settings), privacy=own)
