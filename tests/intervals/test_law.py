"""The law of released estimates against simulations of it, and noiseless releases against scikit-learn and OLS."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.intervals import coding, law
from dpsgd_cli.intervals.price import sensitivity
from dpsgd_cli.intervals.run import LogisticRelease, Pieces, SquaresRelease, exact_sums, release_rounds


def symmetric(rng: np.random.Generator, size: int, spread: float) -> np.ndarray:
    """Noise of standard deviation `spread` on the diagonal and spread / sqrt(2) off it."""
    upper = np.triu(rng.normal(0, spread / math.sqrt(2), (size, size)), 1)
    return np.asarray(upper + upper.T + np.diag(rng.normal(0, spread, size)))


TERMS: dict[str, tuple[float, float, float, list[float]]] = {
    # sampling, noise of the curvature (h), noise of the gradient (d), b
    "sampling": (1.0, 0.0, 0.0, [1, 2, 0]),
    "gradient": (0.0, 0.0, 1.0, [1, 2, 0]),
    "curvature, along b": (0.0, 1.0, 0.0, [2, 0, 0]),
    "curvature, all ways": (0.0, 1.0, 0.0, [1, 2, -1]),
    "all": (1.0, 0.5, 1.0, [1, 2, 0]),
}


@pytest.mark.parametrize("term", TERMS)
def test_each_term_of_the_variance_is_the_spread_of_simulated_estimates(term: str) -> None:
    """2,500 estimates: a variance is off by 2.8% (one deviation); five are passed once in a million times."""
    share, spread, noise, b = TERMS[term]
    rng = np.random.default_rng(1)
    curvature = 400 * np.array([[1.0, 0.3, 0.0], [0.3, 0.8, 0.1], [0.0, 0.1, 0.5]])
    sampling, every = share * curvature, np.eye(3)
    root = np.linalg.cholesky(sampling + 1e-12 * every)
    scores = []
    for _ in range(2500):
        noisy = curvature + symmetric(rng, 3, spread)
        gradient = curvature @ b + root @ rng.normal(size=3) + noise * rng.normal(size=3)
        inverse = law.inverse_of(noisy, every)
        assert inverse is not None
        told = law.solved(inverse, gradient, sampling, spread, noise).of(every)
        scores.append((told.value - b) / ((told.high - told.low) / 2 / 1.959964))
        assert told.told.all()
    assert np.square(scores).mean(axis=0) == pytest.approx(1, abs=0.14)


def records(count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = np.hstack([rng.uniform(0, 1, (count, 2)), rng.random((count, 1)) < 0.3, np.ones((count, 1))])
    return x, (rng.random(count) < 1 / (1 + np.exp(-(x @ [2.0, -2.0, 1.0, -0.5])))).astype(float)


def noiseless(pieces: Pieces, size: int, bound: float) -> LogisticRelease:
    """A release of six rounds without noise, from 0."""
    rounds = [GaussianSum(1e-12, "add-remove", sensitivity=1.0)] * 6
    return release_rounds(pieces, np.zeros(size), bound, rounds, lambda number, exact, mechanism: exact)


def test_without_noise_it_is_logistic_regression_with_the_sandwich() -> None:
    x, y = records()
    found = noiseless(lambda: iter([(x[:1500] / 2, y[:1500]), (x[1500:] / 2, y[1500:])]), 4, 2.0)
    told = LogisticRelease.from_vector(found.vector).law(np.eye(4), True)
    assert told is not None
    fit = LogisticRegression(C=1e8, fit_intercept=False, tol=1e-10, max_iter=1000).fit(x, y).coef_[0]
    own = told.of(np.eye(4) / 2)
    assert own.value == pytest.approx(fit, abs=1e-4) and own.told.all()
    p = 1 / (1 + np.exp(-(x @ fit)))
    bread = np.linalg.inv((x.T * (p * (1 - p))) @ x)
    deviations = np.sqrt(np.diag(bread @ ((x.T * (y - p) ** 2) @ x) @ bread))
    assert (own.high - own.low) / 2 == pytest.approx(1.959964 * deviations, rel=1e-3)


@pytest.mark.parametrize("classes", [False, True])
def test_without_noise_it_is_ordinary_least_squares(classes: bool) -> None:
    x, y = records()
    if not classes:
        y = (x @ [0.3, -0.2, 0.1, 0.0]) + np.random.default_rng(1).normal(0, 0.1, len(x))
    targets = np.stack([1 - y, y], axis=1) if classes else y[:, None]
    contrast = np.array([-1.0, 1.0]) if classes else np.array([3.0])
    wanted = targets @ contrast
    u = x / 2
    kept = SquaresRelease(2.0, 0.0, 1.0, u.T @ u, u.T @ targets, np.square(targets).sum(axis=0)).vector
    read = SquaresRelease.from_vector(kept)
    assert read.records(True, 9) == pytest.approx(len(x)) and read.records(False, 9) == 9
    told = read.law(np.eye(4), contrast, len(x), classes)
    assert told is not None
    inverse = np.linalg.inv(x.T @ x)
    fit = inverse @ x.T @ wanted
    own = told.of(np.eye(4) / 2)
    assert own.value == pytest.approx(fit, rel=1e-9, abs=1e-9)
    residual = np.square(wanted - x @ fit).mean()
    assert (own.high - own.low) / 2 == pytest.approx(1.959964 * np.sqrt(np.diag(inverse) * residual), rel=1e-9)


def test_the_noise_of_least_squares_is_that_of_each_part() -> None:
    """Sums of which all is known: noise of deviation 2 on A, 2 / weight on Z, for the difference of two outputs."""
    zero, products = np.zeros(2), np.array([[0.0, 0.0], [0.0, 0.0]])
    told = SquaresRelease(1.0, 2.0, 0.5, 100 * np.eye(2), products, zero).law(np.eye(2), np.array([-1, 1.0]), 10, True)
    assert told is not None and told.spread == 2.0
    assert np.diag(told.covariance) == pytest.approx([2 * (2 / 0.5) ** 2 / 100**2] * 2)


def test_the_noise_of_a_round_is_that_of_each_part() -> None:
    """2,000 rounds on one empty table, of which all parts are noise: deviations within 6% of the released one over
    3.4, 1 and .4 (a deviation is off by 1.6%)."""
    rng = np.random.default_rng(0)
    mechanism = GaussianSum(2.0, "add-remove", sensitivity=sensitivity("add-remove"))
    parts: dict[str, list[np.ndarray]] = {"curvature": [], "gradient": [], "squares": []}
    deviation = 2 * math.sqrt(1.16)
    for _ in range(2000):
        found = release_rounds(
            lambda: iter([]),
            np.zeros(2),
            1.0,
            [mechanism],
            lambda number, exact, own: exact + deviation * rng.normal(size=len(exact)),
        )
        assert found.deviation == pytest.approx(deviation)
        for name, values in parts.items():
            values.append(np.asarray(getattr(found, name)).reshape(2, -1)[0])
    assert np.std(parts["gradient"], axis=0) == pytest.approx([deviation], rel=0.06)
    for name, factor in (("curvature", 3.4), ("squares", 0.4)):
        expected = deviation / factor * np.array([1, 1 / math.sqrt(2)])
        assert np.std(parts[name], axis=0) == pytest.approx(expected, rel=0.06)
    assert found.seen[1] == pytest.approx(deviation / 3.4)


@pytest.mark.parametrize("adjacency", ["add-remove", "zero-out", "replace-one"])
def test_no_record_moves_a_round_by_more_than_its_sensitivity(adjacency: Adjacency) -> None:
    """Records of norm 1 with every residual from -1 to 1, on a grid; the bound is reached where a residual is 1."""
    grid = np.concatenate([np.linspace(-6, 6, 241), [-40, 40]])

    def part(label: float, margin: float) -> np.ndarray:
        return exact_sums(lambda: iter([(np.array([[1.0, 0.0]]), np.array([label]))]), np.array([margin, 0.0]))

    norms = np.linalg.norm([part(label, margin) for label in (0.0, 1.0) for margin in grid], axis=1)
    factor = 2 if adjacency == "replace-one" else 1
    assert norms.max() == pytest.approx(math.sqrt(1.16), rel=1e-9)
    assert factor * norms.max() <= sensitivity(adjacency) * (1 + 1e-12)
    assert sensitivity(adjacency) == pytest.approx(factor * math.sqrt(1.16))


def test_noise_that_hides_the_curvature_gives_no_interval() -> None:
    hidden = law.solved(np.linalg.inv(np.diag([1000.0, 3.0])), np.ones(2), np.diag([1000.0, 3.0]), 2.0, 2.0)
    assert hidden.of(np.eye(2)).told.tolist() == [True, False]
    assert law.inverse_of(np.diag([1.0, -1.0]), np.eye(2)) is None
    far, near = np.array([1.0, 0.0]), np.array([0.1, 0.0])
    curvature = np.diag([1000.0, 1000.0])
    assert law.is_settled(near, curvature, 1000.0) and not law.is_settled(far, curvature, 1000.0)


def test_features_that_add_up_to_others_and_those_that_nobody_has_are_left_out() -> None:
    """A number, three categories, of which nobody has the last, and the constant."""
    rng = np.random.default_rng(0)
    words = np.eye(3)[rng.integers(0, 3, 300)]
    inputs = np.hstack([rng.uniform(0, 1, (300, 1)), words, np.ones((300, 1))])
    own = np.hstack([rng.uniform(0, 1, (900, 1)), np.eye(3)[[0] * 300 + [1] * 600], np.ones((900, 1))])
    found = coding.chosen(inputs, own.T @ own + symmetric(rng, 5, 2.0), 2.0, np.eye(5), True)
    assert (found.hidden.tolist(), found.references, found.free) == ([3], [2], [0, 1, 4])
    weights = np.array([0.5, 1.0, 3.0, 9.0, -2.0])
    assert found.coded @ weights == pytest.approx([0.5, 1.0 - 3.0, -2.0 + 3.0])


def test_a_damaged_release_is_refused() -> None:
    for kind in (LogisticRelease, SquaresRelease):
        reader: Any = kind
        with pytest.raises(ValueError, match="no release"):
            reader.from_vector(np.ones(11))
