"""Built-in models, including those of published private image classifiers, and loading of a user's own model.

All are ordinary modules without the trials axis (`packing.py`), built from an input shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from dpsgd_cli.common.plugins import load_attribute, refusal_of_call
from dpsgd_cli.engine import huggingface, packing, weights
from dpsgd_cli.engine.apart import where_in
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.named_inputs import NamedInputs
from dpsgd_cli.engine.settings import (
    CnnModel,
    ConvexModel,
    HuggingFaceModel,
    InputArray,
    LinearModel,
    MlpModel,
    Model,
    OwnModel,
    PythonModel,
    WrnModel,
)
from dpsgd_cli.errors import ModelError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}
Builder = Callable[[], nn.Module]
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]


def linear(model: LinearModel | ConvexModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build one dense layer that starts at zero (the usual start of a convex problem)."""
    layer = nn.Linear(math.prod(shape), outputs, bias=model.has_bias)
    nn.init.zeros_(layer.weight)
    if model.has_bias:
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def mlp(model: MlpModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build dense layers with activations between them."""
    widths = [math.prod(shape), *model.hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[model.activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def cnn(model: CnnModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build the small convolutional network called `layout`."""
    return LAYOUTS[model.layout](shape, outputs, ACTIVATIONS[model.activation])


def tanh_mnist(shape: tuple[int, ...], outputs: int, act: type[nn.Module]) -> nn.Module:
    """Build the MNIST network of Papernot et al. (2021, "Tempered sigmoid activations", Table 1), for any image size.

    It has convolutions of 16 8x8 (stride 2, padding 3) and 32 4x4 (stride 2) filters, each followed by 2x2 max-pooling
    with stride 1, then 32 dense units.
    """
    channels, *sides = image_shape("cnn", shape, 14)
    side = [_last_side(s) for s in sides]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3), act(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), act(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * side[0] * side[1], 32), act(), nn.Linear(32, outputs),
    )  # fmt: skip


def _last_side(side: int) -> int:
    """Return the side of the feature map that the dense layers get."""
    first = (side + 2 * 3 - 8) // 2 + 1
    pooled = first - 1
    return (pooled - 4) // 2 + 1 - 1


def image_shape(kind: str, shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """Return `shape` as (channels, height, width).

    Raises ModelError if it has other than 3 axes, or if a side is below `least`.
    """
    if len(shape) != 3:
        raise ModelError(f"model {kind} needs images (channels, height, width), but one input is {shape}; use mlp")
    channels, height, width = shape
    if min(height, width) < least:
        raise ModelError(f"model {kind} needs images of at least {least} x {least}, got {height} x {width}; use mlp")
    return channels, height, width


class Residual(nn.Module):
    """Residual block: activation, normalisation and convolution, twice, added to the input or its 1 x 1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        change = inputs != outputs or stride > 1
        self.skip = _before(inputs, WeightStandardisedConv2d(inputs, outputs, 1, stride), groups) if change else None
        self.path = nn.Sequential(
            *_before(inputs, WeightStandardisedConv2d(inputs, outputs, 3, stride, 1), groups),
            *_before(outputs, WeightStandardisedConv2d(outputs, outputs, 3, 1, 1), groups),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.path(x)
        return y + (x if self.skip is None else self.skip(x))


def _before(inputs: int, layer: nn.Module, groups: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.GroupNorm(groups, inputs), layer)


def wrn(model: WrnModel, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build the wide residual network of De et al. (2022): group normalisation after ReLU, standardised convolutions.

    It has a 3 x 3 convolution of 16 filters, three stages of (depth - 4) / 6 residual blocks, and a dense layer on the
    mean over places. The stages have 16, 32 and 64 times `width` filters; the second and third halve the image. A block
    that changes the number of filters or the size has a 1 x 1 convolution with its own normalisation as shortcut.
    """
    channels, _, _ = image_shape("wrn", shape, 4)
    stages: list[nn.Module] = []
    before = 16
    for stage in range(3):
        filters = 16 * 2**stage * model.width
        for block in range((model.depth - 4) // 6):
            stages.append(Residual(before, filters, 2 if stage and not block else 1, model.groups))
            before = filters
    last = nn.Linear(before, outputs)
    nn.init.normal_(last.weight, std=before**-0.5)
    nn.init.zeros_(last.bias)
    first = WeightStandardisedConv2d(channels, 16, 3, 1, 1)
    head = [nn.ReLU(), nn.GroupNorm(model.groups, before), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last]
    return nn.Sequential(first, *stages, *head)


def tanh_cifar10(shape: tuple[int, ...], outputs: int, act: type[nn.Module]) -> nn.Module:
    """Build three pairs of 3 x 3 convolutions (32, 64, 128 filters), each with max-pooling, then 128 dense units.

    It has 550,570 parameters on CIFAR-10. Papernot et al. (2021), "Tempered sigmoid activations", as in Tramer and
    Boneh (2021), appendix.
    """
    channels, height, width = image_shape("cnn", shape, 8)
    layers: list[nn.Module] = []
    for filters in (32, 64, 128):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), act(), nn.Conv2d(filters, filters, 3, padding=1), act()]
        layers.append(nn.MaxPool2d(2))
        channels = filters
    places = (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * places, 128), act(), nn.Linear(128, outputs))


