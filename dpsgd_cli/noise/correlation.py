"""Noise of each step, independent or correlated between steps; correlated noise is computed from stored past noise.

The stored past noise is as secret as the noise: with it, anybody can remove the noise from the weights. It is kept in
memory and in checkpoints that only their owner can read (`training/checkpoint.py`), and it is never released.

With a seed all noise is float64: noise that was rounded between two steps would not cancel.

On a grid. Without a seed the release of step t is y_t = m_t + w_t in integers, with w_t = X_t - rint(b_t). Here
m_t = rint(S_t / q_t) and X_t = floor(N_t 2^42) as in `digits.py`, and b_t is the part of w_{t-1}, w_{t-2}, ... that is
taken back, in steps q_t. Given the earlier releases, w_{t-j} = y_{t-j} - m_{t-j} is a function of data. So
y_t = floor(N_t 2^42 + M_t) with an integer M_t = m_t - rint(b_t): step by step, a function of a Gaussian mechanism.
A record moves its centres by as much as it moves C m, and by rounding: 1 for m_t, sum |c_j| for the m_{t-j}, 1 for b_t,
all in steps. `Correlation.moved_by_rounding` computes this sum, including what float64 loses of b_t (less than
|c|_1 bands / 8 while |w| < 2^47, which is beyond 30 standard deviations). A tree takes back a sum of earlier nodes,
which are integers again. The stored numbers are the w times their steps, in float64.

`noise/price.py` defines correlations and computes their error; `accounting/mechanism.py` computes their price.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.common.plugins import named
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.price import Correlation, Toeplitz, Tree
from dpsgd_cli.noise.run import Grid, NoiseSource, put_on_grid


class StepNoise:
    """Noise that is independent between steps."""

    def add(self, sums: Tensor, step: int, source: NoiseSource, scale: Tensor, grid: Grid | None) -> None:
        """Add the noise of `step`, made from a draw of `source`, to `sums`; `scale` is the standard deviation of y."""
        source.add(sums, step, scale, grid)

    def fresh(self, step: int, made: Tensor) -> Tensor:
        """Return the y from which the noise `made` of `step` was computed: the inverse of `add`, for an observer.

        The observer needs a StepNoise of its own.
        """
        del step
        return made

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state that later steps need."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        del state


class CorrelatedStepNoise(StepNoise, ABC):
    """Noise x with C x = y, where y is `scale` times fresh normals (notation of `noise/price.py`).

    Guarantee: steps are added once each, in order from 0, or from the step that `load_state` restores. The noise of a
    step is a function of the fresh normals and scales of the steps so far, and of nothing else.
    """

    def __init__(self, period: int | None) -> None:
        self._period = period
        self._next = 0

    def add(self, sums: Tensor, step: int, source: NoiseSource, scale: Tensor, grid: Grid | None) -> None:
        within, fresh = self._within(step), source.draw(step)
        own, back = scale.to(torch.float64) * self._unit, self._taken_back(within)
        if fresh.is_floating_point():
            made = fresh * own - back
            sums += made
        elif grid is None:
            raise ValueError("noise without a seed needs the grid that it is released on")
        else:
            size = grid.steps(own)
            whole = grid.shortened(fresh) - torch.div(back, size).round_().to(torch.int64)
            put_on_grid(sums, whole, size)
            made = whole * size
        self._keep(within, made, back)

    def fresh(self, step: int, made: Tensor) -> Tensor:
        within = self._within(step)
        made, back = made.to(torch.float64), self._taken_back(within)
        self._keep(within, made, back)
        return (made + back) / self._unit

    def _within(self, step: int) -> int:
        """Return `step` counted from the start of its period; raise RuntimeError if it is not the next step."""
        if step != self._next:
            raise RuntimeError(f"noise of step {step} was asked for, but that of step {self._next} is next")
        self._next = step + 1
        return step if self._period is None else step % self._period

    _unit: Tensor | float
    """x of a step is `_unit` y minus `_taken_back`."""

    @abstractmethod
    def _taken_back(self, step: int) -> Tensor:
        """Return the earlier noise that `step`, counted from the start of its period, takes back."""

    @abstractmethod
    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        """Store what later steps take back of `made`, the noise x of `step`; `back` is what `step` took back."""

    @abstractmethod
    def _kept(self) -> dict[str, Tensor]:
        """Return the stored past noise, by name."""

    def state(self) -> dict[str, Tensor]:
        return {"next": torch.tensor(self._next), **{name: own.clone() for name, own in self._kept().items()}}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._next = int(state["next"])
        for name, own in self._kept().items():
            own.copy_(state[name])


class ToeplitzStepNoise(CorrelatedStepNoise):
    """Toeplitz noise x_t = (y_t - sum_{j >= 1} w_j x_{t-j}) / w_0, x = 0 before the start; each trial has its own w."""

    def __init__(self, shapes: Sequence[Toeplitz], size: int, device: torch.device) -> None:
        super().__init__(shapes[0].period)
        longest = max(shape.bands for shape in shapes)
        weights = [[*shape.weights, *[0.0] * (longest - shape.bands)] for shape in shapes]
        table = torch.tensor(weights, dtype=torch.float64, device=device)
        self._unit, self._later = 1 / table[:, :1], table[:, 1:] / table[:, :1]
        # x_{t-1}, x_{t-2}, ... in a ring: that of step t is at t mod its length
        self._past = torch.zeros(len(shapes), longest - 1, size, dtype=torch.float64, device=device)

    def _taken_back(self, step: int) -> Tensor:
        """Return sum_{j >= 1} w_j / w_0 x_{t-j}."""
        if step == 0:
            self._past.zero_()
        # with at = step mod length, column i of the ring is (at - i) mod length steps back, or length if i = at
        turned = torch.roll(self._later.flip(1), step % max(1, self._past.shape[1]), dims=1)
        return torch.bmm(turned.unsqueeze(1), self._past).squeeze(1)

    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        del back
        if self._past.shape[1]:
            self._past[:, step % self._past.shape[1]] = made

    def _kept(self) -> dict[str, Tensor]:
        return {"past": self._past}


class TreeStepNoise(CorrelatedStepNoise):
    """Tree noise: the noise of a step is the node that its leaf completes minus the nodes that this node replaces."""

    def __init__(self, shapes: Sequence[Tree], size: int, device: torch.device) -> None:
        super().__init__(shapes[0].period)
        self._unit = shapes[0].levels ** 0.5
        self._nodes = torch.zeros(shapes[0].levels, len(shapes), size, dtype=torch.float64, device=device)

    def _taken_back(self, step: int) -> Tensor:
        """Return the sum of the nodes that the node of this step replaces."""
        if step == 0:
            self._nodes.zero_()
        return self._nodes[: _level(step)].sum(dim=0)

    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        self._nodes[: _level(step)] = 0.0
        self._nodes[_level(step)] = made + back

    def _kept(self) -> dict[str, Tensor]:
        return {"nodes": self._nodes}


def _level(step: int) -> int:
    """Return the level of the node that leaf `step` completes.

    Leaves 0..step form one node for each binary digit 1 of step + 1; the last of those digits is that node.
    """
    return (step & ~(step + 1)).bit_length()


def step_noise(shapes: Sequence[Correlation | None], size: int, device: torch.device) -> StepNoise:
    """Return the StepNoise for sums (R, `size`) of trials with correlations `shapes` (None: independent noise).

    Raises PrivacyError unless all trials have one kind of correlation.
    """
    kept = [shape for shape in shapes if shape is not None]
    if not kept:
        return StepNoise()
    alike = {(type(shape), shape.period) for shape in shapes if shape is not None}
    if len(kept) < len(shapes) or len(alike) > 1:
        raise PrivacyError("trials that train together share one kind of privacy.noise")
    made: Any = named(kept[0].drawn)(kept, size, device)
    assert isinstance(made, StepNoise)
    return made
