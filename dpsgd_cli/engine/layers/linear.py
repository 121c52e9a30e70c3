"""Dense layers: y = x W^T + b on the last axis, with or without sequence axes before it.

One row a and its output gradient d give the gradient d a^T, with squared norm |d|^2 |a|^2 (Goodfellow, 2015, "Efficient
per-example gradient computations"). A sequence of T rows gives sum_t d_t a_t^T. Its squared norm comes from the sum
over pairs of positions <a_t, a_s><d_t, d_s> (Gram form, T^2 (I + O) operations) or from the instantiated (O, I) matrix
(T I O operations), whichever is cheaper.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import (
    CLOSED_FORM,
    Each,
    Layer,
    Outer,
    Session,
    gram,
    gram_is_cheaper,
    gram_squares,
    instantiated_squares,
    raised,
)
from dpsgd_cli.engine.precision import SHORT, product


class Linear(Layer):
    """Rule for `torch.nn.Linear`. Weight (R, O, I), bias (R, O)."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    clipped = CLOSED_FORM
    holds_gradients = False
    rounds = True

    def __init__(self, source: nn.Linear, session: Session) -> None:
        super().__init__(source, session)
        self.has_bias = source.bias is not None
        self.outputs = source.out_features

    def item_axes(self, axes: int) -> tuple[int, bool]:
        return 1, True

    def compute(self, a: Tensor) -> Tensor:
        weight = self.values["weight"]
        if self.session.trials == 1:
            # of one trial alone: a batched product of one matrix is slower
            return F.linear(a[0], weight[0], self.values["bias"][0] if self.has_bias else None).unsqueeze(0)
        rows = a.reshape(a.shape[0], -1, a.shape[-1])
        if a.shape[0] == 1:
            y = (rows[0] @ weight.reshape(-1, a.shape[-1]).T).view(-1, self.session.trials, self.outputs)
            y = y.transpose(0, 1)
            y = y + self.values["bias"].unsqueeze(1) if self.has_bias else y
        else:
            y = torch.bmm(rows, weight.mT)
            y = y.add_(self.values["bias"].unsqueeze(1)) if self.has_bias else y
        return y.reshape(self.session.trials, *a.shape[1:-1], self.outputs)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        weight, rows = self.values["weight"], d.reshape(d.shape[0], -1, self.outputs)
        rows = rows[0] @ weight[0] if len(weight) == 1 else torch.bmm(rows, weight)
        return rows.reshape(d.shape[0], *a.shape[1:])

    def square_norms(self) -> Tensor:
        pairs, exact = self.stored(), self.session.exact
        short = any(SHORT in (a.dtype, d.dtype) for a, d in pairs)
        if len(pairs) == 1 and pairs[0][0].dim() == 3:
            a, d = pairs[0]
            squares = (_square(a, exact) + float(self.has_bias)) * _square(d, exact)
            return raised(squares, squares.sqrt()) if short else squares
        a, d = self._sequence(pairs)
        positions, inputs = a.shape[-2:]

        if gram_is_cheaper(positions, inputs, self.outputs):
            of_inputs, of_outputs = gram(a), gram(d)
            of_inputs = of_inputs + 1.0 if self.has_bias else of_inputs
            return gram_squares(of_inputs, of_outputs, max(inputs + 1, self.outputs), short)
        norms = product(d.transpose(-1, -2), a).square_().sum(dim=(-1, -2))
        norms = norms + _square(d.sum(dim=-2, dtype=exact), exact) if self.has_bias else norms
        sizes, of_outputs = (x.to(exact).square().sum(dim=(-1, -2)) for x in (a, d))
        of_inputs = sizes + positions * float(self.has_bias)
        return instantiated_squares(norms, of_inputs, of_outputs, short * positions)

    def _sequence(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Concatenate all calls as (R or 1, B, T, I) and (R, B, T, O), since they used the same weights."""
        if not pairs:
            raise RuntimeError("a layer without a recorded gradient was asked for one")
        inputs = [a.reshape(a.shape[0], a.shape[1], -1, a.shape[-1]) for a, _ in pairs]
        if len(pairs) == 1:
            d = pairs[0][1]
            return inputs[0], d.reshape(*d.shape[:2], -1, self.outputs)
        widest = max(a.shape[0] for a in inputs)
        stretched = [a.expand(widest, *a.shape[1:]) for a in inputs]
        return torch.cat(stretched, dim=2), torch.cat(
            [d.flatten(2, -2) if d.dim() > 3 else d.unsqueeze(2) for _, d in pairs], 2
        )

    def contributions(self, name: str) -> list[Outer | Each]:
        a, d = self._sequence(self.stored())
        return [Each(d.sum(dim=2, dtype=self.session.exact))] if name == "bias" else [Outer(d, a, self.outputs)]

    def add_clipped_sums(self, factors: Tensor) -> None:
        for a, d in self.stored():
            between = d.shape[2:-1].numel()
            rows = factors if between == 1 else factors.repeat_interleave(between, dim=1)
            self._add_rows(a.flatten(1, -2), d.flatten(1, -2), rows)

    def _add_rows(self, a: Tensor, d: Tensor, factors: Tensor) -> None:
        if a.shape[0] == 1 and self.session.trials > 1:
            scaled = (d * factors.unsqueeze(-1)).transpose(1, 2)
            both = product(scaled.reshape(-1, a.shape[1]), a[0])
            self.sums["weight"] += both.view(self.session.trials, self.outputs, -1)
        elif self.session.trials == 1:
            total, column = self.sums["weight"][0], factors[0].unsqueeze(-1)
            narrow = a.shape[-1] < d.shape[-1]
            total += product((d[0] if narrow else d[0] * column).T, a[0] * column if narrow else a[0])
        elif a.shape[-1] < d.shape[-1]:
            # not in place: as the rows of `sums` are not contiguous, trials would be added one by one
            self.sums["weight"].mT.add_(product((a * factors.unsqueeze(-1)).mT, d))
        else:
            self.sums["weight"].add_(product((d * factors.unsqueeze(-1)).mT, a))
        if self.has_bias:
            self.sums["bias"].add_(torch.bmm(factors.unsqueeze(1), d.to(factors.dtype)).squeeze(1))


def _square(x: Tensor, exact: torch.dtype) -> Tensor:
    """Return the squared L2 norm over the last axis, as `exact`, no less than the true one even if squares underflow.

    Underflow matters because norms are multiplied: a huge input times a tiny gradient need not be small.
    """
    squares = torch.linalg.vector_norm(x, dim=-1, dtype=exact).square_()
    # underflow hides at most the smallest normal number per term
    return squares.add_(x.shape[-1] * torch.finfo(exact).tiny)
