"""Convolutions in one and two dimensions.

With U the (K, L) matrix of input patches (K = channels x kernel, L = output positions) and d the (O, L) gradient
by the output, one example's gradient is d U^T. Its squared norm comes from the Gram form <U^T U, d^T d> (L^2 (K + O)
operations) or from the instantiated (O, K) matrix (L K O operations); the cheaper one is taken. The clipped sum
is the framework's own weight gradient with rescaled d, or, where the matrices were instantiated anyway and
are no larger than the patches, their weighted sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.core.layers.base import Layer, Session


class Conv(Layer):
    """Rule for Conv1d and Conv2d with zero padding. Weight (R, O, C / groups, *kernel), bias (R, O)."""

    kinds = (nn.Conv1d, nn.Conv2d)

    def __init__(self, source: nn.Conv1d | nn.Conv2d, session: Session) -> None:
        super().__init__(source, session)
        self.has_bias = source.bias is not None
        self.stride, self.dilation, self.groups = source.stride, source.dilation, source.groups
        self.padding: tuple[int, ...] = tuple(source.padding)  # type: ignore[arg-type]
        self.kernel = source.kernel_size
        self.outputs = source.out_channels
        self.kept: Tensor | None = None

    @classmethod
    def accepts(cls, source: nn.Module) -> bool:
        plain = getattr(source, "padding_mode", "") == "zeros" and not isinstance(getattr(source, "padding", ""), str)
        return super().accepts(source) and plain

    def forget(self) -> None:
        super().forget()
        self.kept = None

    def compute(self, a: Tensor) -> Tensor:
        convolve = F.conv2d if len(self.kernel) == 2 else F.conv1d
        outputs = []
        for r in range(self.session.trials):
            bias = self.values["bias"][r] if self.has_bias else None
            x, weight = a[min(r, a.shape[0] - 1)], self.values["weight"][r]
            outputs.append(convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups))
        return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)

    def _backward(self, r: int, a: Tensor, d: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        none = [0] * len(self.kernel)
        return torch.ops.aten.convolution_backward(
            d, a, self.values["weight"][r], [self.outputs] if self.has_bias else None, list(self.stride),
            list(self.padding), list(self.dilation), False, none, self.groups, wanted,
        )  # fmt: skip

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        parts = [
            self._backward(r, a[min(r, a.shape[0] - 1)], d[r], [True, False, False])[0]
            for r in range(self.session.trials)
        ]
        return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)

    def _patches(self, a: Tensor) -> Tensor:
        """(R or 1, B, C, *size) -> (R or 1, B, groups, C / groups * kernel, L)."""
        rows = a.flatten(0, 1)
        if len(self.kernel) == 1:
            rows = rows.unsqueeze(2)
            two = [(1, self.kernel[0]), (1, self.dilation[0]), (0, self.padding[0]), (1, self.stride[0])]
        else:
            two = [self.kernel, self.dilation, self.padding, self.stride]  # type: ignore[list-item]
        unfolded = F.unfold(rows, two[0], dilation=two[1], padding=two[2], stride=two[3])
        return unfolded.view(a.shape[0], a.shape[1], self.groups, -1, unfolded.shape[-1])

    def square_norms(self) -> Tensor:
        pairs = self.recorded()
        trials, rows = self.session.trials, self.session.rows
        patches = [self._patches(a) for a, _ in pairs]
        widest = max(u.shape[0] for u in patches)
        u = torch.cat([p.expand(widest, -1, -1, -1, -1) for p in patches], dim=-1) if len(patches) > 1 else patches[0]
        d = torch.cat([g.reshape(trials, rows, self.groups, self.outputs // self.groups, -1) for _, g in pairs], dim=-1)
        inputs, outputs, positions = u.shape[-2], d.shape[-2], d.shape[-1]
        if positions * (inputs + outputs) <= inputs * outputs:
            grams = torch.matmul(u.transpose(-1, -2), u) * torch.matmul(d.transpose(-1, -2), d)
            norms = grams.sum(dim=(-1, -2, -3)).clamp_min_(0.0)
        else:
            gradients = torch.matmul(d, u.transpose(-1, -2))
            norms = gradients.flatten(2).square().sum(dim=2)
            if gradients.numel() <= u.numel():
                self.kept = gradients
        if self.has_bias:
            norms = norms + d.sum(dim=-1).flatten(2).square().sum(dim=2)
        return norms

    def erase(self, bad: Tensor) -> None:
        super().erase(bad)
        if self.kept is not None:
            self.kept = self.kept.masked_fill(bad[..., None, None, None], 0.0)

    def add_clipped_sums(self, factors: Tensor) -> None:
        weighted = [(a, d * factors.reshape(*factors.shape, *[1] * (d.dim() - 2))) for a, d in self.recorded()]
        if self.kept is not None:
            total = torch.bmm(factors.unsqueeze(1), self.kept.flatten(2))
            self.sums["weight"] += total.view(self.sums["weight"].shape)
        for a, d in weighted:
            for r in range(self.session.trials):
                if self.kept is None:
                    x = a[min(r, a.shape[0] - 1)]
                    self.sums["weight"][r] += self._backward(r, x, d[r], [False, True, False])[1]
                if self.has_bias:
                    self.sums["bias"][r] += d[r].flatten(2).sum(dim=(0, 2))
