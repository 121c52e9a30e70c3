"""Blocks of the released vector: groups, users and confusion matrices, against plain computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics as plain

from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.evaluation import groups, metrics, run, strategy
from dpsgd_cli.evaluation.estimates import Measured
from dpsgd_cli.evaluation.groups import Grouping, HeldOut
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases

QUIET = GaussianSum(1e-4, "add-remove")
NAMES = (("x", "ab"), ("z", "abc"))
ONE = held_out_release("gaussian", 1.0, 1e-5, "add-remove")


def grouped(rows: int, rng: np.random.Generator, users: int | None = None) -> HeldOut:
    """Two columns of 3 and 4 values; with users, rows // 3 of three rows each."""
    columns = [Grouping(str(size), tuple("abcd"[:size]), rng.integers(0, size, rows)) for size in (3, 4)]
    return HeldOut(None if users is None else np.full(rows, 1 / users), tuple(columns), users is not None)


def points(found: Measured) -> np.ndarray:
    """The confusion matrix without intervals."""
    return np.array([[one.value for one in row] for row in found.confusion], dtype=float)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_the_mixing_is_the_root_of_half_the_identity_and_half_ones(size: int) -> None:
    wanted = (np.eye(size) + np.ones((size, size))) / 2
    made = groups.mixing(size)
    assert np.allclose(made @ made, wanted) and np.allclose(np.linalg.norm(made, axis=1), 1)
    inverse = np.linalg.inv(wanted)
    assert np.allclose(groups.unmixing(size) @ made, np.eye(size))
    assert np.allclose(np.diag(inverse), groups.spread(size))
    assert inverse.sum() == pytest.approx(groups.spread(size))


