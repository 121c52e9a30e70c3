"""Noise of each step, independent or correlated between steps; correlated noise is computed from stored past noise.

The stored past noise is as secret as the noise: with it, anybody can remove the noise from the weights. It is kept in
memory and in checkpoints that only their owner can read (`training/checkpoint.py`), and it is never released.

With a seed all noise is float64: noise that was rounded between two steps would not cancel.

On a grid. Without a seed the release of step t is y_t = m_t + w_t in integers, with w_t = X_t - rint(b_t). Here m_t =
rint(S_t / q_t) and X_t = floor(N_t 2^42) as in `digits.py`, and b_t is the part of w_{t-1}, w_{t-2}, ... that is taken
back, in steps q_t. Given the earlier releases, w_{t-j} = y_{t-j} - m_{t-j} is a function of data. So y_t = floor(N_t
2^42 + M_t) with an integer M_t = m_t - rint(b_t): step by step, a function of a Gaussian mechanism. A record moves its
centres by as much as it moves C m, and by rounding: 1 for m_t, sum |c_j| for the m_{t-j}, 1 for b_t, all in steps,
where c_0 = 1. `NoiseStrategy.moved_by_rounding` computes this sum, with what float64 loses of b_t. While |w| is below
2^47, which is beyond 30 standard deviations, a sum of k products loses less than k 2^-5, which C multiplies by at most
|c|_1. The stored numbers are the w times their steps, in float64.

`noise/price.py` defines strategies and their charges; `accounting/mechanism.py` proves the price.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpsgd_cli.engine.tensors import to_host
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.price import NoiseStrategy
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


class CorrelatedStepNoise(StepNoise):
    """Noise x_t = |c| y_t - b_t of a `NoiseStrategy` for each trial, where y is `scale` times fresh normals.

    Guarantee: steps are added once each, in order from 0, or from the step that `load_state` restores. The noise of a
    step is a function of the fresh normals and scales of the steps so far, and of nothing else. b - 1 vectors are kept.
    """

    def __init__(self, shapes: Sequence[NoiseStrategy], size: int, device: torch.device) -> None:
        self._next = 0
        longest = max(len(shape.taken) for shape in shapes)
        padded = [[*shape.taken, *[0.0] * (longest - len(shape.taken))] for shape in shapes]
        self._unit = torch.tensor([[shape.norm] for shape in shapes], dtype=torch.float64, device=device)
        """|c| (R, 1)"""
        self._taken = torch.tensor(padded, dtype=torch.float64, device=device)
        # x_{t-1}, x_{t-2}, ... in a ring: that of step t is at t mod its length
        self._past = torch.zeros(len(shapes), longest, size, dtype=torch.float64, device=device)

    def add(self, sums: Tensor, step: int, source: NoiseSource, scale: Tensor, grid: Grid | None) -> None:
        self._begin(step)
        fresh = source.draw(step)
        own, back = scale.to(torch.float64) * self._unit, self._taken_back(step)
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
        self._keep(step, made)

    def fresh(self, step: int, made: Tensor) -> Tensor:
        self._begin(step)
        made, back = made.to(torch.float64), self._taken_back(step)
        self._keep(step, made)
        return (made + back) / self._unit

    def _begin(self, step: int) -> None:
        """Raise RuntimeError if `step` is not the next one."""
        if step != self._next:
            raise RuntimeError(f"noise of step {step} was asked for, but that of step {self._next} is next")
        self._next = step + 1

    def _taken_back(self, step: int) -> Tensor:
        """Return b of `step`, shape (R, P)."""
        length = max(1, self._past.shape[1])
        # with at = step mod length, column i of the ring is (at - i) mod length steps back, or length if i = at
        turned = torch.roll(self._taken.flip(1), step % length, dims=1)
        return torch.bmm(turned.unsqueeze(1), self._past).squeeze(1)

    def _keep(self, step: int, made: Tensor) -> None:
        """Store `made`, the noise x of `step`, of which later steps take some back."""
        if self._past.shape[1]:
            self._past[:, step % self._past.shape[1]] = made

    def state(self) -> dict[str, Tensor]:
        return {"next": torch.tensor(self._next), "past": to_host(self._past)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._next = int(state["next"])
        self._past.copy_(state["past"])


def step_noise(shapes: Sequence[NoiseStrategy | None], size: int, device: torch.device) -> StepNoise:
    """Return the StepNoise for sums (R, `size`) of trials with strategies `shapes` (None: independent noise).

    Raises PrivacyError unless all trials have a strategy, or none has.
    """
    kept = [shape for shape in shapes if shape is not None]
    if not kept:
        return StepNoise()
    if len(kept) < len(shapes):
        raise PrivacyError("trials that train together share one kind of privacy.noise")
    return CorrelatedStepNoise(kept, size, device)
