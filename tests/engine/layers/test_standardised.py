"""Weight-standardised convolutions against one example at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.packing import Pack, Placement
from tests.engine.conftest import Case, compare, numbers, parameters_of, spread


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
    data: st.DataObject, channels: tuple[int, int], kernel: int, stride: int, padding: int, side: int
) -> None:
    inputs, outputs = channels
    # a filter of one number is always 0 after centring: what is found of its gradient is the margin for rounding alone
    assume(inputs * kernel**2 > 1)

    def build() -> nn.Module:
        return spread(nn.Sequential(WeightStandardisedConv2d(inputs, outputs, kernel, stride, padding)))

    compare(data, build, (inputs, side, side))


@settings(max_examples=20)
@given(data=st.data())
def test_filters_below_the_floor(data: st.DataObject) -> None:
    """There the scale is constant, and only the mean is taken out of a gradient."""

    def build() -> nn.Module:
        layer = WeightStandardisedConv2d(2, 3, 3)
        with torch.no_grad():
            layer.weight[:2] *= 1e-4
            layer.weight[1] = 0.3
        return spread(nn.Sequential(layer))

    compare(data, build, (2, 4, 4))


@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_a_filter_of_one_number_never_moves(bound: float) -> None:
    """Its true gradient is 0, and the margin in its norm takes next to nothing from the others."""
    made = Case(
        lambda: spread(nn.Sequential(WeightStandardisedConv2d(1, 2, 1))), numbers(1, 3, 1, 3, 3),
        torch.tensor([[0, 1, 2]]), norms=(bound,),
    )  # fmt: skip
    fast, slow = made.fast(), made.slow()
    assert not fast["0.weight"].any()
    for name in ("0.gain", "0.bias"):
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-6, atol=1e-9)


def lopsided(outputs: Tensor) -> Tensor:
    """A sum of outputs (..., O, H, W) that weighs every place differently, most with hardly anything."""
    weights = 0.97 ** torch.arange(outputs.shape[-3:].numel()).to(outputs)
    return (outputs * weights.view(outputs.shape[-3:])).sum()


@pytest.mark.parametrize("gain", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3])
def test_norms_are_no_less_than_the_true_ones(gain: float, offset: float) -> None:
    """Inputs that are nearly constant have gradients nearly along 1, of which the projection leaves almost nothing."""
    x = offset + numbers(6, 3, 8, 8)

    def build() -> nn.Module:
        layer = WeightStandardisedConv2d(3, 4, 3, 1, 1)
        nn.init.constant_(layer.gain, gain)
        return nn.Sequential(layer)

    pack = Pack(build, [0], Placement(torch.device("cpu"), torch.float32))
    pack.session.recording = True
    lopsided(pack(x.float()[None])).backward()
    pack.session.recording = False
    found = pack.layers[0].square_norms()[0].double()
    module = nn.Sequential(WeightStandardisedConv2d(3, 4, 3, 1, 1)).double()
    module.load_state_dict({name: value.double() for name, value in parameters_of(pack, 0).items()})
    for row, square in zip(x, found, strict=True):
        gradients = torch.autograd.grad(lopsided(module(row[None])), list(module.parameters()))
        true = sum(float(g.square().sum()) for g in gradients)
        assert float(square) >= true * (1 - 1e-5)
        if offset == 0:
            assert float(square) <= true * (1 + 1e-2)
