"""Convolutions against one example at a time: every option, both forms of the norm, and rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.engine.conftest import Case, Of, compare, linear_loss, numbers


@settings(max_examples=60)
@given(data=st.data(), axes=st.integers(1, 2), groups=st.integers(1, 3), bias=st.booleans())
def test_sums_equal_one_example_at_a_time(data: st.DataObject, axes: int, groups: int, bias: bool) -> None:
    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes)))

    sides, kernel, stride, padding, dilation = each(1, 7), each(1, 3), each(1, 3), each(0, 2), each(1, 2)
    reach = [gap * (width - 1) + 1 for gap, width in zip(dilation, kernel, strict=True)]
    assume(all(side + 2 * pad >= span for side, pad, span in zip(sides, padding, reach, strict=True)))
    inputs, outputs = (groups * data.draw(st.integers(1, 2)) for _ in range(2))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    kind: Any = nn.Conv1d if axes == 1 else nn.Conv2d
    compare(data, lambda: nn.Sequential(kind(inputs, outputs, kernel, **options)), (inputs, *sides))


@pytest.mark.parametrize("side", [2, 12], ids=["gram", "instantiated"])
@pytest.mark.parametrize("shared", [False, True])
def test_both_forms_of_the_norm(side: int, shared: bool) -> None:
    positions, patch, channels = side**2, 4 * 9, 6
    assert (positions * (patch + channels) <= patch * channels) == (side == 2)

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, channels, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(channels * positions, 2)
        )

    x = numbers(1 if shared else 2, 3, 4, side, side)
    Case(build, x, torch.zeros(2, 3), seeds=(0, 1), norms=(0.5,), trusted=shared).check()


def test_many_rows_are_taken_in_pieces() -> None:
    """2 trials x 30 rows of 81 x 900 numbers in patches: more than are made at once."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(9, 1, 3, padding=1), nn.AvgPool2d(30), nn.Flatten())

    Case(build, numbers(2, 30, 9, 30, 30), torch.zeros(2, 30), seeds=(0, 1), norms=(0.01,)).check()


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": 1, "padding_mode": "circular"}])
def test_other_paddings_take_the_general_way(options: dict[str, Any]) -> None:
    Case(lambda: nn.Conv1d(2, 3, 3, **options), numbers(1, 2, 2, 5), torch.zeros(1, 2), norms=(0.5,)).check()


def differences() -> nn.Module:
    """Magnified differences of a convolution's outputs: equal patches cancel in the gradient."""
    return Of(lambda m, x: -100.0 * m.layer(x).diff(dim=2)[:, :, 0], layer=nn.Conv1d(64, 64, 1, bias=False))


@pytest.mark.parametrize("seed", range(8))
def test_rounding_in_a_gram_form_never_lets_an_example_pass_its_bound(seed: int) -> None:
    patch = 100.0 * numbers(1, 1, 64, 1, seed=seed)
    x = torch.cat([patch, patch + 1e-3 * numbers(1, 1, 64, 1, seed=seed + 100)], dim=3).float()
    made = Case(differences, x, torch.zeros(1, 1), loss=linear_loss, dtype=torch.float32, norms=(1.0,))
    assert float(made.fast()["layer.weight"].norm()) <= 1.01
