"""Layers of published models that torch does not have, as ordinary modules: one copy, one batch, autograd.

Not here: their clipping rules (`layers/`), the models made of them (`vision.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def centred(weight: Tensor, axes: int) -> Tensor:
    """`weight` less its mean over the last `axes` axes."""
    over = tuple(range(-axes, 0))
    return weight - weight.mean(dim=over, keepdim=True)


class WeightStandardisedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and L2 norm `gain`, whatever the stored weights are.

    Filter o is gain_o * (W_o - mean W_o) / sqrt(max(K var W_o, floor)), K being the numbers in a filter (Qiao et al.
    2019, "Micro-batch training with batch-channel normalization and weight standardization"; with gain and floor as
    in De et al. 2022). Weights are (O, C, *kernel), gain and bias (O,). Gains start at 1, biases at 0.
    """

    floor = 1e-4

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(outputs))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        centre = centred(self.weight, 3)
        squares = centre.square().sum(dim=(1, 2, 3), keepdim=True)
        weight = centre * squares.clamp_min(self.floor).rsqrt() * self.gain.view(-1, 1, 1, 1)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Shift(nn.Module):
    """Adds one learned tensor of `shape` to every example: y = x + value."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value
