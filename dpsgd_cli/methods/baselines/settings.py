"""Baselines as recipes give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Count
from dpsgd_cli.methods.descriptor import ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.methods.perturbation.settings import epsilon_delta, one_release

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


class NonPrivateMethod(FullBatch):
    """The optimum without privacy, by L-BFGS, for comparison."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.baselines.run:NonPrivate",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=True,
    )
    kind: Literal["non-private"] = "non-private"
    most_steps: Count = Field(1000, description="Iterations after which the solver stops.")


class MajorityMethod(FullBatch):
    """Majority-class baseline, by a Laplace count; by the exact count without a privacy section."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.baselines.run:Majority",
        planner="dpsgd_cli.methods.baselines.settings:majority",
        privacy="optional",
        adjacencies=("add-remove",),
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["majority"] = "majority"


def majority(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one count with Laplace noise."""
    epsilon, _ = epsilon_delta(recipe)
    return one_release(recipe, facts, Release(PureDP(epsilon, recipe.adjacency, "laplace", "count")))
