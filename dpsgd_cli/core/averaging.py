"""Which weights a method publishes: the last iterate, or an average of iterates. Post-processing: reads no data.

Every average starts as the initial weights and sees each iterate once, in order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from dpsgd_cli.core.updates import Ema
from dpsgd_cli.recipe.schema.method import AllIterates, Averaging, EmaSettings


class Average(ABC):
    """A running average (R, P) of iterates."""

    average: Tensor

    @abstractmethod
    def add(self, values: Tensor, step: int) -> None:
        """Take in the weights (R, P) after step `step` (0, 1, ...)."""


class StartAverage(Average):
    """Mean of the weights that the steps started from, w_0 to w_(T-1): the lectures' output."""

    def __init__(self, values: Tensor) -> None:
        self.average = values.clone()
        self.previous = values.clone()

    def add(self, values: Tensor, step: int) -> None:
        self.average.lerp_(self.previous, 1.0 / (step + 1))
        self.previous.copy_(values)


class TailAverage(Average):
    """Mean of the weights after steps `first` (R, 1), first + 1, ...; until then, the latest."""

    def __init__(self, values: Tensor, first: Tensor) -> None:
        self.first = first
        self.average = values.clone()

    def add(self, values: Tensor, step: int) -> None:
        self.average.lerp_(values, 1.0 / (step - self.first + 1).clamp_min(1.0))


def first_of_tail(fraction: float, steps: int) -> int:
    """Number of the first step whose iterate counts when the last `fraction` of `steps` are averaged.

    >>> first_of_tail(0.5, 100), first_of_tail(1.0, 100), first_of_tail(0.01, 3)
    (50, 0, 2)
    """
    return max(0, steps - max(1, math.ceil(fraction * steps)))


def make_average(settings: Averaging | None, values: Tensor, steps: Sequence[int]) -> Average | Ema | None:
    """The average that a recipe names, over a training of `steps` steps of each trial; None for the last iterate."""
    if settings is None:
        return None
    if isinstance(settings, EmaSettings):
        return Ema(settings.decay, values)
    if isinstance(settings, AllIterates):
        return StartAverage(values)
    first = [first_of_tail(settings.fraction, own) for own in steps]
    return TailAverage(values, torch.tensor(first, dtype=values.dtype, device=values.device).unsqueeze(1))


__all__ = ["Average", "Ema", "StartAverage", "TailAverage", "first_of_tail", "make_average"]
