"""PrivGene as recipes give it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.methods.dp_agd.settings import AdaptivePlan, adaptive_plan

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


class PrivGeneMethod(FullBatch):
    """PrivGene (Zhang et al. 2013): a genetic search whose survivors are chosen by the exponential mechanism."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.privgene.run:PrivGene",
        planner="dpsgd_cli.methods.privgene.settings:privgene",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["privgene"] = "privgene"
    rounds: Count = Field(20, description="Generations.")
    population: Count = Field(100, description="Weight vectors of a generation.")
    survivors: Count = Field(5, description="Vectors chosen, one after the other, to breed the next generation.")
    reach: Positive = Field(
        2.0, description="First vectors are uniform in [-reach, reach]; the first width of mutations."
    )
    shrink: Fraction = Field(0.85, description="Factor on the width of mutations from one round to the next.")

    @property
    def choices(self) -> int:
        """Return the number of uses of the exponential mechanism: the survivors of each round, and the winner."""
        return self.rounds * self.survivors + 1


def equal_choices(plan: AdaptivePlan, choices: int) -> PureDP:
    """Return one of `choices` uses of the exponential mechanism, eps^2/8-zCDP each, that share the budget equally."""
    # below an equal share by more than the rounding of their sum
    epsilon = math.sqrt(8 * plan.rho_for_training / choices) * (1 - 1e-9)
    return PureDP(epsilon, plan.sampling.adjacency, "exponential", "parent")


def privgene(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of equal parts, one for each choice; no spending depends on a choice."""
    assert isinstance(recipe.method, PrivGeneMethod)
    plan, choices = adaptive_plan(recipe, facts), recipe.method.choices
    return replace(plan, is_adaptive=False, epochs=((Release(equal_choices(plan, choices), choices),),))
