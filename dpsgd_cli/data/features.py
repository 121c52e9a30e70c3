"""Frozen feature extractors, as a first preprocessing step that acts on each record alone.

Guarantee: the extractor is fixed before the training rows are read, so what it makes of a record depends on that
record only, neighbouring data sets stay neighbouring, and the features cost nothing. That holds because what it was
made from is public: nothing at all (scattering), ImageNet (torchvision), or data that the recipe declares public
(pretrained). The last two are listed among the result's declarations.

Features of data that do not change are kept in the user's cache, by the content of the rows and of the extractor.
Not here: the scattering transform itself (`core/scattering.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsgd_cli import kept as cache
from dpsgd_cli.core import bundle, models
from dpsgd_cli.core.scattering import Scattering
from dpsgd_cli.data.dataset import Layout, Step, Transform
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.recipe.schema.data import (
    Extractor,
    PretrainedFeatures,
    ScatteringFeatures,
    TorchvisionFeatures,
)

ROWS_AT_ONCE = 16
VERSION = 1
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Network = Callable[[torch.Tensor], torch.Tensor]


class Extract(Step):
    """Rows (N, C, side, side) or (N, D) to features. Subclasses bring the network."""

    rows_at_once = ROWS_AT_ONCE

    def __init__(self, settings: Extractor, base: Path) -> None:
        self.settings = settings
        self.base = base

    @property
    def made_from(self) -> dict[str, str]:
        """Of its weights, which tells it from any other of the same settings."""
        weights = self.weights()
        return {} if weights is None else {"features": _sha256(weights)}

    def weights(self) -> Path | None:
        """The file that it is loaded from, if it is."""
        return None

    @abstractmethod
    def network(self, shape: tuple[int, ...]) -> Network:
        """The frozen network for inputs of `shape`; DataError when it does not take them."""

    def plan(self, layout: Layout) -> Layout:
        if layout.columns is not None and layout.categorical:
            raise DataError(f"data.features: {self.settings.kind} takes numbers, not categories")
        probe = torch.zeros(1, *layout.shape)
        return Layout(tuple(self._run(self.network(layout.shape), probe).shape[1:]))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        network: list[Network] = []

        def transform(x: np.ndarray) -> np.ndarray:
            place = cache.place("features", [VERSION, self.settings.model_dump(), self.made_from, x.shape], [x])
            out = cache.load(place)
            if out is None:
                if not network:
                    network.append(self.network(layout.shape))
                out = self._extract(network[0], x)
                cache.keep(place, out)
            return out

        return transform

    def _extract(self, network: Network, x: np.ndarray) -> np.ndarray:
        found = []
        for start in range(0, len(x), self.rows_at_once):
            block = torch.from_numpy(np.array(x[start : start + self.rows_at_once], np.float32, order="C"))
            found.append(self._run(network, block).numpy())
        if not found:
            return np.zeros((0, *self.plan(Layout(x.shape[1:])).shape), np.float32)
        return np.concatenate(found)

    def _run(self, network: Network, block: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            try:
                maps = network(block)
            except (RuntimeError, ValueError, IndexError) as error:
                raise DataError(
                    f"data.features: the network does not take inputs of shape {tuple(block.shape[1:])}: {error}"
                ) from error
            return _normalised(_pooled(maps, self.settings.pool), self.settings.groups)


class Scatter(Extract):
    """Wavelet scattering coefficients of square images."""

    settings: ScatteringFeatures

    def network(self, shape: tuple[int, ...]) -> Network:
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] < 2 ** (self.settings.scales + 1):
            least = 2 ** (self.settings.scales + 1)
            raise DataError(
                f"data.features: scattering takes square images (channels, side, side) of side {least} or more, but a"
                f" record is {shape}"
            )
        return Scattering(shape[1], self.settings.scales, self.settings.orientations)


class Torchvision(Extract):
    """A torchvision network with weights from a file or torch's cache; nothing is downloaded."""

    settings: TorchvisionFeatures

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
        loaded = load_recipe(str(folder / "recipe.yaml"))
        own = bundle.read(weights).weights[0]
        outputs = len(list(own.values())[-1])
        whole = models.builder(loaded.recipe.model, shape, outputs, loaded.base)()
        try:
            whole.load_state_dict(own)
        except RuntimeError as error:
            raise DataError(f"data.features.result: {folder}: the network does not fit {shape}: {error}") from error
        if not isinstance(whole, torch.nn.Sequential):
            raise DataError(f"data.features.result: {folder}: only built-in models can be cut before their last layer")
        return whole[:-1].eval().requires_grad_(False)


EXTRACTORS: dict[str, Callable[[Any, Path], Extract]] = {
    "scattering": Scatter,
    "torchvision": Torchvision,
    "pretrained": Pretrained,
}


def _pooled(maps: torch.Tensor, places: int | None) -> torch.Tensor:
    if places is None:
        return maps
    if maps.dim() != 4:
        raise DataError(f"data.features.pool: one record gives {tuple(maps.shape[1:])}, which has no places to pool")

    return torch.nn.functional.adaptive_avg_pool2d(maps, places)


def _normalised(maps: torch.Tensor, groups: int | None) -> torch.Tensor:
    """Each record's channels, in groups of neighbours, shifted and scaled to mean 0 and variance 1."""
    if groups is None:
        return maps
    if maps.shape[1] % groups:
        raise DataError(f"data.features.groups: {maps.shape[1]} channels cannot be cut into {groups} equal groups")
    grouped = maps.reshape(len(maps), groups, math.prod(maps.shape[1:]) // groups)
    grouped = grouped - grouped.mean(dim=2, keepdim=True)
    return (grouped / (grouped.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()).reshape(maps.shape)


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise DataError(f"data.features: {path}: {error.strerror}") from None
