"""Extractors whose weights are loaded: a torchvision network, or the network of a finished result."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from dpsgd_cli.common.yaml_tree import SourceLocation, read_tree
from dpsgd_cli.data.extract import Extract, Network
from dpsgd_cli.data.settings import PretrainedFeatures, TorchvisionFeatures
from dpsgd_cli.engine import bundle, models
from dpsgd_cli.engine.settings import Model, PythonModel
from dpsgd_cli.errors import DataError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Torchvision(Extract):
    """A torchvision network with weights from a file or torch's cache; nothing is downloaded."""

    settings: TorchvisionFeatures
    fitted_on = "nothing"

    def __init__(self, settings: TorchvisionFeatures, base: Path) -> None:
        super().__init__(settings, base)
        self.declaration = (
            f"The features are those of torchvision's {settings.network}, whose training data (ImageNet) are public."
        )

    def weights(self) -> Path:
        if self.settings.weights is not None:
            path = self.base / self.settings.weights
            if not path.is_file():
                raise DataError(f"data.features.weights: {path} does not exist")
            return path
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        found = sorted(folder.glob(f"{self.settings.network}-*.pth"))
        if not found:
            raise DataError(
                f"data.features: no weights of {self.settings.network} in {folder}; fetch them once with `python -c"
                f" \"import torchvision; torchvision.models.get_model('{self.settings.network}', weights='DEFAULT')\"`,"
                " or give data.features.weights"
            )
        return found[0]

    def network(self, shape: tuple[int, ...]) -> Network:
        try:
            import torchvision  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise DataError("data.features: torchvision is not installed; pip install torchvision") from None
        if len(shape) != 3 or shape[0] != 3:
            raise DataError(f"data.features: torchvision networks take colour images (3, height, width), not {shape}")
        try:
            whole = torchvision.models.get_model(self.settings.network, weights=None)
            state = torch.load(self.weights(), map_location="cpu", weights_only=True)
            whole.load_state_dict(state)
            part = whole.get_submodule(self.settings.part)
        except (ValueError, RuntimeError, AttributeError, KeyError, OSError) as error:
            raise DataError(f"data.features: {self.settings.network}.{self.settings.part}: {error}") from error
        part.eval().requires_grad_(False)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))

        def run(images: torch.Tensor) -> torch.Tensor:
            x = (images - mean) / std
            if self.settings.side is not None:
                side = (self.settings.side, self.settings.side)
                x = torch.nn.functional.interpolate(x, side, mode="bilinear", antialias=True)
            out: torch.Tensor = part(x)
            return out

        return run


class Pretrained(Extract):
    """The network of a finished result, without its last layer with parameters."""

    settings: PretrainedFeatures
    fitted_on = "nothing"
    rows_at_once = 256

    def __init__(self, settings: PretrainedFeatures, base: Path) -> None:
        super().__init__(settings, base)
        self.declaration = (
            f"The features are those of the network in {settings.result}, trained on data that are declared public."
        )

    def weights(self) -> Path:
        return self.base / self.settings.result / bundle.NAME

    def network(self, shape: tuple[int, ...]) -> Network:
        weights, folder = self.weights(), self.weights().parent
        if not weights.is_file():
            raise DataError(
                f"data.features.result: {folder} holds no {bundle.NAME}; train that recipe with save_model: true first"
            )
        model = _model_of(folder / "recipe.yaml")
        own = bundle.read(weights).weights[0]
        outputs = len(list(own.values())[-1])
        whole = models.builder(model, shape, outputs, folder)()
        try:
            whole.load_state_dict(own)
        except RuntimeError as error:
            raise DataError(f"data.features.result: {folder}: the network does not fit {shape}: {error}") from error
        assert isinstance(whole, torch.nn.Sequential)  # every built-in model is
        return whole[:-1].eval().requires_grad_(False)


def _model_of(recipe: Path) -> Model:
    """Return the `model:` section of a result's recipe; DataError if it cannot be read, or names a user's own class."""
    tree, problems = read_tree(recipe.read_text(encoding="utf-8"), SourceLocation(str(recipe), 1))
    section = None if tree is None or problems else tree.child("model")
    try:
        model: Model = TypeAdapter(Model).validate_python(None if section is None else section.plain())
    except ValidationError as error:
        raise DataError(f"data.features.result: {recipe} names no model: {error}") from None
    if isinstance(model, PythonModel):
        raise DataError(f"data.features.result: {recipe}: only built-in models can be cut before their last layer")
    return model
