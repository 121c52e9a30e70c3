"""Frozen feature extractors, as a first preprocessing step that acts on each record alone.

Guarantee: the extractor is fixed before the training rows are read, so the features of a record depend on that record
only, neighbouring data sets stay neighbouring, and the features cost no privacy. This holds because the extractor is
made from public information: nothing at all (scattering, hog, colour-means), images that a public seed draws (patches),
ImageNet (torchvision), or data that the recipe declares public (pretrained). The result's declarations list the last
three.

Features are cached for the user, by the content of the rows and of the extractor. `data/scattering.py`,
`data/patches.py` and `data/hog.py` compute the transforms; `loaded_features.py` has networks with weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dpsgd_cli.data import array_cache as cache
from dpsgd_cli.data.dataset import Layout, Length, Step, Transform
from dpsgd_cli.data.extract import VERSION, Extract, Network
from dpsgd_cli.data.hog import hog
from dpsgd_cli.data.loaded_features import Pretrained, Torchvision
from dpsgd_cli.data.patches import Patches
from dpsgd_cli.data.scattering import Scattering
from dpsgd_cli.data.settings import ColourFeatures, Data, HogFeatures, PatchFeatures, ScatteringFeatures
from dpsgd_cli.errors import DataError

JOINED_AT_ONCE = 256


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


EXTRACTORS: dict[str, Callable[[Any, Path], Extract]] = {
    "scattering": Scatter,
    "patches": Likeness,
    "hog": Hog,
    "colour-means": ColourMeans,
    "torchvision": Torchvision,
    "pretrained": Pretrained,
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
            told = [VERSION, [part.settings.model_dump() for part in self.parts], self.made_from, x.shape]
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
