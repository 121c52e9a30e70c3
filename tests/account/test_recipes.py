from __future__ import annotations

import math
from pathlib import Path

import pytest

from dpsgd_cli.account.recipes import demand_of
from dpsgd_cli.data.preparation import outline
from dpsgd_cli.errors import PrivacyError, UsageError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import feature_bound, training_records


def test_it_asks_for_what_the_lecture_says_at_the_problems_public_numbers() -> None:
    """Adult: 6 numeric columns in [0, 1], 8 categories, a constant: L = sqrt(15), P = 6 + 102 + 1, R = 10."""
    row = demand_of(load_recipe("lectures/adult-dp-gd"), 0.1)
    assert row["lipschitz"] == pytest.approx(15**0.5)
    assert row["steps"] == 4 * 10**2 * 15 * 100
    assert row["weights"] == 109
    again = demand_of(load_recipe("lectures/adult-dp-gd", ["model.radius=5"]), 0.1)
    assert 4 * again["steps"] == row["steps"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["model.radius=null"], UsageError, "radius"),
        (["data.preprocess=[{scale: {by: standard}}, {one-hot: {}}]"], PrivacyError, "bounds"),
        (["privacy.budget={rho: 0.1}", "privacy.delta=1e-6", "privacy.accountant=auto"], PrivacyError, "epsilon"),
    ],
)
def test_what_the_lecture_does_not_cover_is_refused(changes: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        demand_of(load_recipe("lectures/adult-dp-gd", changes), 0.1)


def test_folds_train_on_all_but_their_part_of_all_records() -> None:
    folds = load_recipe("lee2018/dp-gd-plain")
    known = outline(folds.recipe.data, Path())
    assert training_records(folds.recipe, known) == math.ceil(48842 * 0.8 + 6 * math.sqrt(48842 * 0.8 * 0.2))
    by_place = load_recipe("lee2018/dp-gd-plain", ["privacy.adjacency=zero-out"])
    assert training_records(by_place.recipe, known) == 32561 - 32561 // 5 + 16281 - 16281 // 5
    plain = load_recipe("lectures/adult-dp-gd")
    assert training_records(plain.recipe, known) == 32561
    assert feature_bound(plain.recipe, known) == pytest.approx(15**0.5)
    assert feature_bound(load_recipe("quickstart", ["model={kind: mlp}"]).recipe, known) is None
