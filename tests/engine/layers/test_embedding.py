"""Embedding tables against one example at a time: repeated tokens, padding, two uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Case, Of, compare


@settings(max_examples=40)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 4), max_size=2),
    tokens=st.integers(1, 4),
    width=st.integers(1, 3),
    padding=st.sampled_from([None, 0, -1]),
)
def test_sums_equal_one_example_at_a_time(
    data: st.DataObject, shape: list[int], tokens: int, width: int, padding: int | None
) -> None:
    """Few different tokens, so that most of them repeat."""
    compare(data, lambda: nn.Sequential(nn.Embedding(tokens, width, padding_idx=padding)), tuple(shape), tokens)


def test_tokens_that_arrive_as_numbers() -> None:
    """Data tables hold floats; a model turns them into tokens itself."""

    def model() -> nn.Module:
        return Of(lambda m, x: m.table(x.long()).flatten(1), table=nn.Embedding(3, 2))

    x = torch.tensor([[[0, 1, 1], [2, 2, 2]]], dtype=torch.float64)
    Case(model, x, torch.zeros(2, 2), seeds=(0, 1), norms=(0.3,)).check()


@pytest.mark.parametrize("seed", range(8))
def test_rounding_never_lets_an_example_pass_its_bound(seed: int) -> None:
    """A token at two places whose gradients nearly cancel."""
    weights = 1e4 * torch.randn(64, generator=torch.Generator().manual_seed(seed))
    rest = 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(seed + 100))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        parts = outputs.unflatten(-1, (2, 64))
        return (parts[..., 0, :] * (weights + rest)).sum(-1) - (parts[..., 1, :] * weights).sum(-1)

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(2, 64), nn.Flatten())

    made = Case(build, torch.ones(1, 1, 2).long(), torch.zeros(1, 1), loss=loss, dtype=torch.float32, norms=(1.0,))
    assert float(made.fast()["0.weight"].norm()) <= 1.01


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_that_tie_a_row_to_the_batch_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(option))}.*leave all off"):
        Case(lambda: nn.Embedding(3, 2, **option), torch.zeros(1, 1, 2).long(), torch.zeros(1, 1)).pack()
