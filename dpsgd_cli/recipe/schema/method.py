"""The `method:` section: how records reach a step and how a gradient becomes an update."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from dpsgd_cli.recipe.batching import Batching
from dpsgd_cli.recipe.schema.base import Count, NonNegative, Positive, Section
from dpsgd_cli.recipe.schema.convex import ConvexMethod
from dpsgd_cli.recipe.schema.descriptor import ITS_TRAINING, Descriptor
from dpsgd_cli.recipe.schema.learning_rate import Rate
from dpsgd_cli.recipe.schema.schedule import Decay


class SgdSettings(Section):
    kind: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Heavy-ball momentum.")


class AdamSettings(Section):
    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moment averages.")
    stability: Positive = Field(1e-8, description="Added to the root of the second moment.")


Optimizer = Annotated[SgdSettings | AdamSettings, Field(discriminator="kind")]


class EmaSettings(Section):
    """An exponential moving average that forgets the start, as in De et al. (2022)."""

    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999, description="Weight of the past in step t = 0, 1, ...: this, or (1 + t) / (10 + t) while that is less."
    )


class AllIterates(Section):
    """The mean of the weights that every step started from, as in the lectures."""

    kind: Literal["all"] = "all"


class TailIterates(Section):
    """The mean of the weights after the last steps."""

    kind: Literal["tail"] = "tail"
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="Share of the steps that is averaged.")


Averaging = Annotated[EmaSettings | AllIterates | TailIterates, Field(discriminator="kind")]


class Gradient(Section):
    """What every gradient method shares."""

    batching: Batching = Field(
        "poisson",
        description="How records reach a step; fixed: one record a step, drawn uniformly (replace-one, batch_size 1).",
    )
    batch_size: Count | None = Field(
        None, description="Expected (poisson) or exact (shuffle) size, 1 (fixed), none (full)."
    )
    learning_rate: Positive | Rate | Literal["theorem"] = Field(
        0.1,
        description="Step length on the mean-scaled gradient, or how it changes with the epoch; theorem: the lectures'"
        " (convex model with a radius).",
    )
    optimizer: Optimizer = Field(SgdSettings(), description="How a gradient becomes an update.")
    weight_decay: NonNegative = Field(0.0, description="L2 coefficient; reads no data.")
    descriptor: ClassVar[Descriptor]
    _theorems: ClassVar[tuple[str, ...]] = ()
    averaging: Averaging | None = Field(None, description="Release averaged weights instead of the last.")

    @model_validator(mode="after")
    def _batch_size_goes_with_batching(self) -> Gradient:
        if self.learning_rate == "theorem" and self.batching not in self._theorems:
            raise ValueError(
                f"learning_rate: theorem is for batching: {' or '.join(self._theorems) or 'no such method'}"
            )
        if (self.batching == "full") != (self.batch_size is None):
            raise ValueError(f"batching: {self.batching} {'takes no' if self.batch_size else 'needs a'} batch_size")
        if self.batching == "fixed" and self.batch_size != 1:
            raise ValueError(f"batch_size: is {self.batch_size}, but batching: fixed draws one record a step; give 1")
        return self

    @property
    def described(self) -> Descriptor:
        """What the rest of the program knows of this method, with these settings."""
        return self.descriptor


class SgdMethod(Gradient):
    """No clipping, no noise, no privacy: the yardstick."""

    descriptor = Descriptor(
        "dpsgd_cli.methods.dp_sgd:WithoutPrivacy",
        privacy="refused",
        by_steps=True,
        in_processes=True,
        may_differ=ITS_TRAINING,
    )

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Gradient):
    """Poisson, shuffled or full batches of clipped gradients; `fixed` is Algorithm 3 of Lecture 15."""

    descriptor = Descriptor("dpsgd_cli.methods.dp_sgd:DpSgd", by_steps=True, in_processes=True, may_differ=ITS_TRAINING)
    _theorems: ClassVar[tuple[str, ...]] = ("fixed",)

    kind: Literal["dp-sgd"] = "dp-sgd"

    @property
    def described(self) -> Descriptor:
        if self.batching != "fixed":
            return self.descriptor
        return replace(self.descriptor, runs="dpsgd_cli.methods.lecture_sgd:LectureSgd", in_processes=False)


class PrivateSelectionMethod(Gradient):
    """Yu et al. 2019, IV-A3: train every candidate on a part of its own, publish one, chosen on the last part."""

    descriptor = Descriptor(
        "dpsgd_cli.methods.private_selection:PrivateSelection", "dpsgd_cli.privacy.candidates:plan_selection"
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
    """Lecture 15, Algorithm 1: no noise, no privacy."""

    descriptor = Descriptor("dpsgd_cli.methods.dp_gd:Gd", privacy="refused", may_differ=ITS_TRAINING)
    kind: Literal["gd"] = "gd"


class DpGdMethod(FullGradient):
    """Lecture 15, Algorithm 2 (Lecture 9, section 4). `privacy.accountant` says by which theorem noise is chosen."""

    descriptor = Descriptor("dpsgd_cli.methods.dp_gd:DpGd", may_differ=ITS_TRAINING)
    kind: Literal["dp-gd"] = "dp-gd"


class SgdMaMethod(Gradient):
    """DP-SGD as Lee and Kifer compared with: Poisson batches, noise by the moments accountant."""

    descriptor = Descriptor(
        "dpsgd_cli.methods.dp_sgd:DpSgd",
        "dpsgd_cli.privacy.gradient_plan:by_moments",
        in_processes=True,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["sgd-ma"] = "sgd-ma"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that the accountant needs.")


class SgdAdvMethod(Gradient):
    """DP-SGD with noise by advanced composition of amplified Gaussian mechanisms."""

    descriptor = Descriptor(
        "dpsgd_cli.methods.dp_sgd:DpSgd",
        "dpsgd_cli.privacy.gradient_plan:by_advanced_composition",
        in_processes=True,
        may_differ=ITS_TRAINING,
    )
    kind: Literal["sgd-adv"] = "sgd-adv"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that amplification needs.")


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.Method`."""

    descriptor = Descriptor(
        "dpsgd_cli.methods.creation:own", "dpsgd_cli.privacy.gradient_plan:of_own_code", privacy="optional"
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
    | PythonMethod,
    Field(discriminator="kind"),
]

METHODS: dict[str, Any] = {one.model_fields["kind"].default: one for one in get_args(get_args(Method)[0])}
"""Settings by kind."""
