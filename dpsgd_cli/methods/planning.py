"""The plan of a recipe, by the planner that its method names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.plugins import named
from dpsgd_cli.errors import PrivacyError

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


def plan_for(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a private recipe.

    Raises PrivacyError if no guarantee covers it, and InfeasibleBudget if nothing fits the budget.
    """
    method = recipe.method
    if method.described.planner is None:
        raise PrivacyError(f"method {method.kind} has no guarantee to plan; leave privacy out")
    planner: Callable[[Recipe, Facts], Plan] = named(method.described.planner)
    plan = planner(recipe, facts)
    if plan.sampling.adjacency not in method.described.adjacencies:
        proved = " or ".join(method.described.adjacencies)
        raise PrivacyError(
            f"method {method.kind} is proved for privacy.adjacency: {proved}, not {plan.sampling.adjacency}"
        )
    return plan
