"""Built-in models, and the hook for a user's own: functions from an input shape to a module.

Not here: the trials axis (`packing.py`), the larger image models (`vision.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dpsgd_cli.core import vision
from dpsgd_cli.errors import ModelError
from dpsgd_cli.plugins import load_attribute, refusal_of_call
from dpsgd_cli.recipe.schema.model import CnnModel, ConvexModel, LinearModel, MlpModel, Model, PythonModel

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}
Builder = Callable[[], nn.Module]


def linear(model: LinearModel | ConvexModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One dense layer that starts at zero (the usual start of a convex problem)."""
    layer = nn.Linear(math.prod(shape), outputs, bias=model.bias)
    nn.init.zeros_(layer.weight)
    if model.bias:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(model: MlpModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Dense layers with an activation between them."""
    widths = [math.prod(shape), *model.hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[model.activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(model: CnnModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A small convolutional network, by `layout`."""
    return LAYOUTS[model.layout](shape, outputs, ACTIVATIONS[model.activation])


def tanh_mnist(shape: tuple[int, ...], outputs: int, act: type[nn.Module]) -> nn.Module:
    """The MNIST network of Papernot et al. (2021, "Tempered sigmoid activations", Table 1), for any image size.

    Convolutions of 16 8x8 (stride 2, padding 3) and 32 4x4 (stride 2) filters, each followed by 2x2
    max-pooling of stride 1, then 32 dense units.
    """
    channels, *sides = vision.image_shape("cnn", shape, 14)
    side = [_last_side(s) for s in sides]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3), act(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), act(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * side[0] * side[1], 32), act(), nn.Linear(32, outputs),
    )  # fmt: skip


def _last_side(side: int) -> int:
    """Side of the feature map that reaches the dense layers."""
    first = (side + 2 * 3 - 8) // 2 + 1
    pooled = first - 1
    return (pooled - 4) // 2 + 1 - 1


def python(model: PythonModel, shape: tuple[int, ...], outputs: int, base: Path) -> Builder:
    """The user's own factory from a Python file named in the recipe."""
    factory = load_attribute(base / model.file, model.factory)
    given = {"input_shape": shape, "outputs": outputs}
    refusal = refusal_of_call(factory, model.factory, given, model.arguments)
    if refusal is not None:
        raise ModelError(f"{model.file}: {refusal}")

    def build() -> nn.Module:
        made = factory(shape, outputs, **model.arguments)
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"{model.file}: {model.factory}(...) returned {type(made).__name__}, not a torch.nn.Module"
            )
        return made

    return build


LAYOUTS: dict[str, Callable[[tuple[int, ...], int, type[nn.Module]], nn.Module]] = {
    "mnist": tanh_mnist,
    "cifar10": vision.tanh_cifar10,
    "scattering-mnist": vision.scattering_mnist,
    "scattering-cifar10": vision.scattering_cifar10,
}
BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "convex": linear,
    "mlp": mlp,
    "cnn": cnn,
    "wrn": vision.wrn,
    "vit": vision.vit,
}


def builder(model: Model, shape: tuple[int, ...], outputs: int, base: Path) -> Builder:
    """A function that makes one freshly initialised module for inputs (B, *shape) and `outputs` outputs."""
    if isinstance(model, PythonModel):
        return python(model, shape, outputs, base)
    return lambda: BUILT_IN[model.kind](model, shape, outputs)
