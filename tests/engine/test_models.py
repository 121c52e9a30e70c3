"""Built-in models have the published sizes; own models come from their file, or say what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpsgd_cli.engine import models
from dpsgd_cli.engine.settings import CnnModel, LinearModel, MlpModel, PythonModel
from dpsgd_cli.errors import ModelError, RecipeError

HERE = Path()


def build(settings: Any, shape: tuple[int, ...], outputs: int, base: Path = HERE) -> nn.Module:
    return models.builder(settings, shape, outputs, base)()


def sizes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in module.parameters()]


def test_cnn_has_the_published_layers() -> None:
    """26,010 parameters on MNIST, as in Papernot et al.: 16 filters of 8 x 8, 32 of 4 x 4, 512 -> 32 -> 10."""
    made = build(CnnModel(), (1, 28, 28), 10)
    assert sizes(made) == [(16, 1, 8, 8), (16,), (32, 16, 4, 4), (32,), (32, 512), (32,), (10, 32), (10,)]
    assert sum(parameter.numel() for parameter in made.parameters()) == 26_010
    strides = [layer.stride for layer in made if isinstance(layer, nn.Conv2d)]  # type: ignore[attr-defined]
    assert strides == [(2, 2), (2, 2)]
    assert sum(isinstance(layer, nn.Tanh) for layer in made.modules()) == 3


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 14, 14), (1, 15, 40)])
def test_cnn_takes_images_of_any_size(shape: tuple[int, ...]) -> None:
    assert build(CnnModel(), shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("shape", "message"), [((784,), "needs images"), ((1, 13, 28), "at least 14 x 14, got 13 x 28")]
)
def test_cnn_refuses_what_is_no_image(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message + ".*use mlp"):
        build(CnnModel(), shape, 10)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_starts_at_zero(bias: bool) -> None:
    made = build(LinearModel(bias=bias), (2, 3), 4)
    assert sizes(made) == ([(4, 6), (4,)] if bias else [(4, 6)])
    assert not made(torch.ones(5, 2, 3)).any()


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
def test_mlp_has_its_activation_between_its_layers(activation: Any) -> None:
    made = build(MlpModel(hidden=[5, 3], activation=activation), (2, 3), 4)
    kinds = [
        nn.Flatten,
        nn.Linear,
        models.ACTIVATIONS[activation],
        nn.Linear,
        models.ACTIVATIONS[activation],
        nn.Linear,
    ]
    assert [type(layer) for layer in made.children()] == kinds
    assert sizes(made) == [(5, 6), (5,), (3, 5), (3,), (4, 3), (4,)]


OWN = """
from torch import nn

def build(input_shape, outputs, width):
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Linear(width, outputs))

def wrong(input_shape, outputs):
    return input_shape

def noargs():
    return nn.Linear(1, 1)

def anything(input_shape, outputs, **sizes):
    return nn.Linear(input_shape[0], outputs)

number = 3
"""


def own(folder: Path, factory: str, arguments: dict[str, int]) -> nn.Module:
    (folder / "own.py").write_text(OWN)
    settings = PythonModel(kind="python", file="own.py", factory=factory, arguments=arguments)
    return build(settings, (5,), 2, folder)


def test_an_own_model_gets_shape_outputs_and_arguments(tmp_path: Path) -> None:
    assert sizes(own(tmp_path, "build", {"width": 8})) == [(8, 5), (8,), (2, 8), (2,)]
    assert sizes(own(tmp_path, "anything", {"wdth": 3})) == [(2, 5), (2,)]


def test_an_own_model_in_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such Python file"):
        build(PythonModel(kind="python", file="none.py"), (5,), 2, tmp_path)
