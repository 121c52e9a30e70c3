"""Noise of a step on the sums of a step: independent of that of other steps, or made of theirs, which is kept.

What is kept of past noise is as secret as the noise: who has it and the weights can take the noise away. It lives in
memory and in checkpoints, which their owner alone can read (`training/checkpoint.py`), and it is no release.

With a seed all of it is float64: noise that was rounded between two steps would not cancel.

On a grid. Without a seed the release of step t is y_t = m_t + w_t in integers, w_t = X_t - rint(b_t), with m_t =
rint(S_t / q_t) and X_t = floor(N_t 2^42) as in `engine/digits.py`, and b_t what is taken back of w_{t-1}, w_{t-2}, ...,
in steps q_t. Given what was released before, w_{t-j} = y_{t-j} - m_{t-j} is a function of data; so y_t = floor(N_t 2^42
+ M_t) with an integer M_t = m_t - rint(b_t): step by step a function of a Gaussian mechanism, whose centres a record
moves by what it moves C m by, and by rounding: 1 for m_t, sum |c_j| for the m_{t-j}, 1 for b_t, all in steps.
`Correlation.moved_by_rounding` has the sum, with what float64 loses of b_t (less than |c|_1 bands / 8 while |w| < 2^47,
which is beyond 30 standard deviations). What a tree takes back is a sum of earlier nodes, integers again. What is kept
are the w times their steps, in float64.

Not here: what a correlation is and the error it leaves (`noise/price.py`), what it costs
(`accounting/mechanism.py`), fresh normals (`noise.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.common.naming import named
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.price import Correlation, Toeplitz, Tree
from dpsgd_cli.noise.run import Grid, NoiseSource, put_on_grid


class StepNoise:
    """Independent noise."""

    def add(self, sums: Tensor, step: int, source: NoiseSource, scale: Tensor, grid: Grid | None) -> None:
        """sums += the noise of `step`, made of what `source` has for it; `scale` is the standard deviation of y."""
        source.add(sums, step, scale, grid)

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
    """Noise x with C x = y, y being `scale` times fresh normals (notation of `noise/price.py`).

    Guarantee: steps are added in order from 0, or from where `load_state` stands, each once; the noise of a step is a
    function of the fresh normals and scales of the steps so far, and of nothing else.
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
        """`step`, which must be the next one, counted from where noise starts anew."""
        if step != self._next:
            raise RuntimeError(f"noise of step {step} was asked for, but that of step {self._next} is next")
        self._next = step + 1
        return step if self._period is None else step % self._period

    _unit: Tensor | float
    """x of a step is `_unit` y, less what is taken back."""

    @abstractmethod
    def _taken_back(self, step: int) -> Tensor:
        """What x of `step`, counted from where noise starts anew, takes back of earlier noise."""

    @abstractmethod
    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        """Keep of x of `step`, `made`, what later steps take back; `back` is what this one took."""

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
        self._unit, self._later = 1 / table[:, :1], table[:, 1:] / table[:, :1]
        # x_{t-1}, x_{t-2}, ... in a ring: that of step t is at t mod its length
        self._past = torch.zeros(len(shapes), longest - 1, size, dtype=torch.float64, device=device)

    def _taken_back(self, step: int) -> Tensor:
        """sum_{j >= 1} w_j / w_0 x_{t-j}."""
        if step == 0:
            self._past.zero_()
        # column i of the ring holds the step (at - i) mod length back, or length where i is at itself
        turned = torch.roll(self._later.flip(1), step % max(1, self._past.shape[1]), dims=1)
        return torch.bmm(turned.unsqueeze(1), self._past).squeeze(1)

    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        del back
        if self._past.shape[1]:
            self._past[:, step % self._past.shape[1]] = made

    def _kept(self) -> dict[str, Tensor]:
        return {"past": self._past}


class TreeStepNoise(CorrelatedStepNoise):
    """The noise of a step is the node that its leaf completes, less the nodes that this one takes the place of."""

    def __init__(self, shapes: Sequence[Tree], size: int, device: torch.device) -> None:
        super().__init__(shapes[0].period)
        self._unit = shapes[0].levels ** 0.5
        self._nodes = torch.zeros(shapes[0].levels, len(shapes), size, dtype=torch.float64, device=device)

    def _taken_back(self, step: int) -> Tensor:
        """The sum of the nodes that the one of this step takes the place of."""
        if step == 0:
            self._nodes.zero_()
        return self._nodes[: _level(step)].sum(dim=0)

    def _keep(self, step: int, made: Tensor, back: Tensor) -> None:
        self._nodes[: _level(step)] = 0.0
        self._nodes[_level(step)] = made + back

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
