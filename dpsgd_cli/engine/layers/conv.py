"""Convolutions in one and two dimensions.

With U the (K, L) matrix of input patches (K = channels x kernel, L = output positions) and d the (O, L) gradient of the
output, one example's gradient is d U^T. Its squared norm comes from the Gram form <U^T U, d^T d> (L^2 (K + O)
operations) or from the instantiated (O, K) matrix (L K O operations), whichever is cheaper. The clipped sum is
PyTorch's weight gradient with rescaled d. If the matrices were instantiated and are no larger than the patches, it is
their weighted sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import (
    EITHER,
    Layer,
    Session,
    added,
    aligned,
    gram,
    gram_is_cheaper,
    gram_squares,
    instantiated_squares,
    stacked,
)
from dpsgd_cli.engine.precision import SHORT, product

# Patches are copied for a few rows at a time. A copy that fits a core's cache is several times cheaper than a larger
# one. A GPU needs work for all its processors, and 256 MiB are little of its memory.
_PATCH_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
LARGE = 1 << 28
"""Multiplications of one trial's convolution from which a GPU computes each trial's alone.

There, one convolution with a group for each trial is slower than one for each trial, if they are large: on an H100,
five trials of a CNN with 1,024 images took 6.8 times as long as one.
"""


class Conv(Layer):
    """Rule for Conv1d and Conv2d with zero padding. Weight (R, O, C / groups, *kernel), bias (R, O)."""

    kinds = (nn.Conv1d, nn.Conv2d)
    clipped = EITHER
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.Conv1d | nn.Conv2d, session: Session) -> None:
        super().__init__(source, session)
        self.has_bias = source.bias is not None
        self.stride, self.dilation, self.groups = source.stride, source.dilation, source.groups
        self.padding: tuple[int, ...] = tuple(source.padding)  # type: ignore[arg-type]
        self.kernel: tuple[int, ...] = source.kernel_size
        self.outputs = source.out_channels
        self.kept: Tensor | None = None
        self.shifts: Tensor | None = None

    @classmethod
    def accepts(cls, source: nn.Module) -> bool:
        plain = getattr(source, "padding_mode", "") == "zeros" and not isinstance(getattr(source, "padding", ""), str)
        return super().accepts(source) and plain

    def forget(self) -> None:
        super().forget()
        self.kept = self.shifts = None

    def item_axes(self, axes: int) -> tuple[int, bool]:
        return 1 + len(self.kernel), False

    def one_by_one(self, like: Tensor) -> bool:
        if super().one_by_one(like):
            return True
        shared = len(like) == 1 and self.groups == 1  # one convolution with the outputs of all trials
        positions = like.shape[1] * math.prod(like.shape[3:])
        return not shared and positions * self.values["weight"][0].numel() >= LARGE

    def compute(self, a: Tensor) -> Tensor:
        convolve = F.conv2d if len(self.kernel) == 2 else F.conv1d
        how = self.stride, self.padding, self.dilation
        weight, bias = self.values["weight"], self.values["bias"] if self.has_bias else None
        if not self.one_by_one(a):
            shared = len(a) == 1 and self.groups == 1
            x = a[0] if shared else self._side_by_side(a)
            flat = None if bias is None else bias.reshape(-1)
            groups = 1 if shared else len(weight) * self.groups
            y = convolve(_laid_out(x, groups), _laid_out(weight.flatten(0, 1), groups), flat, *how, groups)
            return self._apart(y)
        outputs = []
        for r, own in enumerate(weight):
            x, own = (_laid_out(part, self.groups) for part in (a[min(r, len(a) - 1)], own))
            outputs.append(convolve(x, own, None if bias is None else bias[r], *how, self.groups))
        return stacked(outputs)

    def _side_by_side(self, x: Tensor) -> Tensor:
        """Return (R or 1, B, C, ...) as (B, R C, ...): with R groups, one convolution is that of all trials."""
        return x.expand(self.session.trials, *x.shape[1:]).transpose(0, 1).flatten(1, 2)

    def _apart(self, y: Tensor) -> Tensor:
        """Return (B, R C, ...) as (R, B, C, ...): the inverse of `_side_by_side`."""
        return y.unflatten(1, (self.session.trials, -1)).transpose(0, 1)

    def _backward(self, weight: Tensor, a: Tensor, d: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients from `d` (B, O, ...) by input (B, C, ...), weight (O, ...) and bias, those that are wanted.

        With all trials side by side, O and C are those of all together.
        """
        none, groups = [0] * len(self.kernel), self.groups * (len(weight) // self.outputs)
        d, weight = _laid_out(d, groups), _laid_out(weight, groups)
        return torch.ops.aten.convolution_backward(
            d, a, weight, [len(weight)] if self.has_bias else None, list(self.stride),
            list(self.padding), list(self.dilation), False, none, groups, wanted,
        )  # fmt: skip

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        every = self.values["weight"]
        if not self.one_by_one(d):
            # of the input only the shape is used
            like = d.new_empty(1).expand(a.shape[1], len(every) * a.shape[2], *a.shape[3:])
            weight = every.flatten(0, 1)
            return self._apart(self._backward(weight, like, self._side_by_side(d), [True, False, False])[0])
        parts = [
            self._backward(weight, a[min(r, len(a) - 1)], d[r], [True, False, False])[0]
            for r, weight in enumerate(every)
        ]
        return stacked(parts)

    def _patches(self, a: Tensor) -> Tensor:
        """Return patches (R or 1, B, groups, L, K) of (R or 1, B, C, *size): K = kernel x C / groups, channels last.

        Positions come first and channels last in memory, so that one copy serves norms and sums as plain products.
        """
        pads = [p for padding in reversed(self.padding) for p in (padding, padding)]
        rows = F.pad(a.flatten(0, 1).movedim(1, -1), [0, 0, *pads])
        spans = [dilation * (kernel - 1) + 1 for dilation, kernel in zip(self.dilation, self.kernel, strict=True)]
        sides = [(n - span) // step + 1 for n, span, step in zip(rows.shape[1:-1], spans, self.stride, strict=True)]
        own, along, one = rows.stride()[0], rows.stride()[1:-1], rows.stride()[-1]
        jumps = [gap * stride for gap, stride in zip(self.dilation, along, strict=True)]
        moves = [step * stride for step, stride in zip(self.stride, along, strict=True)]
        channels = rows.shape[-1] // self.groups
        shape = len(rows), self.groups, *sides, *self.kernel, channels
        view = rows.as_strided(shape, (own, channels * one, *moves, *jumps, one))
        return view.reshape(*a.shape[:2], self.groups, math.prod(sides), -1)

    def _add_weights(self, sums: Tensor) -> None:
        """Add sums (R, groups, O / groups, K) of gradients by patches to those of the weight."""
        total = self.sums["weight"]
        total += sums.unflatten(-1, (*self.kernel, -1)).movedim(-1, 3).reshape(total.shape)

    def square_norms(self) -> Tensor:
        calls = self.stored()
        chunks = [self._norms_of(calls, part) for part in self.chunks(calls)]
        self.kept = None
        if all(kept is not None for _, kept in chunks):
            self.kept = torch.cat([kept for _, kept in chunks if kept is not None], dim=1)
        norms = torch.cat([norms for norms, _ in chunks], dim=1)
        if self.has_bias:
            self.shifts = self.session.stored(self._shifts(calls))
            norms += self.shifts.square().sum(dim=2)
        return norms

    def _shifts(self, calls: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return each example's gradient for the bias, (R, B, O)."""
        return torch.stack([d.flatten(3).sum(dim=3, dtype=self.session.exact) for _, d in calls]).sum(dim=0)

    def factors(self, calls: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return patches (R or 1, B, groups, T, K) and gradients (R, B, groups, O / groups, T), T positions of all."""
        parts = [self._patches(a) for a, _ in calls]
        widest = max(part.shape[0] for part in parts)
        u = parts[0] if len(parts) == 1 else torch.cat([p.expand(widest, -1, -1, -1, -1) for p in parts], dim=-2)
        return u, torch.cat([self._by_group(d) for _, d in calls], dim=-1)

    def sizes(self, calls: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return the sums (R, B) of squared patches, or more, and (R, B, O) of squared gradients of the output.

        An input value is in at most ceil(kernel / stride) patches along each axis.
        """
        exact, trials = self.session.exact, self.session.trials
        patches = math.prod(-(-kernel // step) for kernel, step in zip(self.kernel, self.stride, strict=True))
        inputs = added(a.to(exact).flatten(2).square().sum(dim=2).expand(trials, -1) for a, _ in calls)
        return patches * inputs, added(d.to(exact).flatten(3).square().sum(dim=3) for _, d in calls)

    def chunks(self, calls: list[tuple[Tensor, Tensor]]) -> list[slice]:
        """Return the parts of a batch whose patches, in all trials together, are made at once."""
        per_position = self.values["weight"][0, 0].numel() * self.groups
        of_a_row = self.session.trials * per_position * sum(d[0, 0, 0].numel() for _, d in calls)
        rows, room = self.session.rows, _PATCH_ELEMENTS.get(calls[0][1].device.type, 1 << 22)
        most = max(1, room // max(1, of_a_row))
        return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]

    def _by_group(self, d: Tensor) -> Tensor:
        """Return gradients (R, B, O, ...) of the output as (R, B, groups, O / groups, L)."""
        return d.reshape(*d.shape[:2], self.groups, self.outputs // self.groups, -1)

    def _norms_of(self, calls: list[tuple[Tensor, Tensor]], part: slice) -> tuple[Tensor, Tensor | None]:
        """Return squared norms (R, rows) of a part of the rows, and gradients (R, rows, groups, O, K) if small."""
        calls = [(a[:, part], d[:, part]) for a, d in calls]
        u, d = self.factors(calls)
        inputs, outputs, positions, short = u.shape[-1], d.shape[-2], d.shape[-1], SHORT in (u.dtype, d.dtype)

        if gram_is_cheaper(positions, inputs, outputs):
            width = max(inputs, outputs)
            return gram_squares(gram(u), gram(d.mT), width, short).sum(dim=-1), None
        gradients = product(d, u)
        norms = torch.linalg.vector_norm(gradients.flatten(2), dim=2).square_()
        sizes, slopes = self.sizes(calls)
        norms = instantiated_squares(norms, sizes, slopes.sum(dim=2), short * positions)
        return norms, gradients if gradients.numel() <= u.numel() else None

    def zero_nonfinite(self, bad: Tensor) -> None:
        super().zero_nonfinite(bad)
        if self.kept is not None:
            self.kept = self.kept.masked_fill(bad[..., None, None, None], 0.0)
        if self.shifts is not None:
            self.shifts = self.shifts.masked_fill(bad.unsqueeze(-1), 0.0)

    def add_clipped_sums(self, factors: Tensor) -> None:
        if self.has_bias:
            self.add("bias", factors, self._shifts(self.stored()) if self.shifts is None else self.shifts)
        if self.kept is not None:
            sums = torch.bmm(factors.unsqueeze(1), self.kept.flatten(2).to(factors.dtype))
            self._add_weights(sums.view(len(sums), *self.kept.shape[2:]))
            return
        for a, gradient in self.stored():
            d = gradient * aligned(factors, gradient)
            if a.dtype == SHORT:
                self._add_by_patches(a, d)
                continue
            total, weight = self.sums["weight"], self.values["weight"].to(d.dtype)
            if not self.one_by_one(d):
                both = self._side_by_side(a), self._side_by_side(d)
                total += self._backward(weight.flatten(0, 1), *both, [False, True, False])[1].view(total.shape)
                continue
            for r, own in enumerate(weight):
                total[r] += self._backward(own, a[min(r, len(a) - 1)], d[r], [False, True, False])[1]

    def _add_by_patches(self, a: Tensor, d: Tensor) -> None:
        """Add the weight gradient from rescaled `d`: PyTorch's convolutions would round it to the dtype of `a`."""
        for part in self.chunks([(a, d)]):
            u, own = self._patches(a[:, part]), self._by_group(d[:, part])
            # (R, groups, O / groups, B L) times (R or 1, groups, B L, K)
            self._add_weights(product(own.permute(0, 2, 3, 1, 4).flatten(3), u.transpose(1, 2).flatten(2, 3)))


def _laid_out(x: Tensor, groups: int) -> Tensor:
    """Return images or filters (N, C, H, W) as tensor cores take them: short numbers of one group, channels last."""
    if x.is_cuda and x.dtype == SHORT and x.dim() == 4 and groups == 1:
        return x.contiguous(memory_format=torch.channels_last)
    return x
