"""What may be subtracted from what."""

from __future__ import annotations

from typing import Any

import pytest

from dpsgd_cli.data.evaluated import Evaluated
from dpsgd_cli.recipe.loading import dump_recipe, load_recipe
from dpsgd_cli.results.comparable import equal_budgets, evaluated_in, folds_in, reasons

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
        ("yu2019/cancer-uniform", "breast-cancer-wisconsin", "123 of its records (split seed 0)"),
        ("yu2019/mnist-uniform", "mnist", "its own test records"),
    ],
)
def test_the_text_of_a_resolved_recipe_says_what_is_tested(source: str, name: str, records: str) -> None:
    recipe = load_recipe(source).recipe
    text = dump_recipe(recipe)
    hashes = {"data_sha256": {"b": "2"}, "nonprivate_data_sha256": {"a": "1"}}
    assert folds_in(text) == recipe.folds
    assert evaluated_in(text, hashes) == Evaluated(name, ("card", name, "1", "2"), records)
