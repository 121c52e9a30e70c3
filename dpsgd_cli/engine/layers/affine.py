"""Learned scales and shifts: y = xhat * w + b of normalisation layers, where xhat mixes no examples.

The normalisation itself has no parameters and is left to autograd, but for layer normalisation: PyTorch's own operation
does both at once, and xhat is computed again from its input. One example's gradient is the sum over
positions of d * xhat (scale) and of d (shift). It is as small as the parameters, so it is computed directly.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import OWN_GRADIENTS, Instantiated, Session, stacked


class Affine(Instantiated):
    """Rule for RMSNorm, GroupNorm, InstanceNorm without running statistics, and batch normalisation by stored ones.

    Weight and bias are (R, *shape); shape is the normalised trailing shape or the channels (axis 1).
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (
        nn.RMSNorm,
        nn.GroupNorm,
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
    )
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
        if isinstance(source, nn.RMSNorm):
            return F.rms_norm(x, source.normalized_shape, eps=source.eps)
        if isinstance(source, nn.GroupNorm):
            return F.group_norm(x, source.num_groups, eps=source.eps)
        if isinstance(source, nn.modules.batchnorm._BatchNorm):  # in eval mode: others are refused
            return F.batch_norm(x, source.running_mean, source.running_var, eps=source.eps)
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
            self._add_gradients(found, a, d)
        return found

    def reduce(self, call: int) -> None:
        if self.session.copies > 1:
            return  # of which the rows are not told apart within a pass
        ((a, d),) = self.of_call(call)
        self._kept = self._kept or {}
        self._add_gradients(self._kept, a, d)
        self.inputs[call] = self.gradients[call] = d.new_empty(*d.shape[:2], 0)

    def _add_gradients(self, found: dict[str, Tensor], a: Tensor, d: Tensor) -> None:
        found["weight"] = self._reduce(a * d) + found.get("weight", 0.0)
        if "bias" in self.values:
            found["bias"] = self._reduce(d) + found.get("bias", 0.0)

    def _reduce(self, x: Tensor) -> Tensor:
        shape = self.values["weight"].shape[1:]
        if self.trailing:
            return x.reshape(x.shape[0], x.shape[1], -1, *shape).sum(dim=2)
        return x.flatten(3).sum(dim=3) if x.dim() > 3 else x


class Normalised(Affine):
    """Rule for LayerNorm. `moments` are mean and 1 / deviation of each recorded call, (R, B, ..., 1)."""

    kinds = (nn.LayerNorm,)
    clipped = OWN_GRADIENTS
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.LayerNorm, session: Session) -> None:
        super().__init__(source, session)
        self.shape, self.least = source.normalized_shape, source.eps
        self.moments: list[tuple[Tensor, Tensor]] = []

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def _parameters_of(self, trial: int) -> tuple[Tensor, Tensor | None]:
        return self.values["weight"][trial], self.values["bias"][trial] if "bias" in self.values else None

    def compute(self, a: Tensor) -> Tensor:
        if not self.one_by_one(a):
            y, *moments = torch.native_layer_norm(a, self.shape, None, None, self.least)
            if self.session.recording:
                self.moments.append((moments[0], moments[1]))
            return super().compute(y)
        every = [
            torch.native_layer_norm(a[min(r, len(a) - 1)], self.shape, *self._parameters_of(r), self.least)
            for r in range(self.session.trials)
        ]
        y, mean, inverse = map(stacked, zip(*every, strict=True))
        if self.session.recording:
            self.moments.append((mean, inverse))
        return y

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        call = next(number for number, own in enumerate(self.inputs) if own is a)
        mean, inverse = self.moments[call]
        if not self.one_by_one(d):
            of_normal = super().input_gradient(a, d)
            a, mean, inverse = (x.expand(len(d), *x.shape[1:]) for x in (a, mean, inverse))
            return torch.ops.aten.native_layer_norm_backward(
                of_normal, a, self.shape, mean, inverse, None, None, [True, False, False]
            )[0]
        found = [
            torch.ops.aten.native_layer_norm_backward(
                d[r], a[min(r, len(a) - 1)], self.shape, mean[r], inverse[r], *self._parameters_of(r),
                [True, False, False],
            )[0]
            for r in range(self.session.trials)
        ]  # fmt: skip
        return stacked(found)

    def of_call(self, call: int) -> list[tuple[Tensor, Tensor]]:
        """Return xhat instead of the input."""
        a, d = self.inputs[call], self.gradients[call]
        assert d is not None
        exact = self.session.exact
        normal = torch.native_layer_norm(a.to(exact), self.shape, None, None, self.least)[0]
        return list(zip(self.by_copy(normal), self.by_copy(d.to(exact)), strict=True))

    def forget(self) -> None:
        super().forget()
        self.moments.clear()
