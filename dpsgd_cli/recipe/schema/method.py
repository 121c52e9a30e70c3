"""The `method:` section: how records reach a step and how a gradient becomes an update."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dpsgd_cli.recipe.schema.base import Count, NonNegative, Positive, Section


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


class Gradient(Section):
    """What every gradient method shares."""

    batching: Literal["poisson", "shuffle", "full"] = Field("poisson", description="How records reach a step.")
    batch_size: Count | None = Field(None, description="Expected (poisson) or exact (shuffle) size; none for full.")
    learning_rate: Positive = Field(0.1, description="Step length on the mean-scaled gradient.")
    optimizer: Optimizer = Field(Sgd(), description="How a gradient becomes an update.")
    weight_decay: NonNegative = Field(0.0, description="L2 coefficient; reads no data.")
    averaging: Ema | None = Field(None, description="Release averaged weights instead of the last.")

    @model_validator(mode="after")
    def _batch_size_goes_with_batching(self) -> Gradient:
        if (self.batching == "full") != (self.batch_size is None):
            raise ValueError(f"batching: {self.batching} {'takes no' if self.batch_size else 'needs a'} batch_size")
        return self


class SgdMethod(Gradient):
    """No clipping, no noise, no privacy: the yardstick."""

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Gradient):
    kind: Literal["dp-sgd"] = "dp-sgd"


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.Method`."""

    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("method", description="The Method class (or a factory of one) in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Whatever the method reads for itself.")


Method = Annotated[SgdMethod | DpSgdMethod | PythonMethod, Field(discriminator="kind")]
