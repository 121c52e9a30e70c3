"""Weights that several layers share: one gradient, which is the sum of what all their calls contribute.

Let g_k be one example's gradient with respect to the weight from call k alone, over all calls of all layers that hold
it. The example's gradient is sum_k g_k, and

    |sum_k g_k|^2 = sum_k |g_k|^2 + 2 sum_{k<l} <g_k, g_l>.

Leaving out the cross terms would understate norms by up to a factor of the square root of the number of calls, so that
examples would pass their bound. Here each contribution is a list of outer products of rows u and columns v: (d_t, a_t)
in a dense layer, (one at token_t, d_t) in an embedding. All lists of a weight are one list, and the squared norm of its
sum is sum_{t,s} <u_t, u_s> <v_t, v_s>: all cross terms are among its terms. The product of rows of a token and of a
dense vector is that vector's entry at the token, so no table is made for an example. A weight that some layer does not
use in outer products has each example's own gradient instead.

The clipped sum is linear in contributions: each layer adds its own to the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsgd_cli.engine.layers.base import Each, Layer, Outer, added, gram_squares, raised
from dpsgd_cli.engine.precision import SHORT, product


@dataclass(frozen=True)
class Tied:
    """Layers that share weights: one clipping group. `shared` lists, for each weight, (layer, its own name there)."""

    members: Sequence[Layer]
    shared: Sequence[Sequence[tuple[Layer, str]]]

    @property
    def used(self) -> bool:
        """True if at least one recorded call took part in the loss."""
        return any(layer.used for layer in self.members)

    def square_norms(self) -> Tensor:
        """Return the squared L2 norm (R, B) of each example's gradient for all parameters of all members."""
        users = [[(layer, name) for layer, name in holders if layer.uses(name)] for holders in self.shared]
        if all(len(own) < 2 for own in users):
            # no weight has calls in two layers, so each layer's own rule counts all of its weights
            return added(layer.square_norms() for layer in self.members if layer.used)
        every = ([part for layer, name in own for part in layer.contributions(name)] for own in users if own)
        return added(_square(parts) for parts in every)

    def add_clipped_sums(self, factors: Tensor) -> None:
        """Add sum_b factors[r, b] * gradient[r, b] to the sums of all members."""
        for layer in self.members:
            if layer.used:
                layer.add_clipped_sums(factors)

    def forget(self) -> None:
        """Drop everything recorded."""
        for layer in self.members:
            layer.forget()

    def zero_nonfinite(self, bad: Tensor) -> None:
        """Zero the recorded rows of examples whose gradient is not finite; `bad` is bool (R, B)."""
        for layer in self.members:
            layer.zero_nonfinite(bad)


def _square(parts: list[Outer | Each]) -> Tensor:
    """Return the squared norm (R, B) of the sum of one example's contributions to a weight."""
    outer = [part for part in parts if isinstance(part, Outer)]
    short = any(SHORT in (part.rows.dtype, part.columns.dtype) for part in outer)
    if len(outer) == len(parts):
        columns = _gram([part.columns for part in outer])
        rows = _gram([part.rows for part in outer]).to(columns.dtype)
        return gram_squares(rows, columns, max(part.columns.shape[-1] for part in outer), short)
    total = added(part.gradient if isinstance(part, Each) else part.instantiated() for part in parts)
    squares = total.reshape(*total.shape[:2], -1).square().sum(dim=2)
    if not short:
        return squares
    return raised(squares, added(map(_sizes, outer)), sum(part.columns.shape[-2] for part in outer))


def _sizes(part: Outer) -> Tensor:
    """Return sum_t |rows_t| |columns_t|, shape (R, B); integer rows stand for unit vectors."""
    sizes = torch.linalg.vector_norm(part.columns, dim=-1, dtype=torch.float32)
    if part.rows.is_floating_point():
        sizes = sizes * torch.linalg.vector_norm(part.rows, dim=-1, dtype=torch.float32)
    return sizes.sum(dim=-1)


def _gram(vectors: list[Tensor]) -> Tensor:
    """Return the products (R, B, T, T) of all vectors of a list of (R or 1, B, T_k, n), or of tokens (R, B, T_k)."""
    widest = max(len(one) for one in vectors)
    vectors = [one.expand(widest, *one.shape[1:]) for one in vectors]
    blocks = [torch.cat([_products(one, other) for other in vectors], dim=-1) for one in vectors]
    return torch.cat(blocks, dim=-2)


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Return the products (R, B, T, S) of two lists of vectors, of which integers stand for unit vectors."""
    if one.is_floating_point() and other.is_floating_point():
        return product(one, other.transpose(-1, -2))
    if not one.is_floating_point() and not other.is_floating_point():
        return (one.unsqueeze(-1) == other.unsqueeze(-2)).float()
    if one.is_floating_point():
        return _products(other, one).transpose(-1, -2)
    # entry [t, s] is the entry of dense vector s at token t
    return other.gather(-1, one.unsqueeze(-2).expand(*other.shape[:-1], one.shape[-1])).transpose(-1, -2)
