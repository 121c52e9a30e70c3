"""`privacy.schedule`: the noise multiplier by epoch, and `method.learning_rate` as a function of the epoch.

What the formulas are stands in `privacy/schedule.py` and `core/updates.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsgd_cli.recipe.schema.base import Count, NonNegative, Positive, Section

Auto = Literal["auto"]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class Uniform(Section):
    kind: Literal["uniform"] = "uniform"
    initial: Positive | Auto = Field("auto", description="Noise multiplier of every epoch; auto: the least allowed.")


class TimeDecay(Section):
    kind: Literal["time"] = "time"
    initial: Positive | Auto = Field(description="Noise multiplier of epoch 0.")
    decay: Positive | Auto = Field(description="k in initial / (1 + k floor(t / period)).")
    period: Count = Field(1, description="Epochs between two changes.")


class ExponentialDecay(Section):
    kind: Literal["exponential"] = "exponential"
    initial: Positive | Auto = Field(description="Noise multiplier of epoch 0.")
    decay: Positive | Auto = Field(description="k in initial * exp(-k floor(t / period)).")
    period: Count = Field(1, description="Epochs between two changes.")


class StepDecay(Section):
    kind: Literal["step"] = "step"
    initial: Positive | Auto = Field(description="Noise multiplier of epoch 0.")
    decay: Fraction | Auto = Field(description="k in initial * k^floor(t / period).")
    period: Count | Auto = Field(10, description="Epochs between two steps.")


class PolynomialDecay(Section):
    kind: Literal["polynomial"] = "polynomial"
    initial: Positive | Auto = Field(description="Noise multiplier of epoch 0.")
    final: Positive | Auto = Field(description="Noise multiplier from epoch `period` on.")
    decay: Positive | Auto = Field(description="Power k in (initial - final) (1 - t/period)^k + final.")
    period: Count | Auto = Field(100, description="Epochs until the final value.")
    every: Count = Field(1, description="Epochs between two changes.")


Decay = Annotated[Uniform | TimeDecay | ExponentialDecay | StepDecay | PolynomialDecay, Field(discriminator="kind")]


class Part(Section):
    epochs: Count | None = Field(None, description="How long this part lasts; left out in the last one, to the end.")
    schedule: Decay = Field(description="Its noise; its clock starts at 0 where the part begins.")


class Piecewise(Section):
    """One schedule after the other: constant for 10 epochs, then exponential."""

    kind: Literal["piecewise"] = "piecewise"
    parts: Annotated[list[Part], Field(min_length=1)] = Field(description="In order.")

    @model_validator(mode="after")
    def _only_the_last_is_open(self) -> Piecewise:
        open_parts = [index for index, part in enumerate(self.parts[:-1]) if part.epochs is None]
        if open_parts or self.parts[-1].epochs is not None:
            at = open_parts[0] if open_parts else len(self.parts) - 1
            said = "missing: only the last part lasts to the end" if open_parts else "leave it out of the last part"
            raise ValueError(f"parts.{at}: epochs: {said}")
        return self


class Validation(Section):
    """Yu et al. 2019, IV-A1: less noise whenever the validation accuracy stops improving. Needs `data.validation`."""

    kind: Literal["validation"] = "validation"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    decay: Fraction = Field(description="k: the noise multiplier becomes k times itself.")
    threshold: NonNegative = Field(0.01, description="It does when accuracy improved by at most this since last time.")
    period: Count = Field(10, description="Validations between two looks.")
    average: Count = Field(1, description="m: the accuracy that is looked at is the mean of the last m validations.")
    every: Count = Field(1, description="Epochs between two validations.")

    @model_validator(mode="after")
    def _period_covers_the_average(self) -> Validation:
        if self.period < self.average:
            raise ValueError(f"period: is {self.period}, but must be at least average ({self.average})")
        return self


Schedule = Annotated[
    Uniform | TimeDecay | ExponentialDecay | StepDecay | PolynomialDecay | Piecewise | Validation,
    Field(discriminator="kind"),
]


class ConstantRate(Section):
    kind: Literal["constant"] = "constant"
    initial: Positive = Field(description="Step length in every epoch.")


class LinearRate(Section):
    kind: Literal["linear"] = "linear"
    initial: Positive = Field(description="Step length in epoch 0.")
    final: Positive = Field(description="Step length from epoch `epochs` on.")
    epochs: Count = Field(description="How many epochs the way takes.")


class StepRate(Section):
    kind: Literal["step"] = "step"
    initial: Positive = Field(description="Step length in epoch 0.")
    decay: Fraction = Field(description="k in initial * k^floor(t / period).")
    period: Count = Field(10, description="Epochs between two steps.")


class CosineRate(Section):
    kind: Literal["cosine"] = "cosine"
    initial: Positive = Field(description="Step length in epoch 0.")
    final: NonNegative = Field(0.0, description="Step length from epoch `epochs` on.")
    epochs: Count | None = Field(None, description="How many epochs the way takes; left out, the whole training.")


Rate = Annotated[ConstantRate | LinearRate | StepRate | CosineRate, Field(discriminator="kind")]
