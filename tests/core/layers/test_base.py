"""What layers do together: residual and in-place connections, layers that take no part, inputs changed too late."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.core.layers.base import gram_squares
from dpsgd_cli.errors import ModelError
from tests.core.conftest import Case, compare, numbers


class Residual(nn.Module):
    """Convolutions with a skip, a normalisation, activations in place and a sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm, self.act, self.head = nn.GroupNorm(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.act(self.enter(x))
        y = self.norm(self.inner(skip))
        y += skip
        z: Tensor = self.head(self.act(y).mean(dim=(2, 3)))
        return z


@settings(max_examples=25)
@given(data=st.data(), side=st.integers(2, 5))
def test_residual_network_with_operations_in_place(data: st.DataObject, side: int) -> None:
    groups = [
        ["enter.weight", "enter.bias"],
        ["inner.weight"],
        ["norm.weight", "norm.bias"],
        ["head.weight", "head.bias"],
    ]
    compare(data, Residual, (1, side, side), groups=groups)


class Sequence(nn.Module):
    """Tokens, attention-like mixing within a sequence, two kinds of normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.query, self.key = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        weights = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), dim=-1)
        z: Tensor = self.head(self.norm(y + weights @ y)).mean(1)
        return z


@settings(max_examples=25)
@given(data=st.data(), length=st.integers(1, 5))
def test_sequence_model(data: st.DataObject, length: int) -> None:
    compare(data, Sequence, (length,), 4)


class Spare(nn.Module):
    """Layers of every kind that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.never = nn.ModuleList([nn.Linear(3, 2), nn.Conv1d(1, 1, 1), nn.LayerNorm(2), nn.PReLU()])
        self.table = nn.Embedding(2, 2)
        self.watched = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.watched(x)
        y: Tensor = self.used(x)
        return y


@settings(max_examples=10)
@given(data=st.data())
def test_layers_that_take_no_part_have_no_gradient(data: st.DataObject) -> None:
    sums = compare(data, Spare, (3,))
    assert all(not value.any() for name, value in sums.items() if not name.startswith("used"))


class ChangesLate(nn.Module):
    """Adds to a layer's input in place after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.second(x)
        return x


def test_an_input_that_is_changed_after_its_use_is_refused() -> None:
    """Plain autograd refuses it too; a gradient from the changed input would be a wrong one."""
    made = Case(ChangesLate, numbers(1, 2, 3), torch.zeros(1, 2))
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
