"""Prediction sets: coverage with noise, against a new record."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.evaluation import run, sets
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases


def one(epsilon: float, regression: bool = False) -> Release:
    """The release of a held-out part at this epsilon."""
    return held_out_releases(held_out_release("gaussian", epsilon, 1e-5, "add-remove"), regression)


def drawn(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits of ten classes."""
    y, logits = rng.integers(0, 10, n), rng.normal(0, 2, (n, 10))
    logits[np.arange(n), y] += 4
    return y, logits


@pytest.mark.parametrize(("records", "epsilon"), [(300, 1.0), (300, 8.0), (2000, 0.5)])
def test_sets_hold_the_class_of_a_new_record(records: int, epsilon: float) -> None:
    """The mean over 40 draws of the held-out records is at least .9, but for two standard errors."""
    rng, release = np.random.default_rng(0), one(epsilon)
    y, logits = drawn(20_000, rng)
    true = run.margins_of(logits)[np.arange(len(y)), y]
    covered = []
    for seed in range(40):
        labels, outputs = drawn(records, rng)
        noised = run.measure_classes(labels, outputs, release, SeededStreams(seed), records).noised
        edge = sets.threshold(noised, "classes", 0.9).edge
        covered.append(1.0 if edge is None else float((true >= edge).mean()))
    assert np.mean(covered) + 2 * np.std(covered) / np.sqrt(40) >= 0.9
    assert np.mean(covered) < 0.99


def test_sets_of_two_classes_and_intervals_of_numbers_hold_new_records() -> None:
    rng = np.random.default_rng(0)
    for seed in range(10):
        y = rng.integers(0, 2, 2000)
        margin = rng.normal(2.0 * y - 1, 1.5)
        noised = run.measure_classes(y, margin[:, None], one(1.0), SeededStreams(seed), 2000).noised
        edge = sets.threshold(noised, "two-classes", 0.8).edge
        assert edge is not None and 0.78 <= norm.sf((edge - 1) / 1.5) <= 0.87
        target = rng.uniform(-1, 1, 2000)
        told = target + rng.normal(0, 0.2, 2000)
        noised = run.measure_numbers(target, told, (-1, 1), one(1.0, regression=True), SeededStreams(seed), 2000).noised
        half = sets.threshold(noised, "numbers", 0.8).edge
        assert half is not None and 0.78 <= 1 - 2 * norm.sf(2 * half / 0.2) <= 0.95


def test_the_bound_without_noise_is_that_of_split_conformal_prediction() -> None:
    """With almost no noise and c = 0, a threshold that keeps at least .9 n scores covers ceil(.9 n) / (n + 1)."""
    assert sets.coverage_bound(-1e-6, 0.9, 99, 1e-9, 1e-9) == pytest.approx(90 / 100)
    assert sets.coverage_bound(-1e-6, 0.9, 1000, 1e-9, 1e-9) == pytest.approx(900 / 1001)


def test_the_bound_holds_for_the_rule_that_it_is_about() -> None:
    """Simulated: uniform scores, edges at every hundredth, independent noise of each edge; 20,000 new records."""
    rng, n, coverage, deviation, constant = np.random.default_rng(0), 60, 0.8, 4.0, 5.0
    edges = np.linspace(0, 1, 101)
    held = 0
    for _ in range(20_000):
        scores, new = rng.random(n), rng.random()
        excess = (scores[:, None] >= edges).sum(axis=0) - coverage * n + rng.normal(0, deviation, 101)
        fails = np.flatnonzero(excess[1:] < constant)
        held += new >= edges[fails[0] if len(fails) else 100]
    bound = sets.coverage_bound(constant, coverage, n, deviation, deviation)
    assert held / 20_000 >= bound - 0.01


@pytest.mark.parametrize("coverage", [0.0, 1.0, 1.5])
def test_a_coverage_outside_of_zero_and_one_is_refused(coverage: float) -> None:
    noised = run.measure_numbers(
        np.zeros(9), np.zeros(9), (-1, 1), one(1.0, regression=True), SeededStreams(0), 9
    ).noised
    with pytest.raises(ValueError, match="coverage"):
        sets.threshold(noised, "numbers", coverage)