@pytest.mark.parametrize("kind", ["two", "four", "numbers"])
@pytest.mark.parametrize("users", [None, 3])
def test_a_record_or_user_more_moves_each_vector_by_at_most_one(
    kind: str, users: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact sums are caught before noise; a user's rows are alike or different."""
    sums: list[np.ndarray] = []

    def caught(stream: object, purpose: str, counter: int, exact: np.ndarray, *rest: object) -> np.ndarray:
        sums.append(exact)
        return exact

    monkeypatch.setattr(run, "gaussian", caught)
    monkeypatch.setattr(metrics, "clamp_of", lambda noised: 0.2)
    monkeypatch.setattr(metrics, "median_of", lambda counts: 0.1)
    rng, units, each = np.random.default_rng(0), 8, users or 1
    outputs, numbers = rng.normal(0, 3, (units * each, 4 if kind == "four" else 1)), kind == "numbers"
    y = rng.integers(0, 4 if kind == "four" else 2, units * each)
    outputs[: 2 * each], y[: 2 * each] = outputs[0], y[0]
    held = grouped(units * each, rng, users)
    for column in held.groupings:
        column.codes[: 2 * each] = 0
    for left in range(units + 1):
        own = np.arange(units * each) // each != left
        fewer = HeldOut(
            None if held.weights is None else held.weights[own],
            tuple(Grouping(one.name, one.values, one.codes[own]) for one in held.groupings),
            held.users,
        )
        release = held_out_releases(ONE, numbers)
        if numbers:
            run.measure_numbers(y[own] / 4, outputs[own, 0] / 9, (0, 1), release, SeededStreams(0), 99, fewer)
        else:
            run.measure_classes(y[own], outputs[own], release, SeededStreams(0), 99, fewer)
    vectors = 2 if numbers else 1
    for vector in range(vectors):
        own_sums = sums[vector::vectors]
        moves = [float(np.linalg.norm(one - own_sums[-1])) for one in own_sums[:-1]]
        assert max(moves) <= 1 + 1e-12
        # the first user's rows are identical: they move it by a whole column; moments are shorter
        assert moves[0] > (0.4 if vector else 0.98)


def test_without_noise_groups_have_the_metrics_of_their_records() -> None:
    rng, rows = np.random.default_rng(0), 8000
    held, y = grouped(rows, rng), rng.integers(0, 2, rows)
    margin = rng.normal(2.0 * y - 1, 1.5) * (1 + held.groupings[0].codes)
    found = run.measure_classes(y, margin[:, None], Release(QUIET), SeededStreams(0), rows, held)
    for column in held.groupings:
        for number, value in enumerate(column.values):
            own = column.codes == number
            group = found.groups[column.name][value]
            assert group.records == pytest.approx(own.sum(), abs=0.1)
            told = group.metrics
            assert told["accuracy"].value == pytest.approx(((margin > 0) == y)[own].mean(), abs=1e-3)
            assert told["auc"].value == pytest.approx(plain.roc_auc_score(y[own], margin[own]), abs=2e-3)
    assert found.metrics["accuracy"].value == pytest.approx(((margin > 0) == y).mean(), abs=1e-3)


def test_without_noise_users_count_once() -> None:
    rng, users = np.random.default_rng(0), 3000
    rows = rng.integers(1, 4, users)
    whose = np.repeat(np.arange(users), rows)
    y = rng.integers(0, 2, len(whose))
    margin = rng.normal(2.0 * y - 1, 1.5) * np.where(rows[whose] == 1, -1, 1)
    held = HeldOut(1 / rows[whose], (), users=True)
    found = run.measure_classes(y, margin[:, None], Release(QUIET), SeededStreams(0), len(y), held)
    by_user = np.bincount(whose, (margin > 0) == y) / rows
    assert found.metrics["accuracy"].value == pytest.approx(by_user.mean(), abs=1e-3)
    assert abs(by_user.mean() - ((margin > 0) == y).mean()) > 5e-3
    assert found.noised.records == pytest.approx(users, abs=0.1) and found.record()["unit"] == "users"


def test_without_noise_confusion_precision_and_curve_are_those_of_scikit_learn() -> None:
    rng, rows = np.random.default_rng(0), 12_000
    y = rng.integers(0, 4, rows)
    outputs = rng.normal(0, 1, (rows, 4)) + np.eye(4)[y] * 1.5
    found = run.measure_classes(y, outputs, Release(QUIET), SeededStreams(0), rows)
    wanted = plain.confusion_matrix(y, outputs.argmax(axis=1), normalize="true")
    assert np.allclose(points(found), wanted, atol=1e-3)
    assert found.metrics["balanced_accuracy"].value == pytest.approx(np.diag(wanted).mean(), abs=1e-3)
    each = plain.f1_score(y, outputs.argmax(axis=1), average=None)
    assert [one.value for one in found.f1] == pytest.approx(each.tolist(), abs=1e-3)
    y = (rng.random(rows) < 0.1).astype(int)
    margin = rng.normal(2.0 * y - 2.5, 1.2)
    found = run.measure_classes(y, margin[:, None], Release(QUIET), SeededStreams(0), rows)
    precision = plain.average_precision_score(y, margin)
    assert found.metrics["average_precision"].value == pytest.approx(precision, abs=5e-3)
    table = plain.confusion_matrix(y, margin > 0, normalize="true")
    assert np.allclose(points(found), table, atol=1e-3)
    assert [one.value for one in found.f1] == pytest.approx(plain.f1_score(y, margin > 0, average=None), abs=1e-3)
    share = 1 / (1 + np.exp(-margin))
    assert found.metrics["calibration_gap"].value == pytest.approx((y - share).mean(), abs=2e-3)
    for at, sensitive, specific in found.curve:
        assert sensitive.value == pytest.approx((share > at)[y == 1].mean(), abs=2e-3)
        assert specific.value == pytest.approx((share <= at)[y == 0].mean(), abs=2e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_f1_scores_are_covered_as_stated(count: int) -> None:
    """Shares halve from class to class; 120 draws of 500 records at epsilon 1.5: at least 90% of each class's hold."""
    rng, release = (
        np.random.default_rng(0),
        held_out_releases(held_out_release("gaussian", 1.5, 1e-5, "add-remove"), False),
    )
    shares = 0.5 ** np.arange(count)

    def drawn(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.choice(count, n, p=shares / shares.sum())
        return y, rng.normal(0, 1, (n, count)) + 1.2 * np.eye(count)[y]

    y, outputs = drawn(400_000)
    truth, held = plain.f1_score(y, outputs.argmax(axis=1), average=None), np.zeros(count)
    for seed in range(120):
        y, outputs = drawn(500)
        own = outputs if count > 2 else np.diff(outputs, axis=1)
        found = run.measure_classes(y, own, release, SeededStreams(seed), 500)
        held += [one.low <= true <= one.high for one, true in zip(found.f1, truth, strict=True)]
    assert (held >= 108).all()


def test_the_calibration_gap_of_many_classes_is_covered_as_stated() -> None:
    """Four classes with logits 1.6 times too large; 100 draws of 500 records, epsilon 2: at least 89% hold."""
    rng, release = (
        np.random.default_rng(0),
        held_out_releases(held_out_release("gaussian", 2.0, 1e-5, "add-remove"), False),
    )

    def drawn(n: int) -> tuple[np.ndarray, np.ndarray, float]:
        y = rng.integers(0, 4, n)
        outputs = 1.6 * (rng.normal(0, 1, (n, 4)) + 1.2 * np.eye(4)[y])
        shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
        return y, outputs, float(((outputs.argmax(axis=1) == y) - shares.max(axis=1)).mean())

    truth, held, values = drawn(500_000)[2], 0, []
    assert truth < -0.05
    for seed in range(100):
        y, outputs, _ = drawn(500)
        found = run.measure_classes(y, outputs, release, SeededStreams(seed), 500).metrics["calibration_gap"]
        held += found.low <= truth <= found.high
        values.append((found.low + found.high) / 2)
    assert 89 <= held <= 99
    assert abs(np.mean(values) - truth) < 0.01


def test_the_interval_of_a_calibration_gap_holds_the_noise_of_both_sums() -> None:
    """500 records that are all right and certain, so that all is noise; of 100 releases at least 89 hold 0."""
    release = held_out_releases(held_out_release("gaussian", 1.0, 1e-5, "add-remove"), False)
    y = np.arange(500) % 4
    made = [
        run.measure_classes(y, 30.0 * np.eye(4)[y], release, SeededStreams(seed), 500).metrics["calibration_gap"]
        for seed in range(100)
    ]
    assert sum(one.low <= 0 <= one.high for one in made) >= 89


def test_the_stated_noise_of_counts_is_that_of_repeated_releases() -> None:
    """Numbers of records of groups, all, and a confusion matrix's rows, over 120 releases of nothing."""
    held = HeldOut(None, tuple(Grouping(name, tuple(values), np.zeros(0, int)) for name, values in NAMES))
    release, y, outputs = held_out_releases(ONE, False), np.zeros(0, int), np.zeros((0, 3))
    made = [run.measure_classes(y, outputs, release, SeededStreams(seed), 9, held) for seed in range(120)]
    plan = strategy.for_many_classes()
    alone = ONE.noise_multiplier * math.sqrt(float(plan.covariance.sum()) / 0.76)
    records = [one.noised.records for one in made]
    assert made[0].noised.deviation_of(np.ones(256)) == pytest.approx(alone * math.sqrt((4 / 3 + 6 / 4) / 2))
    assert np.std(records) == pytest.approx(alone * math.sqrt((4 / 3 + 6 / 4) / 2), rel=0.2)
    group = [one.groups["z"]["b"].records for one in made]
    stated = groups.of_value(3, 2, 0.76) * ONE.noise_multiplier * math.sqrt(float(plan.covariance.sum()))
    assert stated == pytest.approx(alone * math.sqrt(2 * 6 / 4))
    assert np.std(group) == pytest.approx(stated, rel=0.2)


def test_an_average_precision_is_covered_as_stated() -> None:
    """A fifth is of the second class; 200 draws of 1,000 records at epsilon 2: at least 90%."""
    rng, release = (
        np.random.default_rng(0),
        held_out_releases(held_out_release("gaussian", 2.0, 1e-5, "add-remove"), False),
    )

    def drawn(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = (rng.random(n) < 0.2).astype(int)
        return y, rng.normal(2.0 * y - 2, 1.3)

    truth, held = plain.average_precision_score(*drawn(500_000)), 0
    for seed in range(200):
        y, margin = drawn(1000)
        found = run.measure_classes(y, margin[:, None], release, SeededStreams(seed), 1000).metrics["average_precision"]
        held += found.low <= truth <= found.high
    assert held >= 180
