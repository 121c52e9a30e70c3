"""Published image models: sizes, and clipped sums of whole models against one example at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpsgd_cli.engine import models
from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.layers import Own
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, WrnModel
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Case, numbers

SMALL: dict[str, tuple[Any, tuple[int, ...]]] = {
    "wrn": (WrnModel(depth=10, width=1, groups=4), (2, 8, 8)),
    "cnn-cifar10": (CnnModel(layout="cifar10"), (1, 8, 8)),
}


def build(settings: Any, shape: tuple[int, ...], outputs: int = 3) -> nn.Module:
    return models.builder(settings, shape, outputs, Path())()


def parameters(settings: Any, shape: tuple[int, ...]) -> int:
    return sum(parameter.numel() for parameter in build(settings, shape, 10).parameters())


@pytest.mark.parametrize("name", SMALL)
def test_clipped_sums_of_a_whole_model(name: str) -> None:
    settings, shape = SMALL[name]
    x, y = numbers(2, 3, *shape), torch.tensor([[0, 1, 2], [2, 1, 0]])
    for norm in (0.05, 1e6):
        Case(lambda: build(settings, shape), x, y, norms=(norm,), seeds=(3, 5)).check()
    Case(lambda: build(settings, shape), x[:1], y, norms=(0.05,), seeds=(3, 5), trusted=True, flat=False).check()


@pytest.mark.parametrize("name", SMALL)
def test_every_layer_has_a_rule_of_its_own_and_keeps_examples_apart(name: str) -> None:
    settings, shape = SMALL[name]
    pack = Pack(lambda: build(settings, shape), [0, 1], Placement(torch.device("cpu")), trusted=True)
    assert not any(isinstance(layer, Own) for layer in pack.layers)
    check_model(pack, shape, torch.zeros(()))


def test_published_sizes() -> None:
    assert parameters(CnnModel(layout="cifar10"), (3, 32, 32)) == 550_570
    assert parameters(WrnModel(), (3, 32, 32)) == wide(2)
    assert parameters(WrnModel(depth=40), (3, 32, 32)) == wide(6)


def wide(blocks: int) -> int:
    """Parameters of De et al.'s WRN of width 4 with `blocks` blocks a stage, counted from the description."""
    total, before = 3 * 16 * 9 + 2 * 16, 16
    for filters in (64, 128, 256):
        total += before * filters + 2 * filters + 2 * before  # the shortcut's convolution and normalisation
        for _ in range(blocks):
            total += (before + filters) * filters * 9 + 4 * filters + 2 * (before + filters)
            before = filters
    return total + 2 * 256 + 256 * 10 + 10


@pytest.mark.parametrize("name", SMALL)
def test_a_model_that_is_given_no_image_says_so(name: str) -> None:
    with pytest.raises(ModelError, match=r"needs images .*, but one input is \(5,\); use mlp"):
        build(SMALL[name][0], (5,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "wrn", "depth": 20}, "depth: 20 is not 4 more than a multiple of 6; try 22"),
        ({"kind": "wrn", "groups": 3}, "groups: 3 does not divide"),
    ],
)
def test_sizes_that_fit_no_model_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WrnModel.model_validate(settings)
