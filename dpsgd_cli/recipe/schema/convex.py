"""Sections of the methods for convex problems: DP-AGD, perturbations, least squares, baselines.

The gradient methods are in `method.py`, the convex problem is in `model.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Count, Positive, Section
from dpsgd_cli.recipe.schema.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor

Fraction = Annotated[float, Field(gt=0, lt=1)]


class FullBatch(Section):
    """Base of the methods that use every record in every step."""

    must_state = ("descriptor",)

    descriptor: ClassVar[Descriptor]
    batching: Literal["full"] = Field("full", description="Every record in every step.")

    @property
    def described(self) -> Descriptor:
        """Return the method's descriptor."""
        return self.descriptor

    @property
    def batch(self) -> None:
        """Return None: a batch is all records."""


class DpAgdMethod(FullBatch):
    """DP-AGD: Lee and Kifer 2018, Algorithm 2, with their defaults."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_agd:DpAgd",
        planner="dpsgd_cli.privacy.adaptive:dp_agd",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        may_differ=ITS_BUDGET,
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
    sample: Count | None = Field(
        None, description="Expected size of the Poisson sample that an iteration sees, for speed; none: all records."
    )
    selection: Literal["laplace", "exponential"] = Field(
        "laplace", description="How a step is chosen: noisy-min (eps^2/2-zCDP) or exponential mechanism (eps^2/8-zCDP)."
    )


OFF_GRID = "its random term enters a search, so no proof covers the floating-point grid of what it releases"


class ObjectivePerturbationMethod(FullBatch):
    """Objective perturbation with Gaussian noise (Kifer, Smith and Thakurta 2012).

    The inexactness of the minimum is paid for (Iyengar et al. 2019).
    """

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbations:ObjectivePerturbation",
        planner="dpsgd_cli.privacy.convex:objective_perturbation",
        privacy="needed",
        adjacencies=("add-remove",),
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["objective-perturbation"] = "objective-perturbation"


class OutputPerturbationMethod(FullBatch):
    """Output perturbation: noise on the last iterate of full-batch gradient descent, by its stability."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbations:OutputPerturbation",
        planner="dpsgd_cli.privacy.convex:output_perturbation",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["output-perturbation"] = "output-perturbation"
    steps: Count = Field(100, description="Gradient steps, at a rate for which they do not drift apart.")


class LeastSquaresMethod(FullBatch):
    """Least squares by noisy X^T X and X^T Y and a ridge (Mehta et al. 2022): one release, no learning rate."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.least_squares:DpLeastSquares",
        planner="dpsgd_cli.privacy.convex:least_squares",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        by_unit=True,
        may_differ=(*ITS_BUDGET, "method.share"),
    )
    kind: Literal["dp-least-squares"] = "dp-least-squares"
    share: Fraction = Field(0.5, description="Share of the budget's mu^2 that X^T X gets; X^T Y gets the rest.")


class PrivGeneMethod(FullBatch):
    """PrivGene (Zhang et al. 2013): a genetic search whose survivors are chosen by the exponential mechanism."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.privgene:PrivGene",
        planner="dpsgd_cli.privacy.adaptive:privgene",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["privgene"] = "privgene"
    rounds: Count = Field(20, description="Generations.")
    population: Count = Field(100, description="Weight vectors of a generation.")
    survivors: Count = Field(5, description="Vectors chosen, one after the other, to breed the next generation.")
    reach: Positive = Field(2.0, description="First vectors are uniform in [-reach, reach]; so wide a mutation is.")
    shrink: Fraction = Field(0.85, description="Factor on the width of mutations from one round to the next.")

    @property
    def choices(self) -> int:
        """Return the number of uses of the exponential mechanism: the survivors of each round, and the winner."""
        return self.rounds * self.survivors + 1


class NonPrivateMethod(FullBatch):
    """The optimum without privacy, by L-BFGS, for comparison."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.baselines:NonPrivate",
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
        runs="dpsgd_cli.methods.baselines:Majority",
        planner="dpsgd_cli.privacy.convex:majority",
        privacy="optional",
        adjacencies=("add-remove",),
        only_convex=True,
        may_differ=ITS_BUDGET,
    )
    kind: Literal["majority"] = "majority"


ConvexMethod = (
    DpAgdMethod
    | ObjectivePerturbationMethod
    | OutputPerturbationMethod
    | LeastSquaresMethod
    | PrivGeneMethod
    | NonPrivateMethod
    | MajorityMethod
)
