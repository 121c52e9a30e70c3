"""Many noise levels as coins between few: convexity by closed forms, prices beside the exact ones, and time."""

from __future__ import annotations

import math
import time
from typing import Any

import mpmath as mp
import numpy as np
import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import pld as module
from dpsgd_cli.accounting.adjacency import Adjacency, Batching
from dpsgd_cli.accounting.mechanism import GaussianSum, GroupSum, Mechanism, PureDP, Release
from dpsgd_cli.accounting.noise_levels import Levels, levels_of

PLD = accountants.get("pld")


def sampled(noise: float, rate: float, a: float) -> tuple[mp.mpf, mp.mpf]:
    """H_a of (1 - q) N(0) + q N(1) against N(0), both ways, in 40 digits."""
    z, q, a = mp.mpf(noise), mp.mpf(rate), mp.mpf(a)

    def way(a: mp.mpf) -> mp.mpf:
        least = 1 + (a - 1) / q
        if least <= 0:
            return 1 - a
        w, k = 1 / z, mp.log(least)
        return q * (mp.ncdf(w / 2 - k / w) - least * mp.ncdf(-w / 2 - k / w))

    return way(a), 1 - a + a * way(1 / a)


@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_divergences_are_convex_in_the_coordinate_of_coins(rate: float) -> None:
    """Of a level between two, by the shares that `levels_of` takes; a coordinate of 1 / z would fail."""
    wrong = 0
    with mp.workdps(40):
        for low, middle, high in ((0.5, 0.51, 0.53), (1.0, 1.3, 1.9), (3.0, 3.1, 3.3), (0.3, 0.6, 5.0)):
            s = [mp.erf(1 / (mp.mpf(z) * mp.sqrt(8))) for z in (low, middle, high)]
            for a in (0.2, 0.9, 0.999, 1.0, 1.001, 1.1, 3.0, 50.0):
                for one, between, other in zip(*(sampled(z, rate, a) for z in (low, middle, high)), strict=True):
                    share = (s[1] - s[2]) / (s[0] - s[2])
                    assert share * one + (1 - share) * other >= between - mp.mpf(10) ** -35
                    by_inverse = (1 / mp.mpf(middle) - 1 / mp.mpf(high)) / (1 / mp.mpf(low) - 1 / mp.mpf(high))
                    wrong += by_inverse * one + (1 - by_inverse) * other < between - mp.mpf(10) ** -35
    assert wrong > 0


def made(batching: Batching, adjacency: Adjacency, noise: float) -> Mechanism:
    return GaussianSum(noise, adjacency, batching, 0.02)


CASES: list[tuple[Batching, Adjacency, float]] = [
    ("poisson", "add-remove", 1.5),
    ("fixed", "replace-one", 1.5),
    ("poisson", "replace-one", 0.02),
]


@pytest.mark.parametrize(("batching", "adjacency", "span"), CASES)
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_many_levels_cost_no_less_than_their_exact_price_and_little_more(
    batching: Batching, adjacency: Adjacency, span: float, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact price is that of every level with a loss of its own."""
    uses = [Release(made(batching, adjacency, 0.9 + span * i / 120), 5) for i in range(120)]
    few = levels_of([use.mechanism for use in uses])
    assert len(few.made) < 110
    own = PLD.epsilon(uses, delta)

    def each_apart(mechanisms: list[Mechanism]) -> Levels:
        places = np.arange(len(mechanisms))
        return Levels(list(mechanisms), places, places, np.ones(len(places)))

    monkeypatch.setattr("dpsgd_cli.accounting.noise_levels.levels_of", each_apart)
    exact = PLD.epsilon(uses, delta)
    assert exact * (1 - 1e-9) <= own <= exact * 1.001


def test_a_coin_has_the_shares_of_its_level_and_lower_levels_are_lower() -> None:
    noises = np.linspace(1.0, 2.0, 300)
    coins = levels_of([made("poisson", "zero-out", float(z)) for z in noises])
    found: list[Any] = coins.made
    for i, z in enumerate(noises):
        low, high = found[coins.first[i]].noise_multiplier, found[coins.second[i]].noise_multiplier
        assert low <= z <= high * (1 + 1e-12)
        s = [math.erf(1 / x / math.sqrt(8)) for x in (low, z, high)]
        assert coins.share[i] * s[0] + (1 - coins.share[i]) * s[2] == pytest.approx(s[1], rel=1e-12)
    for own in (
        [GaussianSum(1 + i / 9000, "replace-one", "poisson", 0.1) for i in range(900)],
        [GroupSum(1 + i / 9000, "add-remove", "poisson", 0.1, size=3) for i in range(900)],
        [GaussianSum(1 + i / 9000, "add-remove", "random-allocation", 0.1) for i in range(900)],
    ):
        lower = levels_of(own)
        found = lower.made
        assert len(found) < 900 and (lower.first == lower.second).all() and (lower.share == 1).all()
        assert all(found[lower.first[i]].noise_multiplier <= one.noise_multiplier for i, one in enumerate(own))


def test_few_levels_and_other_releases_stay_as_they_are() -> None:
    own: list[Mechanism] = [
        *(GaussianSum(1 + i, "add-remove", "poisson", 0.1) for i in range(9)),
        *(GaussianSum(1 + i / 1000, "add-remove", "poisson", 0.001 * (i + 1)) for i in range(90)),
        *(PureDP(0.1 * i, "add-remove") for i in range(90)),
    ]
    levels = levels_of(own)
    assert levels.made == own and (levels.first == np.arange(len(own))).all() and (levels.share == 1).all()


def test_a_curve_of_many_levels_ends_in_their_price() -> None:
    epochs = [[Release(GaussianSum(2.0 - i / 200, "add-remove", "poisson", 0.02), 4)] for i in range(200)]
    whole = PLD.epsilon([use for epoch in epochs for use in epoch], 1e-6)
    curve = PLD.curve(epochs, 1e-6)
    assert curve[-1] == pytest.approx(whole, rel=1e-4)
    assert curve == sorted(curve)


def test_the_start_of_an_uneven_curve_is_as_sharp_as_its_end() -> None:
    """Ten quiet epochs before one loud one: each point is what its own epochs cost."""
    epochs = [[Release(GaussianSum(30.0, "add-remove", "poisson", 0.01), 10)] for _ in range(10)]
    epochs.append([Release(GaussianSum(0.6, "add-remove", "poisson", 0.1), 200)])
    curve = PLD.curve(epochs, 1e-4)
    for i in (0, 4, 9, 10):
        alone = PLD.epsilon([use for epoch in epochs[: i + 1] for use in epoch], 1e-4)
        assert curve[i] == pytest.approx(alone, rel=2e-3, abs=1e-9)


def test_very_many_uses_cost_no_more_than_their_renyi_divergences() -> None:
    uses = 10**12
    used = [Release(GaussianSum(1e3 * (uses / 10**9) ** 0.5, "add-remove", "poisson", 0.01), uses)]
    assert PLD.epsilon(used, 1e-5) <= accountants.get("rdp").epsilon(used, 1e-5)
    assert uses >= module._MOST_USES


@pytest.mark.slow
def test_thousands_of_levels_take_seconds() -> None:
    used = [Release(GaussianSum(3 + 3 * i / 20_000, "add-remove", "poisson", 0.01)) for i in range(20_000)]
    start = time.process_time()
    assert PLD.epsilon(used, 1e-5) < accountants.get("rdp").epsilon(used, 1e-5)
    assert time.process_time() - start < 10
