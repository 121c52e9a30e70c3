"""Releases that many tests price: a mechanism of the usual adjacency of its batching, and how often it is used."""

from __future__ import annotations

from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, PureSource, Release


def full(noise: float, count: int = 1) -> Release:
    return Release(GaussianSum(noise, "add-remove"), count)


def shuffled(noise: float, epochs: int = 1) -> Release:
    return Release(GaussianSum(noise, "zero-out", "shuffle"), epochs)


def poisson(rate: float, noise: float, steps: int = 1) -> Release:
    return Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)


def pure(epsilon: float, count: int = 1, source: PureSource = "pure") -> Release:
    return Release(PureDP(epsilon, "add-remove", source), count)
