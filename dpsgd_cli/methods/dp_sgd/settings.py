"""Settings that all gradient methods share (batching, step lengths, updates, averages), and those of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.calibration.price import Calibration
from dpsgd_cli.common.sections import Auto, Count, Fraction, NonNegative, Positive, Section
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.intervals.price import INFERENCE, Inference
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_TRAINING, Descriptor, Experiment, MethodSection
from dpsgd_cli.preconditioning.price import Preconditioner
from dpsgd_cli.schedules.learning_rate import Rate


class OptimizerKind(Section):
    """Base of the optimizers. `made`: `module:class` of the `Update` that these settings configure."""

    must_state = ("made",)
    made: ClassVar[str]
    kind: str


class SgdSettings(OptimizerKind):
    made = "dpsgd_cli.methods.dp_sgd.optimizers:SgdUpdate"
    kind: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = Field(
        "auto", description="Heavy-ball momentum; auto: with the learning rate, or none."
    )

    @property
    def momentum_value(self) -> float:
        """Return the momentum; 0 while it is `auto`."""
        return 0.0 if self.momentum == "auto" else self.momentum


class AdamSettings(OptimizerKind):
    made = "dpsgd_cli.methods.dp_sgd.optimizers:AdamUpdate"
    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moment averages.")
    stability: Positive = Field(1e-8, description="Added to the root of the second moment.")


class AdamWSettings(AdamSettings):
    """Adam with weight decay that is no part of the gradient (Loshchilov and Hutter 2019)."""

    made = "dpsgd_cli.methods.dp_sgd.optimizers:AdamUpdate"
    kind: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    decay: NonNegative = Field(0.01, description="Share of each weight that a step takes away, in units of its rate.")


Optimizer = Annotated[SgdSettings | AdamSettings | AdamWSettings, Field(discriminator="kind")]


class ParameterGroup(Section):
    """Parameters with a rate or decay of their own, by the pattern of their names."""

    names: str = Field(
        description="Pattern of names: *.bias, bert.encoder.*; the first group that fits counts.",
        examples=["*.bias"],
    )
    rate: NonNegative = Field(1.0, description="Factor on the learning rate.")
    decay: NonNegative = Field(1.0, description="Factor on the weight decay.")


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


class Gradient(MethodSection):
    """Settings that all gradient methods share."""

    batching: Batching = Field(
        "poisson",
        description="How records reach a step; fixed: batches of one size, drawn anew (replace-one); random-allocation:"
        " each record in one secret step of each epoch. `dpsgd recipe batching` shows each.",
    )
    batch_size: Count | Auto | None = Field(
        "auto",
        description="Expected or exact (shuffle, fixed) size, none (full); auto: from public facts, 1 for fixed.",
    )
    learning_rate: Positive | Rate | Literal["theorem", "auto"] = Field(
        "auto",
        description="Step length on the mean-scaled gradient, or how it changes with the epoch; theorem: the lectures'"
        " (convex model with a radius); auto: from public facts, with what else of the method is auto.",
    )
    optimizer: Optimizer = Field(SgdSettings(), description="How a gradient becomes an update.")
    weight_decay: NonNegative = Field(0.0, description="L2 coefficient; reads no data.")
    groups: list[ParameterGroup] = Field(
        default_factory=list,
        description="Parameters with rates of their own; it is post-processing, at no price.",
        examples=[[{"names": "*.bias", "decay": 0}]],
    )
    _theorems: ClassVar[tuple[str, ...]] = ()
    averaging: Averaging | Auto | None = Field(
        "auto",
        description="Release averaged weights instead of the last (null); auto: with the learning rate, or the last.",
    )

    @model_validator(mode="after")
    def _batch_size_goes_with_batching(self) -> Gradient:
        if self.learning_rate == "theorem" and self.batching not in self._theorems:
            raise ValueError(
                f"learning_rate: theorem is for batching: {' or '.join(self._theorems) or 'no such method'}"
            )
        if self.learning_rate == "theorem" and self.batching == "fixed" and not self.one_by_one:
            raise ValueError("learning_rate: theorem is for one record a step; give batch_size: 1, or a number")
        if self.batch_size != "auto" and (self.batching == "full") != (self.batch_size is None):
            raise ValueError(f"batching: {self.batching} {'takes no' if self.batch_size else 'needs a'} batch_size")
        return self

    @property
    def one_by_one(self) -> bool:
        """Return True if a step reads a single record: Algorithm 3 of Lecture 15, which has a class of its own."""
        return self.batching == "fixed" and self.batch_size in (1, "auto")

    @property
    def batch(self) -> int | None:
        """Return the expected or exact size of a batch; None for all records. Raise RecipeError while it is `auto`."""
        if self.batching == "full" or self.batch_size is None:
            return None
        if self.batch_size == "auto":
            raise RecipeError("method.batch_size: is still auto; give a number")
        return self.batch_size

    def steps_per_epoch(self, records: int) -> int:
        """Return the number of steps of an epoch over `records` training records."""
        return -(-records // (self.batch or records))

    @property
    def rate(self) -> float | Rate | Literal["theorem"]:
        """Return the learning rate; a placeholder, 0.1, while it is `auto`."""
        return 0.1 if self.learning_rate == "auto" else self.learning_rate

    @property
    def average(self) -> Averaging | None:
        """Return the averaging of the weights; None while it is `auto`."""
        return None if self.averaging == "auto" else self.averaging


class Preconditioned(Gradient):
    """Settings of the gradient methods that can take a preconditioner."""

    preconditioner: Preconditioner | Auto | None = Field(
        "auto",
        description="Make directions of the rows of linear and convex models weigh alike, for a share of the budget:"
        " second-moment, marginals. auto: with the rate, or none (null).",
        examples=[{"kind": "second-moment"}],
    )

    inference: Inference | None = INFERENCE
    inference_share: Fraction = Field(
        0.3, description="Share of the mu^2 (or rho) left after the preconditioner that the release for intervals gets."
    )
    calibration: Calibration | Auto | None = Field(
        "auto",
        description="Correct predictions of numbers for clipped residuals, for a share of the budget; auto: with the"
        " rate, for a squared loss behind marginals, or none (null).",
        examples=[{"share": 0.05}],
    )

    @property
    def conditioned(self) -> Preconditioner | None:
        """Return the preconditioner; None while it is `auto`."""
        return None if self.preconditioner == "auto" else self.preconditioner

    @property
    def inferred(self) -> float | None:
        """Return the share of the budget for the rounds of `intervals/price.py`; None without them."""
        return None if self.inference is None else self.inference_share

    @property
    def calibrated(self) -> Calibration | None:
        """Return the settings of calibration; None while they are `auto`."""
        return None if self.calibration == "auto" else self.calibration


class SgdMethod(Gradient):
    """SGD without clipping, noise or privacy, for comparison."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd.run:WithoutPrivacy",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=False,
        minibatch=True,
        distributable=True,
        per_trial_keys=ITS_TRAINING,
    )

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Preconditioned):
    """DP-SGD: batches of clipped gradients with noise. `fixed` batches of one record are Algorithm 3 of Lecture 15."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_sgd.run:DpSgd",
        planner="dpsgd_cli.methods.dp_sgd.price:gradient",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="names",
        only_convex=False,
        minibatch=True,
        distributable=True,
        auto_tunable=True,
        adaptive_clipping=True,
        per_trial_keys=ITS_TRAINING,
        correlates=True,
        by_unit=True,
    )
    _theorems: ClassVar[tuple[str, ...]] = ("fixed",)

    kind: Literal["dp-sgd"] = "dp-sgd"

    @property
    def described(self) -> Descriptor:
        if self.one_by_one:
            single = "dpsgd_cli.methods.dp_sgd.fixed:LectureSgd"
            return replace(self.descriptor, runs=single, distributable=False, auto_tunable=False, by_unit=False)
        # these look at all rows, and no sum over processes makes that
        alone = any(one is not None for one in (self.conditioned, self.inference, self.calibrated))
        return replace(self.descriptor, distributable=False) if alone else self.descriptor


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
        per_trial_keys=ITS_TRAINING,
    )
    kind: Literal["gd"] = "gd"


class DpGdMethod(FullGradient, Preconditioned):
    """Lecture 15, Algorithm 2 (Lecture 9, section 4). `privacy.accountant` names the theorem that chooses the noise."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_gd:DpGd",
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


def section_of(recipe: Experiment) -> Gradient:
    """Return the method section of a gradient recipe."""
    assert isinstance(recipe.method, Gradient)
    return recipe.method
