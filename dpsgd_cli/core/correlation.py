"""Noise of a step on the sums of a step: independent of that of other steps, or made of theirs, which is kept.

What is kept of past noise is as secret as the noise: who has it and the weights can take the noise away. It lives in
memory and in checkpoints, which their owner alone can read (`results/checkpoint.py`), and it is no release.

All of it is float64: noise that was rounded between two steps would not cancel, and low bits of secure noise must not
show. Not here: what a correlation is and the error it leaves (`privacy/correlation.py`), what it costs
(`privacy/mechanism.py`), fresh normals (`noise.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.noise import add_noise
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.privacy.correlation import Correlation, Toeplitz, Tree
from dpsgd_cli.recipe.naming import named


class StepNoise:
    """Independent noise."""

    def add(self, sums: Tensor, step: int, fresh: Tensor, scale: Tensor) -> None:
        """sums += the noise of `step`; `fresh` are its standard normals (R, P), `scale` the standard deviation of y."""
        del step
        add_noise(sums, fresh, scale)

    def fresh(self, step: int, made: Tensor) -> Tensor:
        """The y that the noise `made` of `step` came from: the inverse of `add`, for who looks on with its own copy."""
        del step
        return made

    def state(self) -> dict[str, Tensor]:
        """What later steps need of earlier ones, as a copy."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state`."""
        del state


class CorrelatedStepNoise(StepNoise, ABC):
    """Noise x with C x = y, y being `scale` times fresh normals (notation of `privacy/correlation.py`).

    Guarantee: steps are added in order from 0, or from where `load_state` stands, each once; the noise of a step is a
    function of the fresh normals and scales of the steps so far, and of nothing else.
    """

    def __init__(self, period: int | None) -> None:
        self._period = period
        self._next = 0

    def add(self, sums: Tensor, step: int, fresh: Tensor, scale: Tensor) -> None:
        own = fresh.to(torch.float64) * scale.to(torch.float64)
        sums += self._made(self._within(step), own)

    def fresh(self, step: int, made: Tensor) -> Tensor:
        return self._fresh(self._within(step), made.to(torch.float64))

    def _within(self, step: int) -> int:
        """`step`, which must be the next one, counted from where noise starts anew."""
        if step != self._next:
            raise RuntimeError(f"noise of step {step} was asked for, but that of step {self._next} is next")
        self._next = step + 1
        return step if self._period is None else step % self._period

    @abstractmethod
    def _made(self, step: int, own: Tensor) -> Tensor:
        """x of `step`, counted from where noise starts anew, given its y."""

    @abstractmethod
    def _fresh(self, step: int, made: Tensor) -> Tensor:
        """y of `step` given its x."""

    @abstractmethod
    def _kept(self) -> dict[str, Tensor]:
        """Past noise."""

    def state(self) -> dict[str, Tensor]:
        return {"next": torch.tensor(self._next), **{name: own.clone() for name, own in self._kept().items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._next = int(state["next"])
        for name, own in self._kept().items():
            own.copy_(state[name])


class ToeplitzStepNoise(CorrelatedStepNoise):
    """x_t = (y_t - sum_{j >= 1} w_j x_{t-j}) / w_0, and x before the start is 0; each trial has weights of its own."""

    def __init__(self, shapes: Sequence[Toeplitz], size: int, device: torch.device) -> None:
        super().__init__(shapes[0].period)
        longest = max(shape.bands for shape in shapes)
        weights = [[*shape.weights, *[0.0] * (longest - shape.bands)] for shape in shapes]
        table = torch.tensor(weights, dtype=torch.float64, device=device)
        self._first, self._later = table[:, :1], table[:, 1:]
        # x_{t-1}, x_{t-2}, ... in a ring: that of step t is at t mod its length
        self._past = torch.zeros(len(shapes), longest - 1, size, dtype=torch.float64, device=device)

    def _made(self, step: int, own: Tensor) -> Tensor:
        made = (own - self._taken_back(step)) / self._first
        self._keep(step, made)
        return made

    def _fresh(self, step: int, made: Tensor) -> Tensor:
        own = made * self._first + self._taken_back(step)
        self._keep(step, made)
        return own

    def _taken_back(self, step: int) -> Tensor:
        """sum_{j >= 1} w_j x_{t-j}."""
        if step == 0:
            self._past.zero_()
        # column i of the ring holds the step (at - i) mod length back, or length where i is at itself
        turned = torch.roll(self._later.flip(1), step % max(1, self._past.shape[1]), dims=1)
        return torch.bmm(turned.unsqueeze(1), self._past).squeeze(1)

    def _keep(self, step: int, made: Tensor) -> None:
        if self._past.shape[1]:
            self._past[:, step % self._past.shape[1]] = made

    def _kept(self) -> dict[str, Tensor]:
        return {"past": self._past}


class TreeStepNoise(CorrelatedStepNoise):
    """The noise of a step is the node that its leaf completes, less the nodes that this one takes the place of."""

    def __init__(self, shapes: Sequence[Tree], size: int, device: torch.device) -> None:
        super().__init__(shapes[0].period)
        self._root = shapes[0].levels ** 0.5
        self._nodes = torch.zeros(shapes[0].levels, len(shapes), size, dtype=torch.float64, device=device)

    def _made(self, step: int, own: Tensor) -> Tensor:
        node = own * self._root
        made = node - self._replaced(step)
        self._nodes[_level(step)] = node
        return made

    def _fresh(self, step: int, made: Tensor) -> Tensor:
        node = made + self._replaced(step)
        self._nodes[_level(step)] = node
        return node / self._root

    def _replaced(self, step: int) -> Tensor:
        """The sum of the nodes that the one of this step takes the place of, which are no more."""
        if step == 0:
            self._nodes.zero_()
        found = self._nodes[: _level(step)].sum(dim=0)
        self._nodes[: _level(step)] = 0.0
        return found

    def _kept(self) -> dict[str, Tensor]:
        return {"nodes": self._nodes}


def _level(step: int) -> int:
    """Of the node that leaf `step` completes: leaves 0..step are one node for each binary digit 1 of step + 1, and the
    last of those digits is that node."""
    return (step & ~(step + 1)).bit_length()


def step_noise(shapes: Sequence[Correlation | None], size: int, device: torch.device) -> StepNoise:
    """What adds noise to the sums (R, `size`) of trials of these correlations (None: independent), all of one kind."""
    kept = [shape for shape in shapes if shape is not None]
    if not kept:
        return StepNoise()
    alike = {(type(shape), shape.period) for shape in shapes if shape is not None}
    if len(kept) < len(shapes) or len(alike) > 1:
        raise PrivacyError("trials that train together share one kind of privacy.noise")
    made: Any = named(kept[0].drawn)(kept, size, device)
    assert isinstance(made, StepNoise)
    return made
