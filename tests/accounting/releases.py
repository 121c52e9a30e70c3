"""Releases that many tests price: a mechanism of the usual adjacency of its batching, and how often; losses as dots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpsgd_cli.accounting.losses import Losses, Pair
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, PureDP, PureSource, Release


def full(noise: float, count: int = 1) -> Release:
    return Release(GaussianSum(noise, "add-remove"), count)


def shuffled(noise: float, epochs: int = 1) -> Release:
    return Release(GaussianSum(noise, "zero-out", "shuffle"), epochs)


def poisson(rate: float, noise: float, steps: int = 1) -> Release:
    return Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)


def pure(epsilon: float, count: int = 1, source: PureSource = "pure") -> Release:
    return Release(PureDP(epsilon, "add-remove", source), count)


class Dots(NamedTuple):
    """Masses on the losses cells * width, and the mass of infinite loss."""

    cells: np.ndarray
    masses: np.ndarray
    infinite: float


class DotPair(NamedTuple):
    remove: Dots
    add: Dots


def dots(losses: Losses, width: float) -> Dots:
    low, high, upper = losses.dots(width)
    cells, places = np.unique(np.concatenate([low, high]), return_inverse=True)
    masses = np.bincount(places, weights=np.concatenate([losses.masses - upper, upper]))
    return Dots(cells, masses, losses.infinite)


def dots_of(pair: Pair, width: float) -> DotPair:
    """Both directions; one object if they are equal."""
    remove = dots(pair[0], width)
    return DotPair(remove, remove if pair[0] is pair[1] else dots(pair[1], width))


def discretise(mechanism: Mechanism, width: float) -> DotPair:
    pair = mechanism.losses()
    assert pair is not None
    return dots_of(pair, width)
