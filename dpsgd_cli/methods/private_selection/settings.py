"""Private selection as recipes give it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Positive
from dpsgd_cli.methods.descriptor import Descriptor
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.schedules.settings import Decay


class PrivateSelectionMethod(Gradient):
    """Private selection (Yu et al. 2019, IV-A3): candidates train on separate parts; the last part chooses one."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.private_selection.run:PrivateSelection",
        planner="dpsgd_cli.methods.private_selection.price:plan_selection",
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
