"""Optimizers, projection to a ball and averages of iterates: from a noisy mean gradient to the published weights.

All of it is post-processing and reads no data. Tensors are (R, P); hyper-parameters that may differ between trials are
(R, 1). Learning-rate schedules are in `schedules/learning_rate.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.common.plugins import named
from dpsgd_cli.common.text_format import similar
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.dp_sgd.settings import (
    AdamSettings,
    AdamWSettings,
    AllIterates,
    Averaging,
    EmaSettings,
    Optimizer,
    ParameterGroup,
    SgdSettings,
    TailIterates,
)


class Update(ABC):
    """An optimizer on flat weights. `state` tensors are (R, P) and are stored in checkpoints."""

    decays: Tensor | float = 1.0
    """Factor on weight decay, (P,), by group of parameters."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        """Apply one step to `values` in place; `step` counts from 0."""


class SgdUpdate(Update):
    """SGD: values -= lr * buffer, with buffer = momentum * buffer + gradient."""

    def __init__(self, settings: SgdSettings, values: Tensor) -> None:
        super().__init__()
        self.momentum = settings.momentum_value
        if self.momentum:
            self.state["buffer"] = torch.zeros_like(values)

    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        del step
        if self.momentum:
            gradient = self.state["buffer"].mul_(self.momentum).add_(gradient)
        values.addcmul_(gradient, learning_rate, value=-1.0)


class AdamUpdate(Update):
    """Adam with bias correction (Kingma and Ba 2015, Algorithm 1); AdamW (Loshchilov and Hutter 2019, Algorithm 2)."""

    def __init__(self, settings: AdamSettings, values: Tensor) -> None:
        super().__init__()
        self.settings = settings
        self.state = {"first": torch.zeros_like(values), "second": torch.zeros_like(values)}

    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        one, two = self.settings.betas
        first = self.state["first"].mul_(one).add_(gradient, alpha=1 - one)
        second = self.state["second"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        if isinstance(self.settings, AdamWSettings):
            values.mul_(1 - learning_rate * self.settings.decay * self.decays)
        root = (second / (1 - two ** (step + 1))).sqrt_().add_(self.settings.stability)
        values.addcmul_(first / root, learning_rate, value=-1.0 / (1 - one ** (step + 1)))


def factors_of(groups: Sequence[ParameterGroup], pack: Pack) -> tuple[Tensor, Tensor] | None:
    """Return factors (P,) on the learning rate and on the decay of each weight; None without groups.

    Raises RecipeError for a group whose pattern fits no parameter.
    """
    if not groups:
        return None
    rates, decays = torch.ones_like(pack.values[0]), torch.ones_like(pack.values[0])
    taken: set[str] = set()
    for group in groups:
        found = [name for name in pack.spans if fnmatch(name, group.names)]
        if not found:
            near = similar(group.names, list(pack.spans))
            hint = f"; did you mean {near}?" if near else f"; names are like {next(iter(pack.spans))}"
            raise RecipeError(f"method.groups: {group.names} fits no trained parameter{hint}")
        for name in found:
            at, shape = pack.spans[name]
            if name not in taken:
                rates[at : at + shape.numel()] = group.rate
                decays[at : at + shape.numel()] = group.decay
        taken |= {*found}
    return rates, decays


def make_update(settings: Optimizer, values: Tensor) -> Update:
    """Return the optimizer that a recipe names, with zero state."""
    update: Update = named(settings.made)(settings, values)
    return update


def project_to_ball(values: Tensor, radii: Tensor) -> Tensor:
    """Scale each row of `values` (R, P) in place to norm at most `radii` (R, 1) > 0, inf for no constraint.

    Guarantee: the result is the nearest point of the ball, to rounding. Source: Lecture 9, section 4.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return values.mul_((radii / norms).clamp_(max=1.0).nan_to_num_(nan=1.0))


class Average:
    """A running average (R, P) of iterates, which starts at the initial weights and takes each iterate once, in order.

    `share(step)` is the weight of the iterate of a step in the average. With `starts`, the iterate of a step is the
    weights at its start, which are stored in `previous`.
    """

    def __init__(self, values: Tensor, share: Callable[[int], Any], starts: bool = False) -> None:
        self.average = values.clone()
        self.previous = values.clone() if starts else None
        self._share = share

    def add(self, values: Tensor, step: int) -> None:
        """Add the weights (R, P) after step `step` (0, 1, ...) to the average."""
        self.average.lerp_(values if self.previous is None else self.previous, self._share(step))
        if self.previous is not None:
            self.previous.copy_(values)


def make_average(settings: Averaging | None, values: Tensor, steps: Sequence[int]) -> Average | None:
    """Return the average that a recipe names, for trials of `steps` steps; None for the last iterate.

    ema    Exponential moving average: average = d average + (1 - d) weights. The d of step t (from 0) is min(decay,
           (1 + t) / (10 + t)), so that early weights are forgotten.
    all    Mean of the weights at the start of each step, w_0 to w_(T-1), as in the lectures.
    tail   Mean of the weights after each of the last `fraction` of a trial's steps; before these, the latest weights.
    """
    if settings is None:
        return None
    if isinstance(settings, EmaSettings):
        decay = settings.decay
        return Average(values, lambda step: 1 - min(decay, (1 + step) / (10 + step)))
    if isinstance(settings, AllIterates):
        return Average(values, lambda step: 1 / (step + 1), starts=True)
    if not isinstance(settings, TailIterates):
        raise TypeError(f"nothing here averages by {type(settings).__name__}")
    listed = [max(0, own - max(1, math.ceil(settings.fraction * own))) for own in steps]
    first = torch.tensor(listed, dtype=values.dtype, device=values.device).unsqueeze(1)
    return Average(values, lambda step: 1 / (step - first + 1).clamp_min(1.0))
