"""Plan of the majority-class baseline: one Laplace count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.methods.perturbation.price import epsilon_delta, one_release

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


def majority(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one count with Laplace noise."""
    epsilon, _ = epsilon_delta(recipe)
    return one_release(recipe, facts, Release(PureDP(epsilon, recipe.adjacency, "laplace", "count")))
