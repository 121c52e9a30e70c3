"""Baselines as recipes give them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count
from dpsgd_cli.methods.descriptor import ITS_BUDGET, Descriptor, FullBatch


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
        planner="dpsgd_cli.methods.baselines.price:majority",
        privacy="optional",
        adjacencies=("add-remove",),
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["majority"] = "majority"
