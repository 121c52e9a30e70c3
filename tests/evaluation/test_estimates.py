"""Metrics and intervals from noisy cells, against plain computations and known populations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtri
from sklearn import metrics
from sklearn.dummy import DummyClassifier

from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.evaluation import run, strategy
from dpsgd_cli.evaluation.estimates import Estimate, Noised, fieller, mean_of
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases

ALMOST_NONE = Release(GaussianSum(1e-3, "add-remove"))


def drawn(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Labels and margins: AUC .8, prevalence .3."""
    y, d = rng.random(n) < 0.3, math.sqrt(2) * ndtri(0.8)
    return y.astype(int), rng.normal(np.where(y, 1, -1) * d * d / 2 + math.log(3 / 7), d)


def test_without_noise_metrics_of_two_classes_are_those_of_scikit_learn() -> None:
    y, margin = drawn(20_000, np.random.default_rng(0))
    found = run.measure_classes(y, margin[:, None], ALMOST_NONE, SeededStreams(0), len(y)).metrics
    p = (1 / (1 + np.exp(-margin))).clip(0.01, 0.99)
    assert found["accuracy"].value == pytest.approx(metrics.accuracy_score(y, margin > 0), abs=1e-4)
    assert found["balanced_accuracy"].value == pytest.approx(metrics.balanced_accuracy_score(y, margin > 0), abs=1e-4)
    assert found["sensitivity"].value == pytest.approx(metrics.recall_score(y, margin > 0), abs=1e-4)
    assert found["auc"].value == pytest.approx(metrics.roc_auc_score(y, margin), abs=1e-3)
    assert found["log_loss"].value == pytest.approx(metrics.log_loss(y, p), abs=1e-3)
    assert found["brier"].value == pytest.approx(metrics.brier_score_loss(y, 1 / (1 + np.exp(-margin))), abs=1e-3)


def test_without_noise_baselines_are_those_of_dummies_of_scikit_learn() -> None:
    """Of two classes, of four and of numbers; the share of the second class follows from the released metrics, too."""
    rng = np.random.default_rng(1)
    y, margin = drawn(20_000, rng)
    two = run.measure_classes(y, margin[:, None], ALMOST_NONE, SeededStreams(0), len(y))
    dummy = DummyClassifier(strategy="prior").fit(y[:, None], y)
    shares = dummy.predict_proba(y[:, None])
    wanted = {
        "accuracy": dummy.score(y[:, None], y),
        "balanced_accuracy": 0.5,
        "auc": 0.5,
        "average_precision": metrics.average_precision_score(y, shares[:, 1]),
        "log_loss": metrics.log_loss(y, shares),
        "brier": metrics.brier_score_loss(y, shares[:, 1]),
    }
    assert {name: one.value for name, one in two.constants.items()} == pytest.approx(wanted, abs=1e-4)
    accuracy, sensitivity, specificity = (
        two.metrics[name].value or 0.0 for name in ("accuracy", "sensitivity", "specificity")
    )
    assert (specificity - accuracy) / (specificity - sensitivity) == pytest.approx(y.mean(), abs=1e-4)
    assert two.gain is not None and two.gain.value == pytest.approx(accuracy - (1 - y.mean()), abs=1e-4)
    y4 = rng.choice(4, 20_000, p=[0.2, 0.5, 0.2, 0.1])
    four = run.measure_classes(y4, rng.normal(0, 1, (20_000, 4)), ALMOST_NONE, SeededStreams(0), len(y4))
    assert four.constants["accuracy"].value == pytest.approx((y4 == 1).mean(), abs=1e-4)
    assert four.gain is not None and four.gain.high < 0
    t = rng.normal(20, 5, 20_000).clip(0, 50)
    halves = Release(ALMOST_NONE.mechanism, 2)
    numbers = run.measure_numbers(t, t + rng.normal(0, 1, len(t)), (0.0, 50.0), halves, SeededStreams(0), len(t))
    assert numbers.constants["rmse"].value == pytest.approx(t.std(), rel=1e-3)
    assert numbers.constants["mae"].value == pytest.approx(np.abs(t - np.median(t)).mean(), rel=1e-3)
    assert numbers.gain == numbers.metrics["r2"]