def python(model: PythonModel, shape: Shape, outputs: int, base: Path) -> Builder:
    """Return a builder that calls the user's factory in the Python file named in the recipe.

    The builder loads `model.weights.file` into each module. Raises ModelError if the factory cannot be called with the
    recipe's arguments; the builder raises it if the factory fails, or if the result is not a module.
    """
    factory = load_attribute(base / model.file, model.factory)
    given = {"input_shape": shape, "outputs": outputs}
    refusal = refusal_of_call(factory, model.factory, given, model.arguments)
    if refusal is not None:
        raise ModelError(f"{model.file}: {refusal}")

    file = None if model.weights is None else model.weights.file
    tensors = {} if file is None else weights.read(base / file)

    def build() -> nn.Module:
        try:
            made = factory(shape, outputs, **model.arguments)
        except Exception as error:
            size = "; input_shape is a tuple, whose size is math.prod(input_shape)" * isinstance(error, TypeError)
            raise ModelError(
                f"{where_in(error, nn.Module())}{model.factory}(input_shape={shape}, outputs={outputs}) failed:"
                f" {type(error).__name__}: {error}{size}"
            ) from error
        if not isinstance(made, nn.Module):
            raise ModelError(
                f"{model.file}: {model.factory}(...) returned {type(made).__name__}, not a torch.nn.Module"
            )
        if file is not None:
            packing.refuse_unfinished(made)
            weights.load(made, tensors, file)
        return made

    return build


LAYOUTS: dict[str, Callable[[tuple[int, ...], int, type[nn.Module]], nn.Module]] = {
    "mnist": tanh_mnist,
    "cifar10": tanh_cifar10,
}
BUILT_IN: dict[str, Callable[..., nn.Module]] = {"linear": linear, "convex": linear, "mlp": mlp, "cnn": cnn, "wrn": wrn}


def loaded_names(model: Model, base: Path) -> list[str]:
    """Return the names of the tensors that `model.weights.file` loads into a model; empty without a file."""
    file = model.weights.file if isinstance(model, PythonModel) and model.weights is not None else None
    return [] if file is None else list(weights.read(base / file))


def builder(
    model: Model, shape: tuple[int, ...], outputs: int, base: Path, inputs: Mapping[str, InputArray] | None = None
) -> Builder:
    """Return a function that builds a newly initialised module for inputs (B, *shape) and `outputs` outputs.

    With named `inputs`, a model gets them as keyword arguments, and a factory their shapes by name.
    """
    if not isinstance(model, OwnModel):
        return lambda: BUILT_IN[model.kind](model, shape, outputs)
    shapes = {name: tuple(told.shape) for name, told in (inputs or {}).items()}
    if isinstance(model, HuggingFaceModel):
        build = huggingface.builder(model, outputs, base)
    else:
        assert isinstance(model, PythonModel)
        build = python(model, shapes or shape, outputs, base)
    whole = frozenset(name for name, told in (inputs or {}).items() if told.kind == "integer")
    return build if not shapes else lambda: NamedInputs(build(), shapes, whole)
