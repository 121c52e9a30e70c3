"""The state of an LSTM: all steps of a sequence as one call of one dense layer.

Step t has gates z_t = x_t + W h_{t-1} + b, where x_t comes from another layer. The gradient of z_t is that of both
parts. So one example's gradient for W is sum_t d_t h_{t-1}^T, with d_t the gradient of z_t: that of a dense
layer that was called with the sequence h_0, ..., h_{T-1}, and the rule of dense layers computes norm and clipped sum.

Steps forwards and backwards are those of torch's LSTM (input, forget, new and output gate, in this order). What does
not depend on the next step, as the derivatives of the gates, is computed for all steps at once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import CLOSED_FORM, Layer, Ruled
from dpsgd_cli.engine.layers.linear import Linear


class Unrolled(Linear):
    """Rule for the state of an LSTM without projection. Weight (R, 4 H, H), bias (R, 4 H)."""

    kinds = ()
    clipped = CLOSED_FORM
    holds_gradients = False
    rounds = True

    def forward(self, given: Tensor, h: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the states (N, T, H) and the last memory (N, H).

        Args:
            given: what the inputs add to the gates, (N, T, 4 H).
            h: first state, (N, H).
            memory: first memory, (N, H).
        """
        found: tuple[Tensor, Tensor] = _Steps.apply(given, h, memory, self.session.anchor, self)
        return found


class State(nn.Linear, Ruled):
    """A dense layer that `Unrolled` takes."""

    rule: ClassVar[type[Layer]] = Unrolled


class _Steps(torch.autograd.Function):
    """Autograd function of all steps, which passes the rule the states and the gradients of the gates."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, h: Tensor, memory: Tensor, anchor: Tensor, layer: Unrolled
    ) -> tuple[Tensor, Tensor]:
        of_inputs, first, second = (layer.unfold(x) for x in (given, h, memory))
        gates = _by_step(of_inputs)
        if layer.has_bias:
            gates += layer.values["bias"].unsqueeze(1)
        size = first.shape[-1]
        states, cells = (gates.new_empty(len(gates) + 1, *first.shape) for _ in range(2))
        states[0], cells[0] = first, second
        turned = layer.values["weight"].mT
        bent = torch.empty_like(cells[1:])
        every = (gates, gates[..., : 2 * size], *gates.split(size, dim=-1), states, states[1:], cells, cells[1:], bent)
        for now, shares, enter, keep, new, out, before, state, last, cell, tanh in zip(*_steps(*every), strict=False):
            _add_products(now, before, turned)
            shares.sigmoid_()
            new.tanh_()
            out.sigmoid_()
            torch.mul(keep, last, out=cell)
            torch.tanh(cell.addcmul_(enter, new), out=tanh)
            torch.mul(tanh, out, out=state)
        ctx.layer, ctx.kept = layer, (gates, cells, bent)
        if layer.session.recording:
            ctx.call = len(layer.inputs)
            layer.inputs.append(_by_example(states[:-1]))
            layer.gradients.append(None)
        return _by_example(states[1:]).flatten(0, 1), cells[-1].flatten(0, 1).clone()

    @staticmethod
    def backward(ctx: Any, of_states: Tensor, of_memory: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        layer: Unrolled = ctx.layer
        gates, cells, bent = ctx.kept
        weight, size = layer.values["weight"], cells.shape[-1]
        above, along = _by_step(layer.unfold(of_states)), layer.unfold(of_memory).clone()
        slopes, through = _slopes(gates, cells, bent)
        back = torch.zeros_like(along)
        three, fourth = slopes[..., : 3 * size].unflatten(-1, (3, size)), slopes[..., 3 * size :]
        every = (slopes, three, fourth, above, through, gates[..., size : 2 * size])
        for now, inner, last, own, slope, keep in zip(*(reversed(x) for x in _steps(*every)), strict=True):
            of_state = back.add_(own)
            along.addcmul_(of_state, slope)
            inner.mul_(along.unsqueeze(-2))
            last.mul_(of_state)
            along *= keep
            back = torch.matmul(now, weight)
        found = _by_example(slopes)
        if layer.session.recording:
            layer.gradients[ctx.call] = found
        return found.flatten(0, 1), back.flatten(0, 1), along.flatten(0, 1), None, None


def _steps(*every: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the views of single steps of each tensor (T, ...); made one by one, they take as long as their use."""
    return [x.unbind(0) for x in every]


def _by_step(x: Tensor) -> Tensor:
    """Return a copy (T, R, B, n) of `x` (R, B, T, n): a step's rows side by side, which is much faster to work on."""
    return x.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)


def _by_example(x: Tensor) -> Tensor:
    """Return a copy (R, B, T, n) of `x` (T, R, B, n)."""
    return x.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format)


def _add_products(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """Add rows (R, B, k) times matrix (R, k, n) to `total` (R, B, n), in place."""
    if len(total) == 1:
        total[0].addmm_(rows[0], matrix[0])
    else:
        total += torch.bmm(rows, matrix)


def _slopes(gates: Tensor, cells: Tensor, bent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of all steps, (T, R, B, 4 H) and (T, R, B, H).

    The first are of the memory by the input, forget and new gates before their functions, and of the state by the
    output gate; the second of the state by the memory, whose tanh is `bent`.
    """
    enter, keep, new, out = gates.split(cells.shape[-1], dim=-1)
    found = torch.empty_like(gates)
    of_enter, of_keep, of_new, of_out = found.split(cells.shape[-1], dim=-1)
    for slope, gate, other in ((of_enter, enter, new), (of_keep, keep, cells[:-1]), (of_out, out, bent)):
        torch.mul(torch.addcmul(gate, gate, gate, value=-1, out=slope), other, out=slope)
    torch.addcmul(enter, enter * new, new, value=-1, out=of_new)
    return found, torch.addcmul(out, out * bent, bent, value=-1)
