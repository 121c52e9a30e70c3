"""DP-AGD as recipes give it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch


class DpAgdMethod(FullBatch):
    """DP-AGD: Lee and Kifer 2018, Algorithm 2, with their defaults."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_agd.run:DpAgd",
        planner="dpsgd_cli.methods.dp_agd.price:dp_agd",
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
