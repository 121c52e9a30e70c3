"""Frozen feature extractors, as a first preprocessing step that acts on each record alone.

Guarantee: the extractor is fixed before the training rows are read, so the features of a record depend on that record
only, neighbouring data sets stay neighbouring, and the features cost no privacy. This holds because the extractor is
made from public information: nothing at all (scattering, hog, colour-means), images that a public seed draws (patches),
or numbers that the recipe declares public (pretrained, huggingface). The result's declarations list these.

Features are cached for the user, by the content of the rows and of the extractor. `image_transforms.py`
computes the transforms of images.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional

from dpsgd_cli.common.package_files import files_of
from dpsgd_cli.common.yaml_tree import SourceLocation, read_tree
from dpsgd_cli.data import array_cache as cache
from dpsgd_cli.data.dataset import Layout, Length, Step
from dpsgd_cli.data.extractor_settings import (
    ColourFeatures,
    Extractor,
    HogFeatures,
    HuggingFaceFeatures,
    PatchFeatures,
    PretrainedFeatures,
    ScatteringFeatures,
)
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.image_transforms import Patches, Scattering, hog
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine import bundle, huggingface, models
from dpsgd_cli.engine.settings import Model, PythonModel
from dpsgd_cli.errors import DataError

JOINED_AT_ONCE = 256
ROWS_AT_ONCE = 16
VERSION = 1

Network = Callable[[torch.Tensor], torch.Tensor]


class Extract(Step, stated=False):
    """Step from rows (N, C, side, side) or (N, D) to features. Subclasses define the network."""

    rows_at_once = ROWS_AT_ONCE

    def bounded(self, length: Length, before: Layout) -> Length:
        """Return no bound: a network's features have none that is public."""
        return Length(None, 0.0)

    def __init__(self, settings: Extractor, base: Path) -> None:
        self.settings = settings
        self.base = base

    @property
    def made_from(self) -> dict[str, str]:
        """The SHA-256 of the weights, which distinguishes extractors with the same settings."""
        weights = self.weights()
        return {} if weights is None else {"features": _sha256(weights)}

    def weights(self) -> Path | None:
        """Return the file of the weights, or None if there is none."""
        return None

    @abstractmethod
    def network(self, shape: tuple[int, ...]) -> Network:
        """Return the frozen network for inputs of `shape`. Raises DataError if it does not take them."""

    def plan(self, layout: Layout) -> Layout:
        if layout.columns is not None and layout.categorical:
            raise DataError(f"data.features: {self.settings.kind} takes numbers, not categories")
        probe = torch.zeros(1, *layout.shape, dtype=torch.int64 if layout.integers else torch.float32)
        return Layout(tuple(self._run(self.network(layout.shape), probe).shape[1:]))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        network: list[Network] = []

        def transform(x: np.ndarray) -> np.ndarray:
            nonlocal network
            told = [VERSION, self.settings.model_dump(), self.made_from, x.shape, str(x.dtype)]
            place = cache.place("features", told, [x])
            out = cache.load(place)
            if out is None:
                network = network or [self.network(layout.shape)]
                out = self.extract(network[0], x)
                cache.keep(place, out)
            return out

        return transform

    def extract(self, network: Network, x: np.ndarray) -> np.ndarray:
        """Return the features of rows, float32 (N, ...), without the cache."""
        found = []
        for start in range(0, len(x), self.rows_at_once):
            kind = np.int64 if x.dtype == np.int64 else np.float32  # tokens stay as they are
            block = torch.from_numpy(np.array(x[start : start + self.rows_at_once], kind, order="C"))
            made = self._run(network, block)
            if self.settings.mirror:
                made = (made + self._run(network, block.flip(-1))) / 2
            found.append(made.numpy())
        if not found:
            before = Layout(x.shape[1:], integers=x.dtype == np.int64)
            return np.zeros((0, *self.plan(before).shape), np.float32)
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


def _pooled(maps: torch.Tensor, places: int | None) -> torch.Tensor:
    if places is None:
        return maps
    if maps.dim() != 4:
        raise DataError(f"data.features.pool: one record gives {tuple(maps.shape[1:])}, which has no places to pool")

    return functional.adaptive_avg_pool2d(maps, places)


def _normalised(maps: torch.Tensor, groups: int | None) -> torch.Tensor:
    """Return maps with each record's channels, in groups of neighbours, shifted and scaled to mean 0 and variance 1."""
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


class Scatter(Extract):
    """Wavelet scattering coefficients of square images."""

    settings: ScatteringFeatures
    fitted_on = "nothing"

    def network(self, shape: tuple[int, ...]) -> Network:
        _refuse_other_than_square("scattering", shape, 2 ** (self.settings.scales + 1))
        scattering = Scattering(shape[1], self.settings.scales, self.settings.orientations)

        def run(images: torch.Tensor) -> torch.Tensor:
            found = scattering(images.mean(dim=1, keepdim=True) if self.settings.grey else images)
            return self._unit_orders(found, scattering) if self.settings.unit_orders else found

        return run

    def _unit_orders(self, found: torch.Tensor, scattering: Scattering) -> torch.Tensor:
        """Return the square roots of orders 1 and 2, with each order of a record divided by its norm."""
        by_path = found.reshape(len(found), -1, scattering.paths, *found.shape[2:])
        first = self.settings.orientations * self.settings.scales
        orders = by_path.split([1, first, scattering.paths - 1 - first], dim=2)
        even = [order if number == 0 else order.clamp(min=0).sqrt() for number, order in enumerate(orders)]
        return torch.cat([_unit(order) for order in even], dim=2).reshape(found.shape)


