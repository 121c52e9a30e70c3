"""Means and intervals against textbook formulas; warnings about a training that went wrong, and about no other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.results.result import (
    Released,
    Unreleased,
    diverged,
    summarise,
    summarise_columns,
    warnings_of_rows,
    warnings_of_training,
)


def test_mean_deviation_and_student_interval() -> None:
    values = [0.91, 0.93, 0.915, 0.94, 0.9]
    found = summarise(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["std"] == pytest.approx(np.std(values, ddof=1))
    assert (found["mean"] - found["ci95"], found["mean"] + found["ci95"]) == pytest.approx((low, high))
    assert found["n"] == 5


def test_one_trial_has_no_spread() -> None:
    assert summarise([0.5]) == {"mean": 0.5, "std": None, "ci95": None, "n": 1}


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_value_that_is_missing_leaves_no_mean_of_the_others(missing: Any) -> None:
    """A mean over the trials that happened to converge would flatter the method."""
    assert summarise([0.9, missing, 0.8]) == {"mean": None, "std": None, "ci95": None, "n": 3}
    found = summarise_columns({"accuracy": [0.9, missing], "loss": [1.0, 2.0]})
    assert (found["accuracy"]["mean"], found["loss"]["mean"]) == (None, 1.5)


ADVICE = "lower the rate"


def released(metrics: dict[str, list[float]], losses: list[list[float]] | None = None, **changes: Any) -> Released:
    trials = len(next(iter(metrics.values())))
    rest = dict.fromkeys(("loaded", "plan", "data_sha256", "device", "timing"))
    lists = dict.fromkeys(("ledgers", "declarations", "uncovered_steps", "warnings"), ())
    epochs = [{"test_loss": row} for row in losses or [[1.0] * trials]]
    return Released(**{**rest, **lists, "epochs": epochs, "metrics": metrics, "finite": [True] * trials, **changes})


def test_a_loss_that_ran_away_has_diverged_unless_the_model_still_beats_a_constant() -> None:
    poor = {"test_accuracy": [0.5, 0.9], "constant_accuracy": [0.6, 0.6]}
    found = released(poor, losses=[[0.7, 0.1], [0.5, 0.2], [1.6, 0.9]])
    assert diverged(found) == [0]
    assert (
        "1 of 2 trials diverged (trial 0): the test loss rose to more than 3 times its least"
        in (warnings_of_training(found, ADVICE)[0])
    )
    assert diverged(released(poor, losses=[[0.5, 0.1], [1.4, 0.2]])) == []


@pytest.mark.parametrize(
    ("metrics", "bad"),
    [
        ({"test_log_loss": [10.9, 0.68], "constant_log_loss": [0.69, 0.69], "test_accuracy": [0.9, 0.5]}, [0]),
        ({"test_log_loss": [741.0, 268.0], "constant_log_loss": [2.3, 2.3]}, [0, 1]),
        ({"test_log_loss": [1.37, 1.39], "constant_log_loss": [0.69, 0.69]}, [1]),
        # weak, and honest: what a small epsilon leads to
        ({"test_log_loss": [0.71, 0.95], "constant_log_loss": [0.69, 0.69], "test_accuracy": [0.5, 0.4]}, []),
        ({"test_rmse": [60.0, 130.0], "constant_rmse": [58.0, 58.0]}, [1]),
        ({"test_log_loss": [0.1, 0.1], "constant_log_loss": [0.0, 0.0]}, []),
    ],
)
def test_a_loss_far_above_the_baseline_has_diverged(metrics: dict[str, list[float]], bad: list[int]) -> None:
    found = released(metrics)
    assert diverged(found) == bad
    assert [w for w in warnings_of_training(found, ADVICE) if "is more than 2 times that of the baseline" in w][
        1:
    ] == []
    assert any("is more than 2 times that of the baseline" in w for w in warnings_of_training(found, ADVICE)) == bool(
        bad
    )


@pytest.mark.parametrize(
    ("model", "constant", "told"),
    [
        ({"accuracy": 0.9, "log_loss": 0.4}, {"accuracy": 0.7, "log_loss": 0.4}, None),
        ({"accuracy": 0.7}, {"accuracy": 0.7}, "recall"),
        ({"mae": 3.0}, {"mae": 2.0}, "quantile"),
        ({"mae": 1.0, "rmse": 9.0}, {"mae": 2.0, "rmse": 8.0}, None),
        ({"perplexity": 9.0}, {"perplexity": 8.0}, "a larger budget"),
        ({"accuracy": math.nan}, {"accuracy": 0.7}, None),
    ],
)
def test_a_model_that_is_no_better_than_a_constant_is_told_and_what_to_try(
    model: dict[str, float], constant: dict[str, float], told: str | None
) -> None:
    metrics = {f"test_{name}": [value] for name, value in model.items()}
    metrics |= {f"constant_{name}": [value] for name, value in constant.items()}
    found = [
        line for line in warnings_of_training(released(metrics), ADVICE) if line.startswith("no better than the m")
    ]
    assert bool(found) == (told is not None)
    assert told is None or told in found[0]


@pytest.mark.parametrize("changes", [{"finite": [False]}, {"metrics": {"test_accuracy": [math.nan]}}])
def test_weights_or_metrics_that_are_not_finite_have_diverged(changes: dict[str, Any]) -> None:
    found = released(**{"metrics": {"test_accuracy": [0.5]}, **changes})
    assert diverged(found) == [0]
    assert warnings_of_training(found, ADVICE)[0].startswith("the training diverged: weights or losses are not finite")


@pytest.mark.parametrize(("clipped", "told"), [(94, False), (95, True), (100, True)])
def test_a_clip_that_touches_nearly_all(clipped: int, told: bool) -> None:
    sums = {"nonfinite": [0.0], "clipped": [float(clipped)], "examples": [100.0]}
    found = warnings_of_rows(Unreleased([sums], {}, {}, {}), [True], True, ADVICE)
    assert [f"{clipped}% of the gradients were clipped" in line for line in found] == [True] * told
