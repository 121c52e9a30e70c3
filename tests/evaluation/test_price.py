"""The one release of the held-out part: its noise, and how far one record moves it."""

from __future__ import annotations

import numpy as np
import pytest

from dpsgd_cli.accounting.accountants import get
from dpsgd_cli.accounting.accountants.additive import total_mu_squared
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.evaluation import run, strategy
from dpsgd_cli.evaluation.metrics import MOMENTS, moments_of
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases
from dpsgd_cli.noise import run as noise

STRATEGIES = [getattr(strategy, name) for name in vars(strategy) if name.startswith("for_")]


@pytest.mark.parametrize(("epsilon", "noise"), [(0.5, 7.03), (1.0, 3.73), (3.0, 1.39), (8.0, 0.60)])
def test_noise_is_that_of_one_gaussian_at_delta_1e_5(epsilon: float, noise: float) -> None:
    """Values to the digits shown: Balle and Wang 2018, Theorem 8, solved in high precision."""
    assert held_out_release("gaussian", epsilon, 1e-5, "add-remove").noise_multiplier == pytest.approx(noise, abs=0.005)


@pytest.mark.parametrize("accountant", ["gaussian", "pld", "rdp"])
def test_the_accountant_of_the_training_prices_it_at_no_more_than_epsilon(accountant: str) -> None:
    release = held_out_release(accountant, 1.0, 1e-5, "add-remove")
    stated = get(accountant).epsilon([Release(release)], 1e-5)
    assert 0.999 < stated <= 1.0
    assert get("gaussian").epsilon([Release(release)], 1e-5) <= 1.0


@pytest.mark.parametrize(("adjacency", "moved"), [("add-remove", 1.0), ("zero-out", 1.0), ("replace-one", 2.0)])
def test_sensitivity_is_the_most_that_a_record_moves(adjacency: str, moved: float) -> None:
    assert held_out_release("gaussian", 1.0, 1e-5, adjacency).sensitivity == moved  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.0, float("inf"), float("nan")])
def test_a_training_without_a_finite_price_has_no_measurement(epsilon: float) -> None:
    with pytest.raises(ValueError, match="no noise"):
        held_out_release("gaussian", epsilon, 1e-5, "add-remove")


@pytest.mark.parametrize("made", STRATEGIES)
def test_no_record_moves_the_sum_by_more_than_one(made) -> None:  # type: ignore[no-untyped-def]
    lengths = np.sqrt((made().matrix.astype(np.longdouble) ** 2).sum(axis=0))
    assert float(lengths.max()) <= 1 and float(lengths.min()) > 0.99


def test_a_strategy_with_a_longer_column_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 1"):
        strategy.Strategy(np.eye(2) * 1.0001, np.eye(2), np.eye(2))


def test_moments_of_a_record_are_no_longer_than_one() -> None:
    grid = np.linspace(0, 5, 101)
    errors, targets = (part.ravel() for part in np.meshgrid(grid, np.linspace(-3, 3, 101)))
    lengths = np.sqrt((moments_of(errors, targets, 0.7, 1.0).astype(np.longdouble) ** 2).sum(axis=1))
    assert float(lengths.max()) <= 1 and MOMENTS == 6
    assert float(lengths.max()) > 0.999


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_a_record_more_moves_the_released_sum_by_at_most_one(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact sums are caught before noise; records have extreme outputs, ties, infinities and NaN."""
    sums: list[np.ndarray] = []

    def caught(stream: object, purpose: str, counter: int, exact: np.ndarray, *rest: object) -> np.ndarray:
        sums.append(exact)
        return exact

    monkeypatch.setattr(run, "gaussian", caught)
    release = held_out_release("gaussian", 1.0, 1e-5, "add-remove")
    rng = np.random.default_rng(0)
    outputs = rng.normal(0, 3, (12, classes))
    outputs[:4] = [[np.nan] * classes, [np.inf] * classes, [1e300] * classes, [0.0] * classes]
    labels = rng.integers(0, max(classes, 2), 12)
    for left in range(13):
        own = np.arange(12) != left
        with np.errstate(all="ignore"):
            run.measure_classes(labels[own], outputs[own], held_out_releases(release, False), SeededStreams(0), 12)
    moves = [float(np.linalg.norm(one - sums[-1])) for one in sums[:-1]]
    assert all(0.9 < move <= 1 + 1e-12 for move in moves)


def test_two_releases_of_numbers_cost_what_one_would() -> None:
    release = held_out_release("gaussian", 1.0, 1e-5, "add-remove")
    assert total_mu_squared([held_out_releases(release, True)]) == pytest.approx(1 / release.noise_multiplier**2)
    assert total_mu_squared([held_out_releases(release, False)]) == pytest.approx(1 / release.noise_multiplier**2)


@pytest.mark.parametrize("regression", [False, True])
def test_the_noise_of_the_release_is_that_of_the_ledger(regression: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum gets noise of the ledger's multiplier times its sensitivity: standard deviations of 200 draws."""
    drawn: list[np.ndarray] = []
    places: list[tuple[int, str, int]] = []
    exact = noise.gaussian

    def caught(stream, purpose, counter, sums, mechanism, records):  # type: ignore[no-untyped-def]
        assert isinstance(mechanism, GaussianSum)
        assert mechanism == planned.mechanism
        places.append((stream.integer("which"), purpose, counter))
        found = exact(stream, purpose, counter, sums, mechanism, records)
        drawn.append((found - sums) / (mechanism.noise_multiplier * mechanism.sensitivity))
        return found

    monkeypatch.setattr(run, "gaussian", caught)
    release = held_out_release("gaussian", 1.0, 1e-5, "replace-one")
    planned = held_out_releases(release, regression)
    for seed in range(100):
        if regression:
            run.measure_numbers(np.zeros(5), np.full(5, 0.1), (-1, 1), planned, SeededStreams(seed), 5)
        else:
            run.measure_classes(np.ones(5, int), np.ones((5, 1)), planned, SeededStreams(seed), 5)
    numbers = np.concatenate([one.ravel() for one in drawn])
    assert numbers.std() == pytest.approx(1.0, abs=0.04) and abs(numbers.mean()) < 0.05
    assert len(set(places)) == len(places) == 100 * (1 + regression)


def test_a_measurement_that_was_charged_otherwise_is_refused() -> None:
    """One release of noise z is not what two of z cost."""
    once = held_out_releases(held_out_release("gaussian", 1.0, 1e-5, "add-remove"), False)
    with pytest.raises(PrivacyError, match="charged as 1"):
        run.measure_numbers(np.zeros(3), np.zeros(3), (-1, 1), once, SeededStreams(0), 3)
    twice = held_out_releases(once.mechanism, True)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="charged as 2"):
        run.measure_classes(np.zeros(3, int), np.zeros((3, 1)), twice, SeededStreams(0), 3)