class Likeness(Extract):
    """Similarities of an image's patches to random patches of synthetic images: square roots, at unit norm."""

    settings: PatchFeatures
    fitted_on = "nothing"

    def __init__(self, settings: PatchFeatures, base: Path) -> None:
        super().__init__(settings, base)
        self.declaration = (
            f"The features of random patches are shaped by {settings.images} images that a public seed draws; no image"
            " that anybody took was looked at."
        )

    def network(self, shape: tuple[int, ...]) -> Network:
        _refuse_other_than_square("patches", shape, (self.settings.size + self.settings.pool) * self.settings.shrink)
        patches = Patches(
            (shape[0], shape[1], shape[2]),
            self.settings.patches,
            self.settings.size,
            self.settings.stride,
            self.settings.shrink,
            self.settings.pool,
            self.settings.images,
            self.settings.seed,
        )
        return lambda images: _unit(patches(images).sqrt())


class Hog(Extract):
    """Histograms of oriented gradients."""

    settings: HogFeatures
    fitted_on = "nothing"

    def network(self, shape: tuple[int, ...]) -> Network:
        _refuse_other_than_square("hog", shape, 2 * self.settings.cell)
        return lambda images: _unit(hog(images, self.settings.cell, self.settings.orientations))


class ColourMeans(Extract):
    """Mean colours over a grid."""

    settings: ColourFeatures
    fitted_on = "nothing"

    def network(self, shape: tuple[int, ...]) -> Network:
        _refuse_other_than_square("colour-means", shape, self.settings.pool)
        return lambda images: _unit(functional.adaptive_avg_pool2d(images, self.settings.pool))


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


class Transformer(Extract):
    """A model of transformers: the mean of the last hidden states (N, L, D) of tokens that are no padding, or of an
    image's places."""

    settings: HuggingFaceFeatures
    fitted_on = "nothing"

    def __init__(self, settings: HuggingFaceFeatures, base: Path) -> None:
        super().__init__(settings, base)
        self.folder = base / settings.folder
        self.declaration = f"The features are those of the network in {settings.folder}, which is declared public."

    @property
    def made_from(self) -> dict[str, str]:
        huggingface.check_folder(self.folder, "data.features.folder")
        told = "".join(f"{name}\0{_sha256(self.folder / name)}\n" for name in files_of(self.folder))
        return {"features": hashlib.sha256(told.encode()).hexdigest()}

    def network(self, shape: tuple[int, ...]) -> Network:
        huggingface.check_folder(self.folder, "data.features.folder")
        model = huggingface.frozen(self.folder)

        def mean_state(x: torch.Tensor) -> torch.Tensor:
            if x.dim() > 2:
                states = model(pixel_values=x.float()).last_hidden_state
                # a vision transformer gives (N, places, D), a convolutional network maps (N, D, h, w)
                return states.mean(dim=1) if states.dim() == 3 else states.mean(dim=(-1, -2))
            there = (x >= 0).long()
            states = model(input_ids=x.long().clamp_min(0), attention_mask=there).last_hidden_state
            return (states * there.unsqueeze(-1)).sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)

        return mean_state


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


EXTRACTORS: dict[str, Callable[[Any, Path], Extract]] = {
    "scattering": Scatter,
    "patches": Likeness,
    "hog": Hog,
    "colour-means": ColourMeans,
    "pretrained": Pretrained,
    "huggingface": Transformer,
}


def step_of(data: Data, base: Path) -> Step | None:
    """Return the step that computes `data.features`; None if there are none."""
    parts = [EXTRACTORS[settings.kind](settings, base) for settings in data.extractors]
    return Join(parts) if isinstance(data.features, list) else parts[0] if parts else None


class Join(Step):
    """Concatenation of the features of several extractors, in half precision.

    Acts on each record alone, as each of the extractors does.
    """

    fitted_on = "nothing"
    before_cut = True

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(None, 0.0)

    def __init__(self, parts: list[Extract]) -> None:
        self.parts = parts
        said = dict.fromkeys(part.declaration for part in parts if part.declaration is not None)
        self.declaration = " ".join(said) or None

    @property
    def made_from(self) -> dict[str, str]:
        found = [content for part in self.parts for content in part.made_from.values()]
        return {"features": hashlib.sha256(" ".join(found).encode()).hexdigest()} if found else {}

    def plan(self, layout: Layout) -> Layout:
        return Layout((sum(part.plan(layout).features for part in self.parts),))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        def transform(x: np.ndarray) -> np.ndarray:
            told = [VERSION, [part.settings.model_dump() for part in self.parts], self.made_from, x.shape, str(x.dtype)]
            place = cache.place("features", told, [x])
            out = cache.load(place)
            if out is None:
                out = self._join(layout, x)
                cache.keep(place, out)
            return out

        return transform

    def _join(self, layout: Layout, x: np.ndarray) -> np.ndarray:
        networks = [part.network(layout.shape) for part in self.parts]
        out = np.empty((len(x), *self.plan(layout).shape), np.float16)
        for start in range(0, len(x), JOINED_AT_ONCE):
            block = slice(start, start + JOINED_AT_ONCE)
            found = [part.extract(network, x[block]) for part, network in zip(self.parts, networks, strict=True)]
            out[block] = np.concatenate([one.reshape(len(one), -1) for one in found], axis=1)
        return out


def _refuse_other_than_square(what: str, shape: tuple[int, ...], least: int) -> None:
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < least:
        raise DataError(
            f"data.features: {what} takes square images (channels, side, side) of side {least} or more, but a"
            f" record is {shape}"
        )


def _unit(maps: torch.Tensor) -> torch.Tensor:
    """Return each record's maps divided by their L2 norm; zero stays zero."""
    norms = maps.flatten(1).norm(dim=1).clamp(min=1e-12)
    return maps / norms.reshape(-1, *[1] * (maps.dim() - 1))
