"""Weight-standardised convolutions against one example at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.core.modules import WeightStandardisedConv2d

Compare = Callable[..., dict[str, Tensor]]


def spread(module: nn.Module) -> nn.Module:
    """Gains and biases as after some training, not as at the start."""
    for layer in module.modules():
        if isinstance(layer, WeightStandardisedConv2d):
            nn.init.normal_(layer.gain)
            assert layer.bias is not None
            nn.init.normal_(layer.bias)
    return module


@settings(max_examples=60)
@given(
    data=st.data(),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    side=st.integers(3, 6),
)
def test_one_layer(
    compare: Compare, data: st.DataObject, channels: tuple[int, int], kernel: int, stride: int, padding: int, side: int
) -> None:
    inputs, outputs = channels

    def build() -> nn.Module:
        return spread(nn.Sequential(WeightStandardisedConv2d(inputs, outputs, kernel, stride, padding)))

    compare(data, build, (inputs, side, side))


@settings(max_examples=20)
@given(data=st.data())
def test_filters_below_the_floor(compare: Compare, data: st.DataObject) -> None:
    """There the scale is constant, and only the mean is taken out of a gradient."""

    def build() -> nn.Module:
        layer = WeightStandardisedConv2d(2, 3, 3)
        with torch.no_grad():
            layer.weight[:2] *= 1e-4
            layer.weight[1] = 0.3
        return spread(nn.Sequential(layer))

    compare(data, build, (2, 4, 4))
