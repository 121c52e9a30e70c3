"""How a (noisy, mean-scaled) gradient moves the weights of all trials. Post-processing: reads no data.

Everything is (R, P); hyper-parameters that may differ between trials are (R, 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dpsgd_cli.recipe.schema.method import AdamSettings, Optimizer, SgdSettings


class Update(ABC):
    """An optimizer on flat weights. `state` tensors are (R, P) and go into checkpoints."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        """Change `values` in place; `step` counts from 0."""


class Sgd(Update):
    """values -= lr * buffer, with buffer = momentum * buffer + gradient."""

    def __init__(self, settings: SgdSettings, values: Tensor) -> None:
        super().__init__()
        self.momentum = settings.momentum
        if self.momentum:
            self.state["buffer"] = torch.zeros_like(values)

    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        del step
        if self.momentum:
            gradient = self.state["buffer"].mul_(self.momentum).add_(gradient)
        values.addcmul_(gradient, learning_rate, value=-1.0)


class Adam(Update):
    """Kingma and Ba (2015), Algorithm 1, with bias correction."""

    def __init__(self, settings: AdamSettings, values: Tensor) -> None:
        super().__init__()
        self.settings = settings
        self.state = {"first": torch.zeros_like(values), "second": torch.zeros_like(values)}

    def apply(self, values: Tensor, gradient: Tensor, learning_rate: Tensor, step: int) -> None:
        one, two = self.settings.betas
        first = self.state["first"].mul_(one).add_(gradient, alpha=1 - one)
        second = self.state["second"].mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (second / (1 - two ** (step + 1))).sqrt_().add_(self.settings.stability)
        values.addcmul_(first / root, learning_rate, value=-1.0 / (1 - one ** (step + 1)))


def make_update(settings: Optimizer, values: Tensor) -> Update:
    """The optimizer that a recipe names, with zeroed state."""
    return Adam(settings, values) if isinstance(settings, AdamSettings) else Sgd(settings, values)


class Ema:
    """Exponential moving average of the weights, (R, P): average = decay * average + (1 - decay) * weights.

    The decay of step t (from 0) is min(decay, (1 + t) / (10 + t)), so that early weights are forgotten.
    """

    def __init__(self, decay: float, values: Tensor) -> None:
        self.decay = decay
        self.average = values.clone()

    def add(self, values: Tensor, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        self.average.lerp_(values, 1 - decay)
