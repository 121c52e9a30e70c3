"""Frozen feature extractors, as a first preprocessing step that acts on each record alone.

Guarantee: the extractor is fixed before the training rows are read, so the features of a record depend on that record
only, neighbouring data sets stay neighbouring, and the features cost no privacy. This holds because the extractor is
made from public information: nothing at all (scattering), or a network that the recipe declares public (pretrained).
The result's declarations list these.

Features are cached for the user, by the content of the rows and of the extractor. They may be private, so only their
owner may read them. A cache that cannot be read or written costs time, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional

from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.whole_files import writing
from dpsgd_cli.common.yaml_tree import SourceLocation, read_tree
from dpsgd_cli.data.dataset import Layout, Length, Step
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.step_settings import (
    Extractor,
    Features,
    PretrainedFeatures,
    ScatteringFeatures,
)
from dpsgd_cli.engine import bundle, models
from dpsgd_cli.engine.settings import Model, PythonModel
from dpsgd_cli.errors import DataError

_WIDTH = 0.8
_FREQUENCY = 3 * math.pi / 4


@dataclass(frozen=True)
class Scattering:
    """Wavelet scattering transform to order 2 of images (B, C, side, side), with J = `scales` and L = `orientations`.

    Coefficients of one channel: 1 average, L J of order 1, L^2 J (J - 1) / 2 of order 2, each on a grid of side / 2^J
    points per side. They scale with the image. They change by at most as much as the image does (in L2, to rounding).

    Source: Bruna and Mallat 2013, "Invariant scattering convolution networks". Filters and padding are those of Kymatio
    (Andreux et al. 2020, JMLR 21(60)), so published settings have the same meaning.
    """

    side: int
    scales: int = 2
    orientations: int = 8

    @property
    def paths(self) -> int:
        """Number of coefficients of one channel at one grid point."""
        second = self.orientations**2 * self.scales * (self.scales - 1) // 2
        return 1 + self.orientations * self.scales + second

    @property
    def grid(self) -> int:
        """Number of grid points per side."""
        return self.side // 2**self.scales

    @property
    def padded(self) -> int:
        """Side of the padded image, with reflected pixels around it."""
        unit = 2**self.scales
        return ((self.side + unit) // unit + 1) * unit

    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, C, side, side) to (B, C * paths, grid, grid): orders 0, 1 and 2 within each channel."""
        batch, channels = images.shape[:2]
        flat = images.reshape(batch * channels, 1, self.side, self.side)
        before = (self.padded - self.side) // 2
        after = self.padded - self.side - before
        x = functional.pad(flat, (before, after, before, after), mode="reflect").squeeze(1)
        found = [self._average(x, 0)[:, None], *self._higher(x)]
        return torch.cat(found, dim=1).reshape(batch, channels * self.paths, self.grid, self.grid)

    def _higher(self, x: Tensor) -> list[Tensor]:
        first: list[Tensor] = []
        second: list[Tensor] = []
        spectrum = torch.fft.fft2(x)
        for j in range(self.scales):
            envelope = self._envelope(spectrum[:, None], j, 0)
            first.append(self._average(envelope, j))
            inner = torch.fft.fft2(envelope)
            for k in range(j + 1, self.scales):
                deeper = self._envelope(inner[:, :, None], k, j)
                second.append(self._average(deeper, k).flatten(1, 2))
        return [*first, *second]

    def _envelope(self, spectrum: Tensor, scale: int, at: int) -> Tensor:
        """Return |x * psi_scale| of every orientation at every 2^scale-th pixel, from the spectrum of x at `at`."""
        filters = _wavelets(self.padded, scale, self.orientations, at).to(spectrum.device)
        return torch.fft.ifft2(_fold(spectrum * filters, 2 ** (scale - at))).abs()

    def _average(self, x: Tensor, at: int) -> Tensor:
        """Return the low-pass of x (at scale `at`) on the grid, by two matrix products: the Gaussian is separable."""
        rows = _low_pass(self, at).to(x)
        return rows @ x @ rows.T


def _fold(spectrum: Tensor, step: int) -> Tensor:
    """Return the spectrum of every `step`-th point: the mean of the spectrum's aliases."""
    if step == 1:
        return spectrum
    *front, height, width = spectrum.shape
    return spectrum.reshape(*front, step, height // step, step, width // step).mean(dim=(-4, -2))


@functools.lru_cache(maxsize=64)
def _wavelets(side: int, scale: int, orientations: int, at: int) -> Tensor:
    """Return the Fourier transforms (L, side / 2^at, side / 2^at), real, of the Morlet wavelets of one scale."""
    width, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
    made = []
    for index in range(orientations):
        angle = (orientations - orientations // 2 - 1 - index) * math.pi / orientations
        slant = 4.0 / orientations
        wave, bump = (_gabor(side, width, angle, f, slant) for f in (frequency, 0.0))
        made.append(np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real)
    filters = _fold(torch.from_numpy(np.stack(made)), 2**at) * 4**at if at else torch.from_numpy(np.stack(made))
    return filters.to(torch.float32)


def _gabor(side: int, width: float, angle: float, frequency: float, slant: float) -> np.ndarray:
    """Return an elongated Gaussian times a complex sinusoid, wrapped around the (side, side) torus."""
    wrapped = np.zeros((side, side), complex)
    for down, right in itertools.product(range(-2, 3), repeat=2):
        y, x = np.mgrid[down * side : (down + 1) * side, right * side : (right + 1) * side].astype(float)
        along = y * math.cos(angle) + x * math.sin(angle)
        across = -y * math.sin(angle) + x * math.cos(angle)
        wrapped += np.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2) + 1j * frequency * along)
    return np.asarray(wrapped * slant / (2 * math.pi * width**2))


