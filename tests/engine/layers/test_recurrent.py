"""LSTM and GRU of dense layers: PyTorch's own numbers, and the gradients of examples one at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpsgd_cli.engine.layers import GRU, LSTM
from tests.engine.conftest import Of, compare, numbers

PAIRS: list[Any] = [(LSTM, nn.LSTM), (GRU, nn.GRU)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_outputs_are_those_of_pytorchs_own(ours: Any, theirs: Any) -> None:
    reference, made = theirs(3, 5, batch_first=True).double(), ours(3, 5).double()
    names = {"inputs": "ih", "state": "hh"}
    weights = dict(reference.named_parameters())
    made.load_state_dict({f"{own}.{kind}": weights[f"{kind}_{short}_l0"] for own, short in names.items()
                          for kind in ("weight", "bias")})  # fmt: skip
    x = numbers(1, 4, 6, 3)[0]
    torch.testing.assert_close(made(x), reference(x)[0])


@pytest.mark.parametrize("kind", [LSTM, GRU])
@settings(max_examples=8)
@given(data=st.data(), steps=st.integers(1, 4))
def test_sums_equal_one_example_at_a_time(kind: Any, data: st.DataObject, steps: int) -> None:
    model = Of(lambda m, x: m.last(m.layer(x)[:, -1]), layer=kind(2, 3), last=nn.Linear(3, 2))
    compare(data, lambda: copy.deepcopy(model), (steps, 2))
