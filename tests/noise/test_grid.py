"""Releases on a public grid: exact integers, a support without data, and noise that pays for all rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.noise import run as noise
from dpsgd_cli.noise.correlation import step_noise
from dpsgd_cli.noise.run import Grid, NoiseSource, add_noise, gaussian
from dpsgd_cli.recipe.loading import load_recipe
from tests.noise.test_price import made, matrix

CPU = torch.device("cpu")
GRID = Grid.of(100, 1000, [1.5])
LEAST = 1e-6


def off_grid(released: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    """Return the distances of numbers from (k + 1/2) `step`, in steps, 0 to 1/2.

    Numbers beyond 2^47 steps are left out.
    """
    places = np.asarray(released / step, dtype=np.float64).ravel()
    places = places[np.abs(places) < 2.0**47] - 0.5
    return np.abs(places - np.rint(places))


def released(sums: list[float], fresh: list[int], scale: float = 1.5, grid: Grid = GRID) -> list[float]:
    made = torch.tensor([sums], dtype=torch.float64)
    add_noise(made, torch.tensor([fresh]), torch.tensor([[scale]], dtype=torch.float64), grid)
    return list(made[0].tolist())


def test_a_release_is_the_rounded_sum_and_the_digits_in_integers() -> None:
    """Against fractions: (rint(S / q) + X + 1/2) q, and ties of rint to even numbers."""
    random = np.random.default_rng(0)
    step = Fraction(float(GRID.steps(torch.tensor(1.5))))
    assert float(step) == pytest.approx(1.5 * GRID.raised / 2**42, rel=1e-15, abs=0)
    sums = [*random.normal(0, 0.01, 50).tolist(), 0.0, float(step) / 2, float(step) * 1.5, -float(step) / 2]
    fresh = [int(x) for x in random.integers(-(2**45), 2**45, len(sums))]
    for exact, digits, found in zip(sums, fresh, released(sums, fresh), strict=True):
        whole = round(Fraction(exact) / step) + digits
        assert found == pytest.approx(float((whole + Fraction(1, 2)) * step), rel=2**-50, abs=0)


def test_sums_that_round_alike_are_released_alike() -> None:
    """No low bit of a sum is left, in whatever float it is looked at."""
    q = float(GRID.steps(torch.tensor(1.5)))
    close = [1000 * q, 1000.3 * q, 999.7 * q]
    assert len(set(released(close, [12345] * 3))) == 1
    assert len(set(released([1000 * q, 1000.6 * q], [12345] * 2))) == 2


def test_what_is_beyond_all_integers_is_clipped_and_what_is_no_number_counts_as_nothing() -> None:
    """At 2^62 steps, whose noise fits into 64 bits."""
    large = released([1e300, -1e300, math.inf, -math.inf, math.nan], [2**46] * 4 + [7])
    q = float(GRID.steps(torch.tensor(1.5)))
    assert large[:4] == pytest.approx([2.0**62 * q, -(2.0**62) * q] * 2, rel=1e-4)
    assert large[4] == pytest.approx(7.5 * q, abs=0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_noise_of_no_size_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite standard deviation above 0"):
        released([1.0], [3], scale)


def test_digits_without_a_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="needs the grid"):
        add_noise(torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1), None)
    source = NoiseSource([SecureStreams()], 2, CPU, torch.float32)
    for shape in (made(4, 9), None):
        with pytest.raises(ValueError, match="needs the grid"):
            step_noise([shape], 2, CPU).add(torch.zeros(1, 2, dtype=torch.float64), 0, source, torch.ones(1, 1), None)
        source = NoiseSource([SecureStreams()], 2, CPU, torch.float32)


@pytest.mark.parametrize("numbers", [1, 400, 10**6, 10**9])
@pytest.mark.parametrize("records", [1, 60_000, 5_000_000])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 40.0])
def test_noise_pays_for_every_rounding(numbers: int, records: int, multiplier: float) -> None:
    """In fractions: the worst that sums of norm 1 and rounding move, over the raised noise, is 1 / z at most. Less than
    a thousandth is added."""
    grid = Grid.of(numbers, records, [multiplier])
    noise_of = Fraction(multiplier) * Fraction(grid.raised)
    step = noise_of / 2**grid.bits
    u = Fraction(1, 2**53)
    pieces = min(records, 1 << 14) + -(-records // (1 << 14)) + 2
    summed = 2 * records * pieces * u / (1 - pieces * u)  # Higham 2002, equation 4.4, for either neighbour
    divided = 4 * u * records  # two roundings of a quotient of at most `records`, for either
    root = Fraction(math.isqrt(numbers * 10**12) + 1, 10**6)
    moved = 1 + summed + divided + step * root
    assert moved / noise_of <= (1 + Fraction(1, 10**13)) / Fraction(multiplier)
    assert grid.raised < 1.001
    assert records / multiplier * 2**grid.bits <= 2**62
    assert grid.bits == 42 or records / multiplier * 2 ** (grid.bits + 1) > 2**62


def test_a_grid_holds_the_least_and_the_largest_noise_of_a_pack() -> None:
    both, large, small = (Grid.of(10**6, 10**8, z) for z in ([0.5, 300.0], [300.0], [0.5]))
    assert both.bits == small.bits < large.bits
    assert both.raised >= max(large.raised, small.raised)
    assert Grid.of(10**6, 1, [1.0], moved=100).raised - 1 == pytest.approx(1e5 / 2**42, rel=1e-3)


@pytest.mark.parametrize(("numbers", "records", "z"), [(10**9, 10**13, 1e9), (1, 1, 0.0), (1, 1, math.inf)])
def test_what_no_grid_holds_is_refused(numbers: int, records: int, z: float) -> None:
    with pytest.raises(ValueError, match="no grid holds"):
        Grid.of(numbers, records, [z])


def test_large_sums_need_fewer_digits() -> None:
    """10^8 records and noise of multiplier 1: 27 binary digits before the point, 35 behind it."""
    grid = Grid.of(1, 10**8, [1.0])
    assert grid.bits == 35
    (found,) = released([3.0], [5 * 2**7 + 127], 1.0, grid)
    q = float(grid.steps(torch.tensor(1.0)))
    assert found == pytest.approx((round(3 / q) + 5 + 0.5) * q, rel=2**-50)


@pytest.mark.parametrize("size", [3, 70_000, 700_000])
def test_steps_are_standard_normal_and_new_in_pieces_of_any_size(size: int) -> None:
    """Two trials and steps of scales 2 and 3: variances by chi-square, wrong by a tenth rejected; hardly a number
    twice.
    """
    source = NoiseSource([SecureStreams(), SecureStreams()], size, CPU, torch.float32)
    grid, scale = Grid.of(size, 10, [1.0]), torch.tensor([[2.0], [3.0]])
    found = []
    for step in range(max(2, 3000 // size)):
        sums = torch.full((2, size), 5.0, dtype=torch.float64)
        source.add(sums, step, scale, grid)
        found.append((sums - 5.0) / scale)
    seen = torch.stack(found).numpy()
    assert len(np.unique(seen)) > seen.size - 20  # of 2^43 values a few may fall together
    squares = float(np.square(seen).sum())
    law = stats.chi2(seen.size)
    assert min(law.cdf(squares), law.sf(squares)) > LEAST and law.sf(squares * 1.21) < LEAST
    with pytest.raises(RuntimeError, match="step 0 was drawn before"):
        source.add(torch.zeros(2, size, dtype=torch.float64), 0, scale, grid)


def test_pieces_have_their_own_scale() -> None:
    """Of a layer each, where sums are added to piece by piece."""
    size, scale = 700_000, torch.ones(1, 700_000, dtype=torch.float64)
    scale[0, 300_000:] = 5.0
    sums = torch.zeros(1, size, dtype=torch.float64)
    NoiseSource([SecureStreams()], size, CPU, torch.float32).add(sums, 0, scale, Grid.of(size, 10, [1.0]))
    assert float(sums[0, :300_000].std()) == pytest.approx(1, abs=0.02)
    assert float(sums[0, 300_000:].std()) == pytest.approx(5, abs=0.1)


SHAPE = made(4, 20)


class Kept(NoiseSource):
    """Keeps what it gave."""

    def draw(self, step: int) -> Tensor:
        drawn = super().draw(step)
        self.kept = [*getattr(self, "kept", []), drawn.clone()]
        return drawn


class Given(NoiseSource):
    """Noise that a test gives."""

    def __init__(self, fresh: Tensor) -> None:
        self.fresh = fresh

    def draw(self, step: int) -> Tensor:
        return self.fresh


def test_correlated_noise_is_on_the_grid_and_takes_back_what_was_added() -> None:
    """20 steps of changing noise: numbers of (k + 1/2) q each, and what is left of them is the seeded noise of those
    normals, to the steps of the grid."""
    shape, size = SHAPE, 6
    source = Kept([SecureStreams()], size, CPU, torch.float32)
    ours, floats = step_noise([shape], size, CPU), step_noise([shape], size, CPU)
    for step in range(20):
        scale = torch.tensor([[2.0 if step < 9 else 1.5]], dtype=torch.float64)
        grid, sums = Grid.of(size * 20, 10, [1.0]), torch.full((1, size), 7.0, dtype=torch.float64)
        ours.add(sums, step, source, scale, grid)
        q = grid.steps(scale * ours._unit)  # type: ignore[attr-defined]
        places = sums / q - 0.5
        assert float((places - places.round()).abs().max()) < 2**-4
        again = torch.zeros(1, size, dtype=torch.float64)

        floats.add(again, step, Given(source.kept[step].double() * 2.0**-42), scale * grid.raised, None)
        assert float((sums - 7.0 - again).abs().max()) < 100 * float(q)
    assert shape.moved_by_rounding > 1 + np.abs(matrix(shape)[:, 0] / matrix(shape)[0, 0]).sum()


def test_a_statistic_has_the_noise_that_its_mechanism_says() -> None:
    """3,000 releases of a matrix: Kolmogorov-Smirnov; multipliers of .85 and 1.18 are rejected."""
    mechanism = GaussianSum(3.0, "add-remove", sensitivity=2.0, label="x")
    exact = np.array([[1.0, -2.0], [30.0, 1e6]])
    seen = np.stack([gaussian(SecureStreams(), "x", 0, exact, mechanism, 100) - exact for _ in range(3000)]) / 6
    assert stats.kstest(seen.ravel(), "norm").pvalue > LEAST
    for wrong in (0.85, 1.18):
        assert stats.kstest(seen.ravel() * wrong, "norm").pvalue < LEAST
    seeded = gaussian(SeededStreams(0), "x", 0, exact, mechanism, 100)
    normals = SeededStreams(0).normal("x", 0, torch.empty(2, 2, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(seeded, exact + 6 * normals, rtol=1e-15)


def test_a_pack_with_a_trial_that_has_no_seed_is_released_on_the_grid_as_a_whole() -> None:
    source = NoiseSource([SeededStreams(0), SecureStreams()], 9, CPU, torch.float32)
    assert source.secure and source.draw(0).dtype == torch.int64
    assert not noise.is_secure([SeededStreams(0), SeededStreams(1)])
    assert NoiseSource([SeededStreams(0)], 9, CPU, torch.float32).draw(0).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("lee2018/objective-perturbation", [], "objective-perturbation needs a seed.*enters a search"),
    ],
)
def test_what_no_public_grid_holds_is_refused_without_a_seed(name: str, more: list[str], told: str) -> None:
    """In the recipe, so that prices, plans and trainings agree; with a seed it is an experiment."""
    load_recipe(name, [*more, "seed=0"])
    with pytest.raises(RecipeError, match=told):
        load_recipe(name, [*more, "seed=null", "privacy.noise_source=null"])


def test_numbers_off_the_grid_are_found() -> None:
    """By tier C of an audit: releases are on it, and float sums of the same noise are not."""
    step = GRID.steps(torch.tensor(1.5)).numpy()
    sums = np.random.default_rng(0).normal(0, 10, 300)
    fresh = np.random.default_rng(1).normal(0, 2.0**42, 300).astype(np.int64)
    assert off_grid(np.array(released(sums.tolist(), fresh.tolist())), step).max() < 1 / 16
    assert (off_grid(sums + fresh * step, step) > 1 / 16).mean() > 0.8
    assert (off_grid(sums + 1.5 * np.random.default_rng(2).normal(0, 1, 300), step) > 1 / 16).mean() > 0.8
