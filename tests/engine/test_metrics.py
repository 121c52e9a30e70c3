"""Metrics of a table of answers against counting record by record."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics
from sklearn.dummy import DummyClassifier, DummyRegressor

from dpsgd_cli.engine.metrics import (
    CALIBRATION_BINS,
    METRICS,
    Answers,
    Reading,
    answers_of_classes,
    constant_answers,
    metrics_of,
    of_constant_places,
    of_constants,
    of_table,
    probabilities_by,
)


def classes(count: int, rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    truth = rng.integers(0, count, rows) * (rng.random(rows) < 0.6)
    return truth, rng.normal(size=(rows, count)) * 3 + 2 * np.eye(count)[truth]


@pytest.mark.parametrize("count", [2, 3, 10])
def test_of_classes(count: int) -> None:
    truth, outputs = classes(count)
    chances = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    told, binary = outputs.argmax(axis=1), count == 2
    names = [f"c{index}" for index in range(count)]
    found = of_table("classification", answers_of_classes(truth, outputs, Reading()), names)
    each = [f1(truth == label, told == label) for label in range(count)]
    of_class = {f"f1_{name}": float(own) for name, own in zip(names, each, strict=True)}
    rare = {"average_precision": precision(truth == 1, chances[:, 1]),
            "recall": recall(truth, chances[:, 1])} if binary else {}  # fmt: skip
    assert found == pytest.approx(
        rare
        | of_class
        | {
            "accuracy": (truth == told).mean(),
            "balanced_accuracy": np.mean([(told == label)[truth == label].mean() for label in range(count)]),
            "f1": each[1] if binary else np.mean(each),
            "auc": np.mean([area(truth == label, chances[:, label]) for label in range(count)]),
            "log_loss": -np.log(chances[np.arange(len(truth)), truth]).mean(),
            "ece": calibration_error(truth, told, chances.max(axis=1)),
        }
    )


def f1(truth: np.ndarray, told: np.ndarray) -> float:
    return float(2 * (truth & told).sum() / (truth.sum() + told.sum()))


def area(truth: np.ndarray, scores: np.ndarray) -> float:
    """Pair by pair: how often a positive has the larger score."""
    pairs = scores[truth][:, None] - scores[~truth]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def precision(truth: np.ndarray, scores: np.ndarray) -> float:
    """Positive by positive: the share of positives among the records that have no smaller score."""
    return float(np.mean([truth[scores >= own].mean() for own in scores[truth]]))


def recall(truth: np.ndarray, scores: np.ndarray) -> float:
    """Threshold by threshold: the most positives found with at most 1% of the negatives."""
    found = [0.0]
    for threshold in scores:
        told = scores >= threshold
        if told[truth == 0].mean() <= 0.01:
            found.append(float(told[truth == 1].mean()))
    return max(found)


def calibration_error(truth: np.ndarray, told: np.ndarray, confidence: np.ndarray) -> float:
    """Bin by bin: (left, right]."""
    total = 0.0
    for number in range(CALIBRATION_BINS):
        inside = (confidence > number / CALIBRATION_BINS) & (confidence <= (number + 1) / CALIBRATION_BINS)
        if inside.any():
            total += inside.sum() * abs((truth == told)[inside].mean() - confidence[inside].mean())
    return total / len(truth)


def test_one_output_is_a_margin_and_a_probability_only_where_it_is_logistic() -> None:
    truth, outputs = classes(2)
    margin = outputs[:, 1:] - outputs[:, :1]
    both, logistic, hinge = (
        of_table("classification", answers_of_classes(truth, given, Reading(told)))
        for given, told in ((outputs, math.inf), (margin, math.inf), (margin, None))
    )
    assert logistic == pytest.approx(both)
    assert hinge == pytest.approx({name: both[name] for name in both if name not in ("log_loss", "ece")})


@pytest.mark.parametrize("clipped", [0.3, 0.5, 0.7, 1.0, math.inf])
def test_probabilities_are_the_shares_that_training_on_clipped_residuals_finds(clipped: float) -> None:
    """Descent on records alike, a share of them positive, each with a residual of at most `clipped`."""
    shares = np.array([0.02, 0.1, 0.29, 0.4, 0.6, 0.85, 0.99])
    margins = np.zeros(len(shares))
    for _ in range(20_000):
        p = 1 / (1 + np.exp(-margins))
        margins -= (1 - shares) * np.minimum(p, clipped) - shares * np.minimum(1 - p, clipped)
    found = probabilities_by(margins.reshape(-1, 1), clipped)
    # below one half all p from `clipped` to 1 - `clipped` are as good for a share of one half alone
    assert found[:, 1] == pytest.approx(shares, abs=1e-6) and found.sum(axis=1) == pytest.approx(np.ones(7))
    assert (np.abs(1 / (1 + np.exp(-margins)) - shares) > 0.01).any() == (clipped < 0.9)


@pytest.mark.parametrize("clipped", [0.4, 0.7, math.inf])
def test_shares_of_several_classes_are_those_that_training_on_clipped_residuals_finds(clipped: float) -> None:
    """Descent on records alike, each with a residual p - e_k of length at most `clipped` times sqrt(2)."""
    shares = np.array([[0.6, 0.3, 0.1], [0.02, 0.9, 0.08], [0.34, 0.33, 0.33]])
    logits = np.zeros_like(shares)
    for _ in range(20_000):
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        residuals = p[:, None] - np.eye(3)
        lengths = np.linalg.norm(residuals, axis=2, keepdims=True)
        logits -= (shares[:, :, None] * residuals * np.minimum(1, clipped * np.sqrt(2) / lengths)).sum(axis=1)
    found = probabilities_by(logits, clipped)
    assert found == pytest.approx(shares, abs=1e-6)
    assert (found.argmax(axis=1) == logits.argmax(axis=1)).all()


def test_shares_allow_for_weights_of_classes_and_for_clipping_after_them() -> None:
    """Descent on records alike, of whose residuals those of the first class count a tenth before they are clipped."""
    shares, clipped, weights = np.array([0.02, 0.1, 0.3, 0.6]), 0.4, (0.1, 1.0)
    margins = np.zeros(len(shares))
    for _ in range(20_000):
        p = 1 / (1 + np.exp(-margins))
        margins -= 10 * ((1 - shares) * np.minimum(0.1 * p, clipped) - shares * np.minimum(1 - p, clipped))
    found = Reading(clipped, weights).probabilities(margins[:, None])
    assert found[:, 1] == pytest.approx(shares, abs=1e-5)
    assert Reading(clipped, weights).chosen(margins[:, None]).tolist() == [0, 1, 1, 1]  # from a share of 1 in 11 on
    assert Reading(clipped, weights, (1.0, 1.0)).chosen(margins[:, None]).tolist() == [0, 0, 0, 1]
    assert Reading(clipped, weights, (1.0, 3.0)).chosen(np.stack([-margins / 2, margins / 2], 1)).tolist() == [
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("clipped", [0.4, 0.7, math.inf])
def test_the_decision_is_the_one_that_costs_least(clipped: float) -> None:
    """By hand: a miss costs ten alarms, so whoever is positive with a chance above 1 in 11 is taken for one."""
    margins = np.linspace(-8, 8, 2001)[:, None]
    reading = Reading(clipped, costs=(1.0, 10.0))
    shares = reading.probabilities(margins)[:, 1]
    assert (reading.chosen(margins) == (10 * shares > 1 - shares)).all()
    assert reading.chosen(margins).sum() > (margins > 0).sum() + 50
    assert (Reading(clipped).chosen(margins) == (margins[:, 0] > 0)).all()


def test_records_are_ordered_by_margins_that_mean_the_same_probability() -> None:
    truth, outputs = np.array([0, 1, 0, 1]), np.array([[-0.3], [-0.2], [0.1], [0.2]])
    told = answers_of_classes(truth, outputs, Reading(0.2))
    assert told.probabilities is not None and told.probabilities.tolist() == [0.5] * 4
    assert of_table("classification", told)["auc"] == 0.75


def test_of_numbers() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(1e6, 3, 50)
    told = truth + rng.normal(0, 1, 50)
    assert of_table("regression", Answers(truth, told)) == pytest.approx(
        {
            "mae": np.abs(truth - told).mean(),
            "rmse": np.square(truth - told).mean() ** 0.5,
            "r2": 1 - np.square(truth - told).mean() / truth.var(),
        }
    )


@pytest.mark.parametrize("count", [2, 4])
def test_a_constant_is_scikit_learns(count: int) -> None:
    truth, _ = classes(count)
    dummy = DummyClassifier(strategy="prior").fit(truth, truth)
    found = of_table("classification", constant_answers(truth, count))
    assert found["accuracy"] == dummy.score(truth, truth)
    assert found["log_loss"] == pytest.approx(sklearn.metrics.log_loss(truth, dummy.predict_proba(truth)))
    assert (found["auc"], found["balanced_accuracy"], found["ece"]) == pytest.approx((0.5, 1 / count, 0))
    numbers = np.random.default_rng(0).normal(size=30)
    mean = DummyRegressor().fit(numbers, numbers).predict(numbers)
    found = of_table("regression", constant_answers(numbers, None))
    assert found["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(numbers, mean))
    assert found["r2"] == pytest.approx(0)
    middle = DummyRegressor(strategy="median").fit(numbers, numbers).predict(numbers)
    assert of_constants("regression", numbers, None) == pytest.approx(found | {"mae": np.abs(numbers - middle).mean()})


def test_what_is_not_defined_is_left_out_and_what_is_not_finite_has_no_number() -> None:
    truth, outputs = np.zeros(5, np.int64), np.ones((5, 2))
    assert "auc" not in of_table("classification", answers_of_classes(truth, outputs, Reading()))
    assert "r2" not in of_table("regression", Answers(np.ones(3), np.ones(3) + 1))
    found = of_table("classification", answers_of_classes(truth, outputs * math.inf, Reading()))
    assert set(found) == set(metrics_of("classification")) - {"loss"} and all(map(math.isnan, found.values()))


def test_every_metric_but_the_loss_has_a_constant_beside_it() -> None:
    labels = np.array([[0, 1, 1, -1]])
    places = of_constant_places("next-token", labels)
    assert places["token_accuracy"] == pytest.approx(2 / 3)
    assert places["perplexity"] == pytest.approx(3 / 2 ** (2 / 3))
    assert [name for name, metric in METRICS.items() if metric.of_table is None and name not in places] == ["loss"]


def test_each_of_several_labels_has_a_score_of_its_own() -> None:
    draw = np.random.default_rng(0)
    truth, told = (draw.integers(2, size=(40, 3)) for _ in range(2))
    found = of_table("multi-label", Answers(truth, told), ["a", "b", "c"])
    wanted = np.array([f1(truth[:, column] == 1, told[:, column] == 1) for column in range(3)])
    assert [found[f"label_f1_{name}"] for name in "abc"] == pytest.approx(list(wanted))
    assert found["label_f1"] == pytest.approx(wanted.mean())
    assert found["label_accuracy"] == pytest.approx((truth == told).mean())
    truth[0] = -1  # no label: neither right nor wrong
    rest = of_table("multi-label", Answers(truth[1:], told[1:]), "abc")
    assert of_table("multi-label", Answers(truth, told), "abc") == pytest.approx(rest)
