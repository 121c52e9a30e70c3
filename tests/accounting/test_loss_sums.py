"""Sums of losses by Fourier transforms against plain convolution."""

from __future__ import annotations

import numpy as np
import pytest

from dpsgd_cli.accounting.loss_sums import SumOfLosses, summed
from dpsgd_cli.accounting.losses import Losses
from dpsgd_cli.accounting.noise_levels import Levels

WIDTH = 0.1


def atoms(cells: list[int], masses: list[float], infinite: float = 0.0) -> Losses:
    """Losses on multiples of WIDTH; by their deviation, cells of the sum are ten times narrower."""
    losses = np.array(cells) * WIDTH
    return Losses(np.array(masses), losses, losses, losses, infinite, 5 * WIDTH)


COIN = atoms([-4, 5], [0.4, 0.6])
SKEW = atoms([-2, 0, 9, 30], [0.5, 0.45, 0.0499, 0.0001 - 1e-9], 1e-9)
ALONE = Levels([], np.arange(2), np.arange(2), np.ones(2))
"""Two levels, each of which is one kind."""


def slow_delta(kinds: list[Losses], counts: list[int], epsilon: float) -> float:
    """One np.convolve a use."""
    first, masses, safe = 0, np.ones(1), 1.0
    for kind, count in zip(kinds, counts, strict=True):
        cells = np.rint(kind.low / WIDTH).astype(int)
        dense = np.zeros(cells.max() - cells.min() + 1)
        np.add.at(dense, cells - cells.min(), kind.masses)
        for _ in range(count):
            masses, first, safe = np.convolve(masses, dense), first + int(cells.min()), safe * (1 - kind.infinite)
    losses = (first + np.arange(len(masses))) * WIDTH
    return float(1 - safe + (masses * np.maximum(-np.expm1(epsilon - losses), 0)).sum())


def fast(kinds: list[Losses], levels: Levels, *rows: list[int], least: float = 1e-12) -> list[SumOfLosses]:
    return summed(kinds, levels, np.array(rows, dtype=float), least)


@pytest.mark.parametrize("counts", [[1, 0], [40, 0], [30, 20], [0, 7]])
def test_delta_of_the_sum(counts: list[int]) -> None:
    (composed,) = fast([COIN, SKEW], ALONE, counts)
    for epsilon in (0.0, 1.0, 4.0):
        slow = slow_delta([COIN, SKEW], counts, epsilon)
        assert slow * (1 - 1e-9) - 1e-16 <= composed.delta(epsilon) <= slow * (1 + 1e-6) + 1e-11


def test_epsilon_is_where_delta_falls_to_it() -> None:
    (composed,) = fast([COIN, SKEW], ALONE, [30, 20])
    epsilon = composed.epsilon(1e-6)
    assert slow_delta([COIN, SKEW], [30, 20], epsilon) <= 1e-6
    assert slow_delta([COIN, SKEW], [30, 20], epsilon - 1e-4) > 1e-6
    assert composed.epsilon(1e-9) == np.inf  # the infinite mass alone is 2e-8


def test_each_prefix_of_a_history() -> None:
    history = [[1, 0], [1, 2], [9, 2], [9, 2]]
    for counts, composed in zip(history, fast([COIN, SKEW], ALONE, *history), strict=True):
        assert composed.delta(1.5) == pytest.approx(slow_delta([COIN, SKEW], counts, 1.5), rel=1e-5)


def test_what_lies_beyond_the_window_is_not_lost() -> None:
    """A window for deltas of .1 alone: what is cut off above counts as infinite, so small deltas are overstated."""
    (wide,), (narrow,) = (fast([COIN, SKEW], ALONE, [200, 20], least=least) for least in (1e-12, 0.1))
    assert len(narrow.masses) < len(wide.masses)
    assert narrow.infinite >= np.exp(-14) * 0.1 > 20 * 1e-9
    for epsilon in (0.0, 10.0, 30.0):
        assert narrow.delta(epsilon) >= slow_delta([COIN, SKEW], [200, 20], epsilon) * (1 - 1e-9) - 1e-16


def test_levels_that_are_coins_between_two_kinds() -> None:
    """By convolution of mixed masses."""
    share, counts = np.array([0.0, 0.3, 0.95, 1.0]), [3, 9, 4, 8]
    levels = Levels([], np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64), share)
    ratio, low, high = (np.concatenate([getattr(one, n) for one in (SKEW, COIN)]) for n in ("ratio", "low", "high"))
    mixed = [
        Losses(
            np.concatenate([(1 - own) * SKEW.masses, own * COIN.masses]), ratio, low, high,
            (1 - own) * SKEW.infinite + own * COIN.infinite,
        )
        for own in share
    ]  # fmt: skip
    halves, whole = fast([COIN, SKEW], levels, [n // 2 for n in counts], counts)
    for epsilon in (1.0, 4.0):
        assert whole.delta(epsilon) == pytest.approx(slow_delta(mixed, counts, epsilon), rel=1e-6)
        assert halves.delta(epsilon) == pytest.approx(slow_delta(mixed, [n // 2 for n in counts], epsilon), rel=1e-6)
