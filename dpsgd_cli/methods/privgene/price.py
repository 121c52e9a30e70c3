"""Plan of PrivGene: equal parts of a zCDP budget, one for each choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.methods.dp_agd.price import AdaptivePlan, adaptive_plan
from dpsgd_cli.methods.privgene.settings import PrivGeneMethod

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


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
