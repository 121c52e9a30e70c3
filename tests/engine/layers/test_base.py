"""What layers do together: residual and in-place connections, layers that take no part, inputs changed too late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.layers.base import gram_squares
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Build, Case, Of, compare, numbers, spread


def in_place(model: Any, x: Tensor) -> Tensor:
    """Convolutions with a skip, a normalisation, activations in place and a sum in place."""
    skip = model.act(model.enter(x))
    y = model.norm(model.inner(skip))
    y += skip
    z: Tensor = model.head(model.act(y).mean(dim=(2, 3)))
    return z


def residual() -> nn.Module:
    return Of(
        in_place, enter=nn.Conv2d(1, 2, 3, padding=1), inner=nn.Conv2d(2, 2, 3, padding=1, bias=False),
        norm=nn.GroupNorm(2, 2), act=nn.ReLU(inplace=True), head=nn.Linear(2, 3),
    )  # fmt: skip


@settings(max_examples=25)
@given(data=st.data(), side=st.integers(2, 5))
def test_residual_network_with_operations_in_place(data: st.DataObject, side: int) -> None:
    groups = [
        ["enter.weight", "enter.bias"],
        ["inner.weight"],
        ["norm.weight", "norm.bias"],
        ["head.weight", "head.bias"],
    ]
    compare(data, residual, (1, side, side), groups=groups)


def mixing(model: Any, x: Tensor) -> Tensor:
    """Tokens, attention-like mixing within a sequence, a normalisation."""
    y = model.table(x)
    weights = torch.softmax(model.query(y) @ model.key(y).transpose(1, 2), dim=-1)
    z: Tensor = model.head(model.norm(y + weights @ y)).mean(1)
    return z


def sequence() -> nn.Module:
    return Of(
        mixing, table=nn.Embedding(4, 4), query=nn.Linear(4, 4), key=nn.Linear(4, 4, bias=False),
        norm=nn.LayerNorm(4), head=nn.Linear(4, 2),
    )  # fmt: skip


@settings(max_examples=25)
@given(data=st.data(), length=st.integers(1, 5))
def test_sequence_model(data: st.DataObject, length: int) -> None:
    compare(data, sequence, (length,), 4)


def dense(bias: bool, sequence: bool) -> nn.Module:
    def run(model: Any, x: Tensor) -> Tensor:
        first = torch.tanh(model.layer(x))
        y: Tensor = model.layer(torch.stack([first, first.flip(-1)], dim=1) if sequence else first)
        return y.flatten(1)

    return Of(run, layer=nn.Linear(4, 4, bias=bias))


TWICE: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "dense layer": (lambda: dense(True, False), (4,), 0),
    "dense layer without bias": (lambda: dense(False, False), (4,), 0),
    "dense layer on rows and sequences": (lambda: dense(True, True), (4,), 0),
    "dense layer on rows and sequences without bias": (lambda: dense(False, True), (4,), 0),
    **{
        f"convolution of {side} and {side // 2} places a side": (
            lambda: Of(
                lambda m, x: m.layer(nn.functional.avg_pool2d(torch.tanh(m.layer(x)), 2)).flatten(1),
                layer=nn.Conv2d(2, 2, 3, padding=1),
            ), (2, side, side), 0,
        )
        for side in (2, 4, 6)
    },
    "table, for tokens and for a part of them in reverse": (
        lambda: Of(
            lambda m, x: m.head(torch.tanh(m.table(x).sum(1)) * m.table(x[:, :2].flip(1)).mean(1)),
            table=nn.Embedding(3, 2, padding_idx=1), head=nn.Linear(2, 2),
        ), (4,), 3,
    ),
    "normalisation between dense layers": (
        lambda: Of(
            lambda m, x: m.last(m.norm(m.norm(m.first(x)).tanh())),
            first=nn.Linear(3, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 2),
        ), (3,), 0,
    ),
    "standardised convolution": (
        lambda: Of(
            lambda m, x: m.last(m.layer(m.layer(x).tanh()).flatten(1)),
            layer=spread(WeightStandardisedConv2d(2, 2, 3, 1, 1)), last=nn.Linear(32, 2),
        ), (2, 4, 4), 0,
    ),
    "module without a rule": (lambda: Of(lambda m, x: m.gate(m.gate(x) - 1), gate=nn.PReLU(3)), (3,), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
@settings(max_examples=12)
@given(data=st.data())
def test_a_layer_that_is_used_twice_has_one_gradient(data: st.DataObject, name: str) -> None:
    build, shape, tokens = TWICE[name]
    compare(data, build, shape, tokens)


def spare() -> nn.Module:
    """Layers of every kind that the loss never sees."""
    never = nn.ModuleList([nn.Linear(3, 2), nn.Conv1d(1, 1, 1), nn.LayerNorm(2), nn.PReLU(), nn.Embedding(2, 2)])
    return Of(lambda m, x: (m.watched(x), m.used(x))[1], used=nn.Linear(3, 2), never=never, watched=nn.Linear(3, 2))


@settings(max_examples=10)
@given(data=st.data())
def test_layers_that_take_no_part_have_no_gradient(data: st.DataObject) -> None:
    sums = compare(data, spare, (3,))
    assert all(not value.any() for name, value in sums.items() if not name.startswith("used"))


def changes_late(model: Any, x: Tensor) -> Tensor:
    """Adds to a layer's input in place after the layer has used it."""
    x = model.first(x)
    x += model.second(x)
    return x


def test_an_input_that_is_changed_after_its_use_is_refused() -> None:
    """Plain autograd refuses it too; a gradient from the changed input would be a wrong one."""
    made = Case(
        lambda: Of(changes_late, first=nn.Linear(3, 3), second=nn.Linear(3, 3)), numbers(1, 2, 3), torch.zeros(1, 2)
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.slow()
    with pytest.raises(ModelError, match="changed in place"):
        made.fast()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_squares_bound_the_true_norm_from_above(dtype: torch.dtype) -> None:
    """Among 200 sums that nearly cancel; and where nothing cancels the two agree to 1 in 1000."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(200, 1, 32, generator=generator, dtype=torch.float64)
    a = torch.cat([first, first + 1e-4 * torch.randn(200, 1, 32, generator=generator)], dim=1).to(dtype)
    d = torch.randn(200, 1, 32, generator=generator, dtype=torch.float64).to(dtype)
    d = torch.cat([d, -d], dim=1)
    for outputs, cancels in ((d, True), (d.abs(), False)):
        squares = gram_squares(a @ a.transpose(1, 2), outputs @ outputs.transpose(1, 2), 32).double()
        true = torch.einsum("nti,nto->noi", a.double(), outputs.double()).square().sum(dim=(1, 2))
        assert bool((squares >= true * (1 - 1e-12)).all())
        assert cancels or bool((squares <= 1.001 * true).all())


def test_gram_squares_count_what_underflows() -> None:
    a = torch.full((1, 2, 8), 1e15)
    d = torch.full((1, 2, 8), 1e-24)
    squares = gram_squares(a @ a.transpose(1, 2), d @ d.transpose(1, 2), 8)
    true = torch.einsum("nti,nto->noi", a.double(), d.double()).square().sum(dim=(1, 2))
    assert bool((squares >= true).all())
    assert float(true) > 0
