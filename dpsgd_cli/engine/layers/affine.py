"""Learned scales and shifts: y = xhat * w + b of normalisation layers, where xhat mixes no examples, and y = x + v.

The normalisation itself has no parameters and is left to autograd. One example's gradient is the sum over positions of
d * xhat (scale) and of d (shift). It is as small as the parameters, so it is computed directly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import OWN_GRADIENTS, Instantiated, Session


class Affine(Instantiated):
    """Rule for LayerNorm, RMSNorm, GroupNorm and InstanceNorm without running statistics.

    Weight and bias are (R, *shape); shape is the normalised trailing shape or the channels (axis 1).
    """

    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    clipped = OWN_GRADIENTS
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        self.source = [source]  # in a list: its own parameters are not this module's
        self.trailing = isinstance(source, nn.LayerNorm | nn.RMSNorm)

    def item_axes(self, axes: int) -> tuple[int, bool]:
        return (self.values["weight"].dim() - 1, True) if self.trailing else (axes - 1, False)

    def prepare(self, x: Tensor) -> Tensor:
        source = self.source[0]
        if isinstance(source, nn.LayerNorm):
            return F.layer_norm(x, source.normalized_shape, eps=source.eps)
        if isinstance(source, nn.RMSNorm):
            return F.rms_norm(x, source.normalized_shape, eps=source.eps)
        if isinstance(source, nn.GroupNorm):
            return F.group_norm(x, source.num_groups, eps=source.eps)
        return F.instance_norm(x, eps=float(source.eps))  # type: ignore[arg-type]

    def _spread(self, values: Tensor, like: Tensor) -> Tensor:
        """Reshape (R, *shape) so that it broadcasts over (R, B, ...)."""
        shape = values.shape[1:]
        if self.trailing:
            middle = like.dim() - 2 - len(shape)
            return values.reshape(values.shape[0], 1, *[1] * middle, *shape)
        return values.reshape(values.shape[0], 1, *shape, *[1] * (like.dim() - 3))

    def compute(self, a: Tensor) -> Tensor:
        y = a * self._spread(self.values["weight"], a)
        return y + self._spread(self.values["bias"], a) if "bias" in self.values else y

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        return d * self._spread(self.values["weight"], d)

    def per_example(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for a, d in self.recorded():
            found["weight"] = self._reduce(a * d) + found.get("weight", 0.0)
            if "bias" in self.values:
                found["bias"] = self._reduce(d) + found.get("bias", 0.0)
        return found

    def _reduce(self, x: Tensor) -> Tensor:
        shape = self.values["weight"].shape[1:]
        if self.trailing:
            return x.reshape(x.shape[0], x.shape[1], -1, *shape).sum(dim=2)
        return x.flatten(3).sum(dim=3) if x.dim() > 3 else x


class Shift(nn.Module):
    """Layer that adds one learned tensor of `shape` to every example: y = x + value."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


class Offset(Instantiated):
    """Rule for `Shift` (learned positions and class tokens). Value (R, *shape), the shape of one example.

    One example's gradient is the gradient d of its output, summed over calls.
    """

    kinds = (Shift,)
    clipped = OWN_GRADIENTS
    holds_gradients = True
    rounds = True

    def item_axes(self, axes: int) -> tuple[int, bool]:
        return self.values["value"].dim() - 1, False

    def compute(self, a: Tensor) -> Tensor:
        return a + self.values["value"].unsqueeze(1)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        del a
        return d

    def per_example(self) -> dict[str, Tensor]:
        (_, total), *others = self.recorded()
        for _, d in others:
            total = total + d
        return {"value": total}
