"""What may be subtracted; differences and their intervals, against scipy's own tests and what they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.recipe.loading import dump_recipe, load_recipe
from dpsgd_cli.results.comparison import Difference, Sample, difference, equal_budgets, judge_together, reasons
from dpsgd_cli.results.evaluated import Evaluated, evaluated_on, identities_in
from dpsgd_cli.results.reading import data_and_folds


def sample(values: np.ndarray, seeds: tuple[int | None, ...] | None = None, folds: int | None = None) -> Sample:
    return Sample(tuple(values.tolist()), seeds or tuple(range(len(values))), folds)


def test_pairs_are_the_paired_t_test() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(0.9, 0.02, 8), random.normal(0.88, 0.03, 8)
    found, expected = difference(sample(a), sample(b)), stats.ttest_rel(a, b)
    assert found.kind == "paired"
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    interval = expected.confidence_interval(0.95)
    assert (found.mean - (found.ci95 or 0), found.mean + (found.ci95 or 0)) == pytest.approx(tuple(interval), rel=1e-9)


@pytest.mark.parametrize("seeds", [tuple(range(9, 17)), (None,) * 8])
def test_other_seeds_are_compared_by_welch(seeds: tuple[int | None, ...]) -> None:
    random = np.random.default_rng(1)
    a, b = random.normal(0.9, 0.02, 8), random.normal(0.88, 0.05, 8)
    found, expected = difference(sample(a), sample(b, seeds)), stats.ttest_ind(a, b, equal_var=False)
    assert found.kind == "unpaired"
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_folds_widen_the_interval_by_nadeau_and_bengio() -> None:
    random = np.random.default_rng(2)
    a, b = random.normal(0.9, 0.02, 10), random.normal(0.88, 0.03, 10)
    plain, folded = difference(sample(a), sample(b)), difference(sample(a, folds=5), sample(b, folds=5))
    assert (folded.ci95 or 0) / (plain.ci95 or 1) == pytest.approx(math.sqrt((1 / 10 + 1 / 4) / (1 / 10)), rel=1e-12)


def test_folds_of_other_seeds_are_widened_one_by_one() -> None:
    random = np.random.default_rng(6)
    a, b = random.normal(0.9, 0.02, 10), random.normal(0.88, 0.03, 10)
    found = difference(sample(a, folds=5), sample(b, tuple(range(20, 30)), folds=5))
    assert found.kind == "unpaired, corrected for shared folds"
    parts = a.var(ddof=1) * (1 / 10 + 1 / 4), b.var(ddof=1) * (1 / 10 + 1 / 4)
    freedom = sum(parts) ** 2 / sum(part**2 / 9 for part in parts)
    assert found.ci95 == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts)), rel=1e-9)


def test_a_95_percent_interval_covers_as_often_as_it_says() -> None:
    """4,000 repetitions: 95% within 5 standard errors (false failure below 1e-6); 2/3 and 3/2 of the width are not."""
    random = np.random.default_rng(3)
    found = [difference(sample(random.normal(0, 1, 6)), sample(random.normal(0.5, 1, 6))) for _ in range(4000)]

    def coverage(factor: float) -> float:
        return float(np.mean([abs(d.mean + 0.5) <= factor * (d.ci95 or 0) for d in found]))

    error = 5 * math.sqrt(0.95 * 0.05 / 4000)
    assert abs(coverage(1) - 0.95) < error
    assert abs(coverage(2 / 3) - 0.95) > error and abs(coverage(3 / 2) - 0.95) > error


def test_equal_trials_do_not_differ_and_constant_gaps_do() -> None:
    a = np.array([0.5, 0.625, 0.75])
    assert (difference(sample(a), sample(a)).p, difference(sample(a + 0.125), sample(a)).p) == (1.0, 0.0)


def test_a_single_trial_says_nothing() -> None:
    found = judge_together([difference(sample(np.array([0.9])), sample(np.array([0.5])))])
    assert (found[0].ci95, found[0].p, found[0].verdict) == (None, None, "unknown")


def test_holm_is_what_its_definition_says() -> None:
    """Reject the i-th smallest as long as p_(i) <= 5% / (m - i), for i from 0."""
    random = np.random.default_rng(4)
    for _ in range(200):
        p = random.uniform(0, 0.08, 6)
        judged = judge_together([Difference(0.0, 0.1, float(value), "paired", 5) for value in p])
        rejected, order = set(), np.argsort(p)
        for rank, index in enumerate(order):
            if p[index] > 0.05 / (6 - rank):
                break
            rejected.add(int(index))
        assert {i for i, one in enumerate(judged) if one.verdict == "significant"} == rejected


RECORDS = Evaluated("digits", ("card", "digits", "aa"), "5 folds")
TWO = {"epsilon": 2.0, "delta": 1e-5}
PRIVACY: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5, "adjacency": "add-remove", "budget": TWO,
                           "budget_covers": "total", "parts": {}}  # fmt: skip
OPEN = {**PRIVACY, "adjacency": None, "epsilon": None, "delta": None}


def test_what_is_equal_is_compared() -> None:
    assert reasons((RECORDS, PRIVACY), (RECORDS, PRIVACY)) == []


@pytest.mark.parametrize(
    ("tested", "privacy", "told"),
    [
        (Evaluated("mine.csv", ("own", "aa"), "5 folds"), PRIVACY, ["different data"]),
        (Evaluated("digits", RECORDS.source, "3 folds"), PRIVACY, ["different test records"]),
        (RECORDS, {**PRIVACY, "budget": None, "epsilon": 3.0}, ["different budgets"]),
        (RECORDS, {**PRIVACY, "adjacency": "zero-out"}, ["zero-out and add-remove are different guarantees"]),
        (Evaluated("x", (), ""), {**PRIVACY, "budget": None, "epsilon": 3.0}, ["different data", "different budgets"]),
        (RECORDS, OPEN, []),
        (Evaluated("x", (), ""), OPEN, ["different data"]),
    ],
)
def test_what_differs_is_told(tested: Evaluated, privacy: dict[str, Any], told: list[str]) -> None:
    assert reasons((tested, privacy), (RECORDS, PRIVACY)) == told


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"epsilon": 1.6}, True),  # it was free to spend the rest
        ({"budget": None, "epsilon": 1.99}, True),
        ({"budget": {"rho": 0.1}, "epsilon": 1.96}, False),
        ({"budget": {"epsilon": 2.0, "delta": 1e-6}, "delta": 1e-6}, False),
        ({"budget": None, "epsilon": None}, False),
        ({"budget_covers": "training", "epsilon": 2.3, "parts": {"pca": {"rho": 0.01}}}, False),
    ],
)
def test_budgets_are_those_that_recipes_name_or_what_is_spent(change: dict[str, Any], equal: bool) -> None:
    assert equal_budgets({**PRIVACY, **change}, PRIVACY) is equal_budgets(PRIVACY, {**PRIVACY, **change}) is equal


def test_what_a_budget_does_not_cover_must_be_equal_too() -> None:
    a = {**PRIVACY, "budget_covers": "training", "epsilon": 2.5, "parts": {"pca": {"rho": 0.1}, "gradient": {"rho": 1}}}
    assert equal_budgets(a, {**a, "epsilon": 2.4, "parts": {"pca": {"rho": 0.1}, "gradient": {"rho": 0.9}}})
    assert not equal_budgets(a, {**a, "epsilon": 2.4, "parts": {"pca": {"rho": 0.05}, "gradient": {"rho": 1}}})
    # so for what chooses its releases, whose parts stand under what it spent
    b = {key: value for key, value in a.items() if key != "parts"}
    spent = [{"spent": {"parts": {"pca": {"rho": rho}, "gradient": {"rho": 1}}}} for rho in (0.1, 0.05)]
    assert equal_budgets({**b, "epsilon": 2.4, **spent[0]}, a)
    assert not equal_budgets({**b, "epsilon": 2.4, **spent[1]}, a)


@pytest.mark.parametrize(
    ("source", "name", "records"),
    [
        ("quickstart", "digits", "359 of its records (split seed 0)"),
        ("lee2018/objective-perturbation", "adult", "5 folds"),
        ("yu2019/cancer-uniform", "breast-cancer-wisconsin", "123 of its records (split seed 0, by place)"),
        ("yu2019/cancer-non-private", "breast-cancer-wisconsin", "123 of its records (split seed 0, by place)"),
        ("yu2019/mnist-uniform", "mnist", "its own test records"),
    ],
)
def test_the_text_of_a_resolved_recipe_says_what_is_tested(source: str, name: str, records: str) -> None:
    recipe = load_recipe(source).recipe
    text = dump_recipe(recipe)
    hashes = {"data_sha256": {"b": "2"}, "nonprivate_data_sha256": {"a": "1"}}
    data, folds = data_and_folds(text)
    assert folds == recipe.folds
    found = evaluated_on(data, folds, identities_in(hashes))
    assert found == Evaluated(name, ("card", name, "1", "2"), records)