@pytest.mark.parametrize("share", [0.5, 0.94])
def test_a_baseline_and_the_gain_over_it_are_covered_as_stated(share: float) -> None:
    """300 releases at epsilon 1 of a model that always answers the first class, of 160 records, whose gain is 0.

    Intervals are 95%; by chance, at most 29 of 300 miss with probability .999. Of as few records, the baseline is shown
    without a point where noise hides which class is more frequent.
    """
    release = held_out_releases(held_out_release("gaussian", 1.0, 1e-5, "add-remove"), False)
    missed = lost = shown = 0
    for seed in range(300):
        y = (np.random.default_rng(seed).random(160) >= share).astype(int)
        found = run.measure_classes(y, np.full((160, 1), -0.2), release, SeededStreams(seed), 160)
        assert found.gain is not None
        missed += not found.constants["accuracy"].low <= share <= found.constants["accuracy"].high
        lost += share > 0.5 and not found.gain.low <= 0 <= found.gain.high
        shown += found.constants["accuracy"].value is not None
    assert max(missed, lost) <= 29


def test_the_median_is_a_baseline_whose_error_is_covered() -> None:
    """100 releases at epsilon 1 of 1,500 skewed targets: at most 13 intervals of 100 miss with probability .999.

    The answer is a noisy median, whose error is at most a few percent larger than the median's.
    """
    release = held_out_releases(held_out_release("gaussian", 1.0, 1e-5, "add-remove", True), True)
    truth = math.log(2) * 6  # of exponential targets with mean 6
    missed, values = 0, []
    for seed in range(100):
        t = np.random.default_rng(seed).exponential(6, 1500)
        found = run.measure_numbers(t, t, (0.0, 50.0), release, SeededStreams(seed), len(t)).constants["mae"]
        missed += not found.low <= truth * 1.03 or not truth <= found.high
        values.append(found.value or 0.0)
    assert missed <= 13
    assert truth * 0.98 < np.mean(values) < truth * 1.05


def test_a_point_lies_within_its_own_interval() -> None:
    """Few records at epsilon 2: projected counts put some points beyond the ends that linear counts give."""
    release, rng = (
        held_out_releases(held_out_release("gaussian", 2.0, 1e-5, "add-remove"), False),
        np.random.default_rng(0),
    )
    shown = 0
    for seed in range(20):
        y, margin = drawn(120, rng)
        for one in run.measure_classes(y, margin[:, None], release, SeededStreams(seed), len(y)).metrics.values():
            shown += one.value is not None
            assert one.value is None or one.low <= one.value <= one.high
    assert shown > 20


def test_without_noise_metrics_of_ten_classes_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y, logits = rng.integers(0, 10, 20_000), rng.normal(0, 2, (20_000, 10))
    logits[np.arange(len(y)), y] += 3
    found = run.measure_classes(y, logits, ALMOST_NONE, SeededStreams(0), len(y)).metrics
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    own = (weights / weights.sum(axis=1, keepdims=True))[np.arange(len(y)), y].clip(0.01, 0.99)
    assert found["accuracy"].value == pytest.approx((logits.argmax(axis=1) == y).mean(), abs=1e-4)
    assert found["log_loss"].value == pytest.approx(-np.log(own).mean(), abs=2e-3)


