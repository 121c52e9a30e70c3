"""Full-batch gradient descent as recipes give it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dpsgd_cli.methods.dp_sgd.settings import Gradient, Preconditioned
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_TRAINING, Descriptor


class FullGradient(Gradient):
    """Full-batch descent."""

    _theorems: ClassVar[tuple[str, ...]] = ("full",)

    batching: Literal["full"] = Field("full", description="Every record in every step.")


class GdMethod(FullGradient):
    """Gradient descent without noise or privacy: Lecture 15, Algorithm 1."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_gd.run:Gd",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=False,
        per_trial_keys=ITS_TRAINING,
    )
    kind: Literal["gd"] = "gd"


class DpGdMethod(FullGradient, Preconditioned):
    """Lecture 15, Algorithm 2 (Lecture 9, section 4). `privacy.accountant` names the theorem that chooses the noise."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_gd.run:DpGd",
        planner="dpsgd_cli.methods.dp_sgd.price:gradient",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="names",
        only_convex=False,
        auto_tunable=True,
        adaptive_clipping=True,
        by_unit=True,
        per_trial_keys=ITS_TRAINING,
    )
    kind: Literal["dp-gd"] = "dp-gd"
