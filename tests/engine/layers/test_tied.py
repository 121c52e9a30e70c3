"""Weights that several layers share: one gradient, with the products of all contributions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.engine.layers import Tied
from tests.engine.conftest import Case, Of, numbers


class Dense(nn.Module):
    """Two dense layers of one weight, the first with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Language(nn.Module):
    """An embedding that is also the head, called for several tokens, of which one is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, padding_idx=1), nn.Linear(3, 5)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.table(x)).cumsum(1))
        return y


class Mixed(nn.Module):
    """A gain of two normalisations, and a matrix that is a layer's weight and used in code of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.layer = nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.matrix = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.one(x)) * self.other(x) + torch.sin(self.matrix).sum(0)
        return y + x @ self.matrix


def twice(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.layer(torch.tanh(m.layer(x)))
    return y


SHARED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "two dense layers": (Dense, numbers(2, 3, 4)),
    "two dense layers on sequences": (Dense, numbers(2, 3, 6, 4)),
    "embedding and head": (Language, torch.tensor([[[0, 2, 1, 2], [1, 1, 1, 1], [4, 3, 0, 0]]])),
    "a gain and a matrix": (Mixed, numbers(2, 3, 4)),
    "one layer called twice": (lambda: Of(twice, layer=nn.Linear(4, 4)), numbers(2, 3, 4)),
}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_sums_equal_one_example_at_a_time(name: str, flat: bool) -> None:
    build, x = SHARED[name]
    names = [n for n, _ in build().named_parameters()]
    shared = {"a gain and a matrix": [["one.weight", "one.bias"], ["layer.weight", "layer.bias"]]}
    groups = shared.get(name, [names])
    for norm in (0.05, 1e6):
        case = Case(build, x, torch.arange(3)[None] % 2, norms=(norm,), flat=flat, seeds=range(len(x)), groups=groups)
        if name != "a gain and a matrix" or flat:
            case.check()


def test_cross_terms_count() -> None:
    """Two calls that add the same gradient: the norm is 2 |g|, not sqrt(2) |g|."""

    def both(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.one(x) + m.two(x)
        return y

    def build() -> nn.Module:
        made = Of(both, one=nn.Linear(2, 1, bias=False), two=nn.Linear(2, 1, bias=False))
        made.two.weight = made.one.weight  # type: ignore[union-attr]
        return made

    pack = Case(build, torch.tensor([[[3.0, 4.0]]]).double(), torch.zeros(1, 1)).pack()
    (group,) = pack.layers
    assert isinstance(group, Tied)
    pack.session.begin()
    pack(torch.tensor([[[3.0, 4.0]]]).double()).sum().backward()
    assert float(group.square_norms()[0, 0]) == pytest.approx(4 * 25, rel=1e-6)


def test_tied_weights_are_one_parameter() -> None:
    pack = Case(Language, torch.zeros(1, 1, 2).long(), torch.zeros(1, 1)).pack()
    assert list(pack.spans) == ["table.weight", "head.bias"] and pack.size == 5 * 3 + 5
    assert pack.group_of.unique().tolist() == [0] and len(pack.layers) == 1
    alone = copy.deepcopy(pack.values)
    assert torch.equal(alone, pack.values)