@functools.lru_cache(maxsize=16)
def _low_pass(shape: Scattering, at: int) -> Tensor:
    """Return the matrix (grid, padded / 2^at) of periodic smoothing with the widest Gaussian and subsampling.

    Subsampling keeps every 2^(J - at)-th point and crops the padding.
    """
    side, step = shape.padded, 2**shape.scales
    width = _WIDTH * 2 ** (shape.scales - 1)
    distance = np.arange(side) + side * np.arange(-2, 3)[:, None]
    kernel = np.exp(-(distance**2) / (2 * width**2)).sum(axis=0) / math.sqrt(2 * math.pi * width**2)
    spectrum = np.fft.fft(kernel).real
    small = np.fft.ifft(spectrum.reshape(2**at, -1).mean(axis=0) * 2**at if at else spectrum).real
    points = len(small)
    places = (np.arange(side // step) * (step // 2**at))[1 : 1 + shape.grid]
    matrix = small[(places[:, None] - np.arange(points)) % points]
    return torch.from_numpy(matrix).to(torch.float32)


ROWS_AT_ONCE = 16
VERSION = 1
MOST_KEPT_BYTES = 4_000_000_000

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

    @abstractmethod
    def network(self, shape: tuple[int, ...]) -> Network:
        """Return the frozen network for inputs of `shape`. Raises DataError if it does not take them."""

    def plan(self, layout: Layout) -> Layout:
        if layout.columns is not None and layout.categorical:
            raise DataError(f"data.features: {self.settings.kind} takes numbers, not categories")
        return Layout(tuple(self._run(self.network(layout.shape), torch.zeros(1, *layout.shape)).shape[1:]))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        network: list[Network] = []

        def transform(x: np.ndarray) -> np.ndarray:
            nonlocal network
            told = [VERSION, self.settings.model_dump(), self.made_from, x.shape, str(x.dtype)]
            name = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
            name.update(np.ascontiguousarray(x).data)
            place = cache_folder() / "features" / f"{name.hexdigest()[:32]}.npy"
            with contextlib.suppress(OSError, ValueError, EOFError):
                return np.asarray(np.load(place, allow_pickle=False))
            network = network or [self.network(layout.shape)]
            out = self.extract(network[0], x)
            if out.nbytes <= MOST_KEPT_BYTES:
                _keep(place, out)
            return out

        return transform

    def extract(self, network: Network, x: np.ndarray) -> np.ndarray:
        """Return the features of rows, float32 (N, ...), without the cache."""
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


def _keep(place: Path, features: np.ndarray) -> None:
    """Write features, which may be private, for the next run of this user alone, if they can be written."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with writing(place, owner_only=True) as file:
            np.save(file, features)


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


class Scatter(Extract):
    """Wavelet scattering coefficients of square images."""

    settings: ScatteringFeatures
    fitted_on = "nothing"

    def network(self, shape: tuple[int, ...]) -> Network:
        least = 2 ** (self.settings.scales + 1)
        if len(shape) != 3 or shape[1] != shape[2] or shape[1] < least:
            raise DataError(
                f"data.features: scattering takes square images (channels, side, side) of side {least} or more, but a"
                f" record is {shape}"
            )
        return Scattering(shape[1], self.settings.scales, self.settings.orientations)


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

        self.weights = base / settings.result / bundle.NAME

    @property
    def made_from(self) -> dict[str, str]:
        """The SHA-256 of the weights, which distinguishes extractors with the same settings."""
        try:
            return {"features": sha256(self.weights)}
        except OSError as error:
            raise DataError(f"data.features: {self.weights}: {error.strerror}") from None

    def network(self, shape: tuple[int, ...]) -> Network:
        folder = self.weights.parent
        if not self.weights.is_file():
            raise DataError(
                f"data.features.result: {folder} holds no {bundle.NAME}; train that recipe with save_model: true first"
            )
        model = _model_of(folder / "recipe.yaml")
        own = bundle.read(self.weights).weights[0]
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


EXTRACTORS: dict[str, Callable[[Any, Path], Extract]] = {
    "scattering": Scatter,
    "pretrained": Pretrained,
}


def step_of(settings: Features, base: Path) -> Extract:
    """Return the step that computes the features."""
    return EXTRACTORS[settings.kind](settings, base)
