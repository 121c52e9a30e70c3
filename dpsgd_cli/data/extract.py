"""Base class of feature extractors: rows go through a frozen network, each on its own, and features are cached."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dpsgd_cli.data import array_cache as cache
from dpsgd_cli.data.dataset import Layout, Length, Step, Transform
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.settings import Extractor
from dpsgd_cli.errors import DataError

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
                out = self.extract(network[0], x)
                cache.keep(place, out)
            return out

        return transform

    def extract(self, network: Network, x: np.ndarray) -> np.ndarray:
        """Return the features of rows, float32 (N, ...), without the cache."""
        found = []
        for start in range(0, len(x), self.rows_at_once):
            block = torch.from_numpy(np.array(x[start : start + self.rows_at_once], np.float32, order="C"))
            made = self._run(network, block)
            if self.settings.mirror:
                made = (made + self._run(network, block.flip(-1))) / 2
            found.append(made.numpy())
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


def _pooled(maps: torch.Tensor, places: int | None) -> torch.Tensor:
    if places is None:
        return maps
    if maps.dim() != 4:
        raise DataError(f"data.features.pool: one record gives {tuple(maps.shape[1:])}, which has no places to pool")

    return torch.nn.functional.adaptive_avg_pool2d(maps, places)


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
