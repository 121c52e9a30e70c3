"""`method.learning_rate` as a function of the epoch. It is public and fixed before training.

To add a kind: a class here, and its name in the union `Rate`; with `by_step`, if the rate changes from step to step, so
that `at` is asked for parts of an epoch. Updates are in `methods/dp_sgd/optimizers.py`; step lengths from theorems are
in `methods/`.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Count, Fraction, NonNegative, Positive, Section


class LinearRate(Section):
    kind: Literal["linear"] = "linear"
    initial: Positive = Field(description="Step length in epoch 0.")
    final: Positive = Field(description="Step length from epoch `epochs` on.")
    epochs: Count = Field(description="Epochs until the final step length is reached.")

    def at(self, epoch: float, length: int) -> float:
        """Return a rate that goes linearly from initial to final over `epochs` (Yu et al. 2019, V-B2)."""
        del length
        return self.initial + (self.final - self.initial) * min(1.0, epoch / self.epochs)


class StepRate(Section):
    kind: Literal["step"] = "step"
    initial: Positive = Field(description="Step length in epoch 0.")
    decay: Fraction = Field(description="k in initial * k^floor(t / period).")
    period: Count = Field(10, description="Epochs between two steps.")

    def at(self, epoch: float, length: int) -> float:
        """Return initial k^floor(t / period)."""
        del length
        return float(self.initial * self.decay ** int(epoch // self.period))


class CosineRate(Section):
    kind: Literal["cosine"] = "cosine"
    initial: Positive = Field(description="Step length in epoch 0.")
    final: NonNegative = Field(0.0, description="Step length from epoch `epochs` on.")
    epochs: Count | None = Field(None, description="Epochs until it is reached; left out, the whole training.")

    def at(self, epoch: float, length: int) -> float:
        """Return a half cosine from initial to final (Loshchilov and Hutter 2017, equation 5, without restarts)."""
        done = min(1.0, epoch / (self.epochs or length))
        return self.final + (self.initial - self.final) * (1 + math.cos(math.pi * done)) / 2


class WarmupRate(Section):
    """A rate that rises linearly from 0 to its peak, and then falls as a half cosine, from step to step."""

    by_step: ClassVar[bool] = True
    kind: Literal["warmup-cosine"] = "warmup-cosine"
    peak: Positive = Field(description="The greatest step length.")
    warmup: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="Share of the training that it rises for.")
    final: NonNegative = Field(0.0, description="Step length at the end.")

    def at(self, epoch: float, length: int) -> float:
        """Return the rate after `epoch` of `length` epochs, a fraction within an epoch."""
        done = min(1.0, epoch / length)
        if done < self.warmup:
            return self.peak * done / self.warmup
        rest = (done - self.warmup) / (1 - self.warmup)
        return self.final + (self.peak - self.final) * (1 + math.cos(math.pi * rest)) / 2


Rate = Annotated[LinearRate | StepRate | CosineRate | WarmupRate, Field(discriminator="kind")]


def rate_at(rate: Rate | float, epoch: float, length: int) -> float:
    """Return the step length of `epoch` (0, 1, ...) in a training of `length` epochs; a fraction is within an epoch.

    >>> rate_at(LinearRate(initial=0.1, final=0.05, epochs=10), 5, 60)
    0.07500000000000001
    """
    return rate.at(epoch, length) if isinstance(rate, Section) else float(rate)
