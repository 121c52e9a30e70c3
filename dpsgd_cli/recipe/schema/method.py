"""The `method:` section: the gradient methods, and the union of all methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Positive
from dpsgd_cli.recipe.schema.convex import ConvexMethod
from dpsgd_cli.recipe.schema.descriptor import EVERY_NEIGHBOUR, ITS_TRAINING, Descriptor
from dpsgd_cli.recipe.schema.gradient import Gradient, Preconditioned
from dpsgd_cli.recipe.schema.pate import PateMethod
from dpsgd_cli.recipe.schema.schedule import Decay


class SgdMethod(Gradient):
    """SGD without clipping, noise or privacy, for comparison."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd:WithoutPrivacy",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=False,
        by_steps=True,
        in_processes=True,
        may_differ=ITS_TRAINING,
    )

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Preconditioned):
    """DP-SGD: batches of clipped gradients with noise. `fixed` batches of one record are Algorithm 3 of Lecture 15."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd:DpSgd",
        planner="dpsgd_cli.privacy.gradient_plan:gradient",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        by_steps=True,
        in_processes=True,
        by_rule=True,
        finds_bounds=True,
        may_differ=ITS_TRAINING,
        correlates=True,
        by_unit=True,
    )
    _theorems: ClassVar[tuple[str, ...]] = ("fixed",)

    kind: Literal["dp-sgd"] = "dp-sgd"

    @property
    def described(self) -> Descriptor:
        if self.one_by_one:
            single = "dpsgd_cli.methods.lecture_sgd:LectureSgd"
            return replace(self.descriptor, runs=single, in_processes=False, by_rule=False, by_unit=False)
        # the second moments need all rows, and no sum over processes computes them
        return self.descriptor if self.conditioned is None else replace(self.descriptor, in_processes=False)


class PrivateSelectionMethod(Gradient):
    """Private selection (Yu et al. 2019, IV-A3): candidates train on separate parts; the last part chooses one."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.private_selection:PrivateSelection",
        planner="dpsgd_cli.privacy.candidates:plan_selection",
        privacy="needed",
        adjacencies=("replace-one", "zero-out"),
        only_convex=False,
    )
    kind: Literal["private-selection"] = "private-selection"
    candidates: Annotated[list[Decay], Field(min_length=2)] = Field(
        description="Schedules, each a section as under privacy.schedule; a part of the records for each, and one more."
    )
    epsilon: Positive = Field(1.0, description="Of the exponential mechanism that chooses: rho epsilon^2 / 8.")


class FullGradient(Gradient):
    """Full-batch descent."""

    _theorems: ClassVar[tuple[str, ...]] = ("full",)

    batching: Literal["full"] = Field("full", description="Every record in every step.")


class GdMethod(FullGradient):
    """Gradient descent without noise or privacy: Lecture 15, Algorithm 1."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_gd:Gd",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=False,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["gd"] = "gd"


class DpGdMethod(FullGradient, Preconditioned):
    """Lecture 15, Algorithm 2 (Lecture 9, section 4). `privacy.accountant` names the theorem that chooses the noise."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_gd:DpGd",
        planner="dpsgd_cli.privacy.gradient_plan:gradient",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        by_rule=True,
        finds_bounds=True,
        by_unit=True,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["dp-gd"] = "dp-gd"


class SgdMaMethod(Gradient):
    """DP-SGD as in the comparison of Lee and Kifer: Poisson batches, noise by the moments accountant."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd:DpSgd",
        planner="dpsgd_cli.privacy.gradient_plan:by_moments",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        in_processes=True,
        by_rule=True,
        finds_bounds=True,
        by_unit=True,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["sgd-ma"] = "sgd-ma"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that the accountant needs.")


class SgdAdvMethod(Gradient):
    """DP-SGD with noise by advanced composition of amplified Gaussian mechanisms."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd:DpSgd",
        planner="dpsgd_cli.privacy.gradient_plan:by_advanced_composition",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        in_processes=True,
        by_rule=True,
        finds_bounds=True,
        by_unit=True,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["sgd-adv"] = "sgd-adv"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that amplification needs.")


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.Method`."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.creation:own",
        planner="dpsgd_cli.privacy.gradient_plan:of_own_code",
        privacy="optional",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
    )
    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("method", description="The Method class (or a factory of one) in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Whatever the method reads for itself.")


Method = Annotated[
    SgdMethod
    | DpSgdMethod
    | PrivateSelectionMethod
    | GdMethod
    | DpGdMethod
    | SgdMaMethod
    | SgdAdvMethod
    | ConvexMethod
    | PateMethod
    | PythonMethod,
    Field(discriminator="kind"),
]

METHODS: dict[str, Any] = {one.model_fields["kind"].default: one for one in get_args(get_args(Method)[0])}
"""Section classes of all methods, by kind."""
