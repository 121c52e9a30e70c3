"""Dense layers against one example at a time, and what float32 rounding may hide in a sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpsgd_cli.engine.layers import Linear, Session
from tests.engine.conftest import Case, Of, compare, linear_loss, numbers


@settings(max_examples=40)
@given(
    data=st.data(),
    middle=st.lists(st.integers(1, 3), max_size=3),
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 6),
    bias=st.booleans(),
)
def test_sums_equal_one_example_at_a_time(
    data: st.DataObject, middle: list[int], inputs: int, outputs: int, bias: bool
) -> None:
    compare(data, lambda: nn.Sequential(nn.Linear(inputs, outputs, bias=bias)), (*middle, inputs))


@pytest.mark.parametrize(("positions", "width"), [(2, 16), (9, 4)], ids=["gram", "instantiated"])
def test_both_forms_of_the_norm_of_a_sequence(positions: int, width: int) -> None:
    assert (positions * 2 * width <= width * width) == (width == 16)
    x = numbers(2, 3, positions, width)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Flatten(), nn.Linear(positions * width, 2))

    Case(build, x, torch.zeros(2, 3), seeds=(0, 1), norms=(0.5,)).check()


def difference() -> nn.Module:
    """The difference of a layer's outputs at two positions, magnified: equal tokens cancel in the gradient."""
    return Of(lambda m, x: -100.0 * m.layer(x).diff(dim=1)[:, 0], layer=nn.Linear(64, 64, bias=False))


@pytest.mark.parametrize("seed", range(8))
def test_rounding_in_a_gram_form_never_lets_an_example_pass_its_bound(seed: int) -> None:
    """Two tokens that are nearly equal and gradients that are opposite: the sum is small, the rounding is not."""
    token = 100.0 * numbers(1, 1, 1, 64, seed=seed)
    x = torch.cat([token, token + 1e-3 * numbers(1, 1, 1, 64, seed=seed + 100)], dim=2).float()
    made = Case(difference, x, torch.zeros(1, 1), loss=linear_loss, dtype=torch.float32, norms=(1.0,))
    assert float(made.fast()["layer.weight"].norm()) <= 1.01
    unclipped = Case(difference, x.double(), torch.zeros(1, 1), loss=linear_loss, clips=False).slow()
    assert float(unclipped["layer.weight"].norm()) > 1.01


def test_a_huge_input_times_a_vanishing_gradient_is_not_taken_for_nothing() -> None:
    """The squares of 2e-23 vanish in float32, but the gradient's norm, 1.5e19 * 2e-23 * sqrt(1000), does not."""
    session = Session(1, torch.zeros(()))
    session.rows = 1
    layer = Linear(nn.Linear(1, 1000), session)
    layer.inputs.append(torch.full((1, 1, 1), 1.5e19))
    layer.gradients.append(torch.full((1, 1, 1000), 2e-23))
    assert float(layer.square_norms()) >= (1.5e19 * 2e-23) ** 2 * 1000
