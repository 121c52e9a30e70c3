"""Scale and shift of normalisation layers against one example at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.conftest import Build, Case, compare, numbers

Sides = st.lists(st.integers(2, 3), min_size=1, max_size=3)


@settings(max_examples=25)
@given(data=st.data(), middle=st.lists(st.integers(1, 3), max_size=2), last=Sides, bias=st.booleans())
def test_layer_norm(data: st.DataObject, middle: list[int], last: list[int], bias: bool) -> None:
    compare(data, lambda: nn.Sequential(nn.LayerNorm(last, bias=bias)), (*middle, *last))


@settings(max_examples=15)
@given(data=st.data(), middle=st.lists(st.integers(1, 3), max_size=2), last=Sides)
def test_rms_norm(data: st.DataObject, middle: list[int], last: list[int]) -> None:
    compare(data, lambda: nn.Sequential(nn.RMSNorm(last)), (*middle, *last))


@settings(max_examples=25)
@given(data=st.data(), groups=st.integers(1, 3), each=st.integers(1, 2), sides=st.lists(st.integers(2, 4), max_size=3))
def test_group_norm(data: st.DataObject, groups: int, each: int, sides: list[int]) -> None:
    assume(each > 1 or sides)  # torch refuses to normalise a single number
    compare(data, lambda: nn.Sequential(nn.GroupNorm(groups, groups * each)), (groups * each, *sides))


@settings(max_examples=25)
@given(data=st.data(), channels=st.integers(1, 3), sides=Sides)
def test_instance_norm(data: st.DataObject, channels: int, sides: list[int]) -> None:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(sides) - 1]
    compare(data, lambda: nn.Sequential(kind(channels, affine=True)), (channels, *sides))


@pytest.mark.parametrize("build", [lambda: nn.LayerNorm(4), lambda: nn.GroupNorm(3, 3)], ids=["layer", "group"])
@pytest.mark.parametrize("clips", [True, False])
def test_an_example_that_is_not_finite_adds_zero(build: Build, clips: bool) -> None:
    """With clipping; and without, where the mask leaves it out."""
    x = numbers(1, 3, 3, 4)
    x[0, 1, 1, 2] = torch.nan
    mask = None if clips else torch.tensor([[True, False, True]])
    Case(lambda: nn.Sequential(build(), nn.Flatten()), x, torch.arange(3)[None], mask=mask, clips=clips).check()
