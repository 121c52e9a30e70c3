"""The `method:` section: how records reach a step and how a gradient becomes an update."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpsgd_cli.recipe.schema.base import Count, NonNegative, Positive, Section
from dpsgd_cli.recipe.schema.convex import ConvexMethod


class Sgd(Section):
    kind: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Heavy-ball momentum.")


class Adam(Section):
    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moment averages.")
    stability: Positive = Field(1e-8, description="Added to the root of the second moment.")


Optimizer = Annotated[Sgd | Adam, Field(discriminator="kind")]


class Ema(Section):
    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(0.999, description="Weight of the past per step.")


class AllIterates(Section):
    """The mean of the weights after every step."""

    kind: Literal["all"] = "all"


class TailIterates(Section):
    """The mean of the weights after the last steps."""

    kind: Literal["tail"] = "tail"
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="Share of the steps that is averaged.")


Averaging = Annotated[Ema | AllIterates | TailIterates, Field(discriminator="kind")]


class Gradient(Section):
    """What every gradient method shares."""

    batching: Literal["poisson", "shuffle", "full"] = Field("poisson", description="How records reach a step.")
    batch_size: Count | None = Field(None, description="Expected (poisson) or exact (shuffle) size; none for full.")
    learning_rate: Positive = Field(0.1, description="Step length on the mean-scaled gradient.")
    optimizer: Optimizer = Field(Sgd(), description="How a gradient becomes an update.")
    weight_decay: NonNegative = Field(0.0, description="L2 coefficient; reads no data.")
    averaging: Averaging | None = Field(None, description="Release averaged weights instead of the last.")

    @model_validator(mode="after")
    def _batch_size_goes_with_batching(self) -> Gradient:
        if (self.batching in ("full", "single")) != (self.batch_size is None):
            raise ValueError(f"batching: {self.batching} {'takes no' if self.batch_size else 'needs a'} batch_size")
        return self


class SgdMethod(Gradient):
    """No clipping, no noise, no privacy: the yardstick."""

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Gradient):
    """Poisson, shuffled or full batches of clipped gradients; `single` is Algorithm 3 of Lecture 15."""

    kind: Literal["dp-sgd"] = "dp-sgd"
    batching: Literal["poisson", "shuffle", "full", "single"] = Field(
        "poisson", description="How records reach a step; single: one record a step, drawn uniformly (replace-one)."
    )
    learning_rate: Positive | Literal["theorem"] = Field(
        0.1, description="Step length; theorem (single only): 2R/(G sqrt t), or 1/(l2 t) where l2 > 0."
    )
    noise: Literal["exact", "lemma-15.5"] = Field(
        "exact", description="single: the least noise that the accountant allows, or that of Lemma 15.5."
    )

    @model_validator(mode="after")
    def _theory_is_for_single(self) -> DpSgdMethod:
        if self.batching != "single" and (self.learning_rate == "theorem" or self.noise != "exact"):
            raise ValueError("learning_rate: theorem and noise: lemma-15.5 are for batching: single")
        return self


class FullGradient(Gradient):
    """Full-batch descent."""

    batching: Literal["full"] = Field("full", description="Every record in every step.")
    learning_rate: Positive | Literal["theorem"] = Field(
        0.1, description="Step length; theorem: R/(B sqrt T) of Lecture 9, Theorem 1 (convex models with a radius)."
    )


class GdMethod(FullGradient):
    """Lecture 15, Algorithm 1: no noise, no privacy."""

    kind: Literal["gd"] = "gd"


class DpGdMethod(FullGradient):
    """Lecture 15, Algorithm 2 (Lecture 9, section 4)."""

    kind: Literal["dp-gd"] = "dp-gd"
    noise: Literal["exact", "zcdp", "lemma-15.1", "lecture-9"] = Field(
        "exact",
        description="exact: the least noise for the budget; zcdp: by rho + 2 sqrt(rho log(1/delta)); lemma-15.1:"
        " advanced composition; lecture-9: T times the variance of one Gaussian mechanism.",
    )


class SgdMaMethod(Gradient):
    """DP-SGD as Lee and Kifer compared with: Poisson batches, noise by the moments accountant."""

    kind: Literal["sgd-ma"] = "sgd-ma"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that the accountant needs.")


class SgdAdvMethod(Gradient):
    """DP-SGD with noise by advanced composition of amplified Gaussian mechanisms."""

    kind: Literal["sgd-adv"] = "sgd-adv"
    batching: Literal["poisson"] = Field("poisson", description="The sampler that amplification needs.")


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.Method`."""

    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("method", description="The Method class (or a factory of one) in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Whatever the method reads for itself.")


Method = Annotated[
    SgdMethod | DpSgdMethod | GdMethod | DpGdMethod | SgdMaMethod | SgdAdvMethod | ConvexMethod | PythonMethod,
    Field(discriminator="kind"),
]