def test_without_noise_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    y = rng.uniform(10, 30, 20_000)
    told = y + rng.normal(0, 1, len(y))
    measured = run.measure_numbers(
        y, told, (10, 30), Release(GaussianSum(1e-3, "add-remove"), 2), SeededStreams(0), len(y)
    )
    error = np.minimum(np.abs(told - y), measured.clamp or 0.0)
    assert measured.metrics["mae"].value == pytest.approx(error.mean(), rel=1e-3)
    assert measured.metrics["rmse"].value == pytest.approx(math.sqrt((error**2).mean()), rel=1e-3)
    assert measured.metrics["r2"].value == pytest.approx(1 - (error**2).mean() / y.var(), abs=1e-3)
    ninth = measured.metrics["error_quantile_90"]
    assert ninth.low <= np.quantile(np.abs(told - y), 0.9) <= ninth.high


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_intervals_hold_the_truth_as_often_as_they_say(epsilon: float) -> None:
    """Accuracy .7484 and AUC .8 by the law; 200 draws of 300 records, at least 92% each (three deviations: 90.4%)."""
    rng, release = (
        np.random.default_rng(0),
        held_out_releases(held_out_release("gaussian", epsilon, 1e-5, "add-remove"), False),
    )
    y, margin = drawn(2_000_000, rng)
    truth = {"accuracy": ((margin > 0) == y).mean(), "auc": 0.8}
    held = dict.fromkeys(truth, 0)
    for seed in range(200):
        y, margin = drawn(300, rng)
        found = run.measure_classes(y, margin[:, None], release, SeededStreams(seed), 300).metrics
        for name, value in truth.items():
            held[name] += found[name].low <= value <= found[name].high
    assert all(hits >= 184 for hits in held.values())


def test_noise_of_an_accuracy_is_no_more_than_aimed_at() -> None:
    """Noise over sampling deviation, times mu sqrt(n), at AUC .8 and prevalence .5: published design values."""
    plan, law = strategy.for_two_classes(), strategy.reference_law(0.8, 0.5)
    for query, most in ((strategy.RIGHT, 3.4), (strategy.LOSSES, 10.8), (strategy.SQUARES, 6.0)):
        q = (query - (law * query).sum()).ravel()
        assert math.sqrt(q @ plan.covariance @ q / (law.ravel() @ q**2)) < most


def test_few_records_have_an_interval_and_no_point() -> None:
    y, margin = drawn(100, np.random.default_rng(0))
    release = held_out_releases(held_out_release("gaussian", 0.5, 1e-5, "add-remove"), False)
    found = run.measure_classes(y, margin[:, None], release, SeededStreams(0), 100).metrics
    assert {one.value for one in found.values()} == {None}
    assert found["accuracy"].high - found["accuracy"].low > 0.2


def test_a_ratio_whose_denominator_may_be_zero_says_nothing() -> None:
    assert fieller(1.0, 2.0, 4.0, 0.0, 4.0, 0.0, 1.0) == (0.0, 1.0)
    assert fieller(1.0, -20.0, 1.0, 0.0, 1.0, 0.0, 1.0) == (0.0, 1.0)


def test_the_linear_estimate_is_unbiased_and_its_noise_is_known() -> None:
    plan = strategy.for_errors()
    cells = len(plan.matrix)
    counts = np.arange(float(cells)) / 4
    rng = np.random.default_rng(0)
    found = np.array(
        [Noised(counts + plan.inverse @ rng.normal(0, 2.0, cells), plan, 2.0).records for _ in range(1000)]
    )
    known = Noised(counts, plan, 2.0).deviation_of(np.ones(cells))
    assert found.mean() == pytest.approx(counts.sum(), abs=4 * known / math.sqrt(2000))
    assert found.std() == pytest.approx(known, rel=0.06)


def test_an_interval_beyond_the_range_of_its_metric_keeps_a_width() -> None:
    """Of 60 records that a model tells apart, noise puts many an AUC above 1: nobody can be as sure as [1, 1]."""
    y, release = np.arange(60) % 2, held_out_releases(held_out_release("gaussian", 2.0, 1e-5, "add-remove"), False)
    for seed in range(20):
        found = run.measure_classes(y, (6.0 * y - 3)[:, None], release, SeededStreams(seed), 60).metrics
        assert all(one.high - one.low > 0.01 for one in found.values()), seed


def test_the_mean_of_metrics_of_which_little_is_known_reaches_to_the_means_of_their_ends() -> None:
    """Recalls .75 and .996 lie in both intervals: their mean, .873, has to lie in the interval of the mean."""
    found = mean_of([Estimate(None, 0.0, 1.0), Estimate(None, 0.5, 1.0)])
    assert (found.low, found.high, found.value) == (0.25, 1.0, None)
