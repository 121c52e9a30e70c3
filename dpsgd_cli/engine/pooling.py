"""Max-pooling over 2 x 2 windows at every position, by a few passes of vectorised maxima.

On a CPU, PyTorch's kernel processes one number at a time. Maxima of shifted copies are faster and
give the same outputs and gradients, including ties. PyTorch's kernel is used on other
devices, for other windows and strides, and for a compiler, which vectorises it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import Session


class MaxPool(nn.Module):
    """Replacement for `nn.MaxPool2d(2, stride=1)`: (B, C, H, W) -> (B, C, H - 1, W - 1)."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self.session = session

    def forward(self, x: Tensor) -> Tensor:
        if self.session is not None and self.session.passes.level is not None and x.dim() == 4:
            return self.session.passes.apply(lambda every: self(every.flatten(0, 1)).unflatten(0, every.shape[:2]), x)
        if self.session is not None and self.session.tracing:
            return F.max_pool2d(x, 2, 1)
        if x.device.type != "cpu" or x.dim() != 4 or min(x.shape[2:]) < 2 or not x.numel():
            return F.max_pool2d(x, 2, 1)
        pooled: Tensor = _SquareMaxima.apply(x)
        return pooled


def vectorised(module: nn.Module, session: Session | None = None) -> nn.Module | None:
    """Return a `MaxPool` that replaces `module`, or None if `module` is not 2 x 2 max-pooling with stride 1."""
    if type(module) is not nn.MaxPool2d or module._forward_hooks or module._forward_pre_hooks:
        return None
    given = (module.kernel_size, module.stride, module.padding, module.dilation)
    sides = [(x, x) if isinstance(x, int) else (x[0], x[1]) for x in given]
    covered = sides == [(2, 2), (1, 1), (0, 0), (1, 1)] and not module.return_indices and not module.ceil_mode
    return MaxPool(session) if covered else None


class _SquareMaxima(torch.autograd.Function):
    """Maxima of neighbours in rows, then of neighbours in columns, computed on the flattened tensor.

    So the first of equal numbers in reading order wins, as in PyTorch's kernel, and NaN stays NaN. In the flattened
    tensor, the neighbour of the end of a row is the start of the next row, possibly of another example. Such maxima are
    computed but never returned, and `backward` has exact zeros for them. So no information passes between rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        line, width = x.reshape(-1), x.shape[3]
        pairs = torch.maximum(line[:-1], line[1:])
        squares = torch.maximum(pairs[:-width], pairs[width:])
        ctx.save_for_backward(line[1:] > line[:-1], pairs[width:] > pairs[:-width])
        ctx.shape = x.shape
        return _corners(squares, x.shape).contiguous()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        right, below = ctx.saved_tensors
        line, width = d.new_zeros(ctx.shape.numel()), ctx.shape[3]
        _corners(line, ctx.shape).copy_(d)
        for later, distance in ((below, width), (right, 1)):
            moved = line[: len(later)] * later
            line[: len(later)] -= moved
            line[distance : distance + len(later)] += moved
        return line.view(ctx.shape)


def _corners(line: Tensor, shape: torch.Size) -> Tensor:
    """Return a view (B, C, H - 1, W - 1) of a flat tensor of B C H W numbers: the upper left corner of every window."""
    rows, channels, height, width = shape
    sides = (rows, channels, height - 1, width - 1)
    return line.as_strided(sides, (channels * height * width, height * width, width, 1))
