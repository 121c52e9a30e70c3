"""Prices that are asked for again and again, remembered: the cells of a sweep, and most trials, release alike.

Not here: how anything is priced (`privacy/accountants/`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.base import number
from dpsgd_cli.privacy.mechanism import GaussianSum, Release, merge


def unscaled(release: Release) -> Release:
    """The same release in units of its sensitivity, which is all that a price depends on."""
    mechanism = release.mechanism
    if not isinstance(mechanism, GaussianSum) or mechanism.sensitivity == 1.0:
        return release
    return Release(dataclasses.replace(mechanism, sensitivity=1.0), release.count)


def epsilon(accountant: str, releases: Sequence[Release], delta: float) -> float:
    """Epsilon at `delta` of everything released, as `accountant` states it; inf when there is none."""
    return _epsilon(accountant, tuple(merge([unscaled(release) for release in releases])), delta)


def curve(accountant: str, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
    """Epsilon at `delta` after each epoch."""
    return list(_curve(accountant, tuple(tuple(map(unscaled, releases)) for releases in epochs), delta))


@functools.lru_cache(maxsize=256)
def _epsilon(accountant: str, releases: tuple[Release, ...], delta: float) -> float:
    named = accountants.get(accountant)
    return number(named, lambda: named.epsilon(releases, delta))


@functools.lru_cache(maxsize=64)
def _curve(accountant: str, epochs: tuple[tuple[Release, ...], ...], delta: float) -> tuple[float, ...]:
    return tuple(accountants.get(accountant).curve(epochs, delta))
