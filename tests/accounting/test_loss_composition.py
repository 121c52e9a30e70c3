"""Sums of losses by tilted Fourier transforms against plain convolution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting.dominating_pairs import LossMasses
from dpsgd_cli.accounting.loss_composition import Composer, _fast_length, _shortfalls
from dpsgd_cli.accounting.noise_levels import Levels

WIDTH = 0.1
COIN = LossMasses(np.array([-4, 5]), np.array([0.4, 0.6]), 0.0)
SKEW = LossMasses(np.array([-2, 0, 9, 30]), np.array([0.5, 0.45, 0.0499, 0.0001]), 1e-9)
ALONE = Levels([], np.arange(2), np.arange(2), np.ones(2))
"""Two levels, each of which is one kind."""


def convolved(kinds: list[LossMasses], counts: list[int]) -> tuple[int, np.ndarray, float]:
    """First cell, masses and infinite mass of the sum, one np.convolve a use."""
    first, masses, safe = 0, np.ones(1), 1.0
    for kind, count in zip(kinds, counts, strict=True):
        dense = np.zeros(kind.cells[-1] - kind.cells[0] + 1)
        dense[kind.cells - kind.cells[0]] = kind.masses
        for _ in range(count):
            masses, first, safe = np.convolve(masses, dense), first + int(kind.cells[0]), safe * (1 - kind.infinite)
    return first, masses, 1 - safe


def slow_delta(kinds: list[LossMasses], counts: list[int], epsilon: float) -> float:
    first, masses, infinite = convolved(kinds, counts)
    losses = (first + np.arange(len(masses))) * WIDTH
    return float(infinite + (masses * np.maximum(-np.expm1(epsilon - losses), 0)).sum())


@pytest.mark.parametrize("tilt", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("counts", [[1, 0], [40, 0], [30, 20], [0, 7]])
def test_delta_of_the_sum(tilt: float, counts: list[int]) -> None:
    kinds = [COIN, SKEW]
    for epsilon in (0.0, 1.0, 4.0):
        slow = slow_delta(kinds, counts, epsilon)
        if not 1e-14 < slow < 0.3:  # a tilt is chosen for small deltas, and the window for its tilt
            continue
        fast = (
            Composer(kinds, ALONE, WIDTH, np.array(counts, dtype=float), tilt, float(np.log(slow)))
            .compose()
            .delta(epsilon)
        )
        assert fast >= slow * (1 - 1e-9)
        assert fast <= slow * (1 + 1e-5) + 1e-12


def test_epsilon_is_where_delta_falls_to_it() -> None:
    counts = [30, 20]
    composed = Composer([COIN, SKEW], ALONE, WIDTH, np.array(counts, dtype=float), 1.0, np.log(1e-6)).compose()
    epsilon = composed.epsilon(1e-6)
    assert slow_delta([COIN, SKEW], counts, epsilon) <= 1e-6
    assert slow_delta([COIN, SKEW], counts, epsilon - 1e-4) > 1e-6
    assert composed.epsilon(1e-9) == np.inf  # the infinite mass alone is 2e-8


def test_each_prefix_of_a_history() -> None:
    history = np.array([[1.0, 0.0], [1.0, 2.0], [9.0, 2.0], [9.0, 2.0]])
    composer = Composer([COIN, SKEW], ALONE, WIDTH, history[-1], 1.0, np.log(1e-4), shorter_too=True)
    for row, composed in zip(history, composer.compose_each(history), strict=True):
        counts = [int(count) for count in row]
        assert composed.delta(1.5) == pytest.approx(slow_delta([COIN, SKEW], counts, 1.5), rel=1e-5)


@pytest.mark.parametrize("tilt", [0.0, 0.6])
@pytest.mark.parametrize("near", [True, False])
def test_levels_that_are_coins_between_two_kinds(tilt: float, near: bool) -> None:
    """By convolution of mixed masses: kinds that are nearly alike, where a series sums up levels, and unlike ones."""
    other = LossMasses(COIN.cells, np.array([0.405, 0.594]), 1e-3) if near else SKEW
    share, counts = np.array([0.0, 0.3, 0.95, 1.0]), np.array([3.0, 9.0, 4.0, 8.0])
    levels = Levels([], np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64), share)
    mixed = []
    for own in share:
        cells = np.union1d(COIN.cells, other.cells)
        masses = np.zeros(len(cells))
        masses[np.searchsorted(cells, COIN.cells)] += own * COIN.masses
        masses[np.searchsorted(cells, other.cells)] += (1 - own) * other.masses
        mixed.append(LossMasses(cells, masses, (1 - own) * other.infinite))
    for epsilon in (1.0, 4.0):
        slow = slow_delta(mixed, [int(n) for n in counts], epsilon)
        composer = Composer([COIN, other], levels, WIDTH, counts, tilt, float(np.log(slow)))
        assert composer.compose().delta(epsilon) == pytest.approx(slow, rel=1e-8 if near else 1e-5)
        halves = composer.compose_each(np.array([np.floor(counts / 2), counts]))
        assert halves[1].delta(epsilon) == pytest.approx(slow, rel=1e-8 if near else 1e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0.01, 0.999))
@settings(max_examples=40, deadline=None)
def test_shortfalls_are_their_double_sum(masses: list[float], decay: float) -> None:
    above = np.cumsum(np.array(masses)[::-1])[::-1]
    slow = [sum(m * (1 - decay ** (k - j)) for k, m in enumerate(masses) if k > j) for j in range(len(masses))]
    np.testing.assert_allclose(_shortfalls(above, decay), slow, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("least", [1, 2, 7, 100, 1001, 65537])
def test_fast_length_is_smooth_even_and_no_smaller(least: int) -> None:
    length = _fast_length(least)
    assert length >= least
    assert length % 2 == 0
    for prime in (2, 3, 5):
        while length % prime == 0:
            length //= prime
    assert length == 1
