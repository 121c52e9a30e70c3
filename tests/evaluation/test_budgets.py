"""The release on held-out records stays within every kind of budget, whatever the training is priced by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner

from dpsgd_cli.accounting import accountants
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto

FULL: dict[str, Any] = {"kind": "dp-gd", "learning_rate": 0.5}
SAMPLED = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 8, "learning_rate": 0.5}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(400).round(3), "y": rng.integers(0, 2, 400)})
    frame.to_csv(tmp_path / "own.csv", index=False)
    return tmp_path / "own.yaml"


def recipe(path: Path, data: dict[str, Any] | None = None, **sections: Any) -> str:
    base: dict[str, Any] = {
        "name": "own",
        "data": {"path": "own.csv", "target": "y", "classes": [0, 1], "bounds": {"a": [0, 1]}} | (data or {}),
        "model": {"kind": "convex", "loss": "logistic"},
        "method": FULL,
        "privacy": {"budget": {"epsilon": 2.0, "delta": 1e-5}},
        "epochs": 3,
        "seed": 0,
    }
    path.write_text(yaml.safe_dump(base | sections))
    return str(path)


def held_out(path: str) -> Any:
    plan, _ = plan_and_outline(resolve_auto(load_recipe(path, ())))
    assert plan is not None
    (release,) = plan.held_out
    return release


def test_a_rho_is_not_passed_by_measuring(own: Path) -> None:
    """A Gaussian release is 1 / (2 z^2)-zCDP (Bun and Steinke 2016, Proposition 1.6)."""
    privacy = {"budget": {"rho": 0.125}, "delta": 1e-6, "accountant": "basic-composition"}
    release = held_out(recipe(own, privacy=privacy))
    assert 0 < 1 / (2 * release.mechanism.noise_multiplier**2) <= 0.125 * (1 + 1e-9)


@pytest.mark.parametrize("accountant", ["basic-composition", "gaussian"])
def test_both_releases_of_a_regression_are_priced_together(own: Path, accountant: str) -> None:
    privacy = {"budget": {"epsilon": 2.0, "delta": 1e-5}, "accountant": accountant}
    numbers = {"task": "regression", "target_bounds": [0, 1], "classes": None}
    path = recipe(own, {k: v for k, v in numbers.items() if v}, privacy=privacy, model={"kind": "linear"}, epochs=1)
    content = yaml.safe_load(own.read_text())
    del content["data"]["classes"]
    own.write_text(yaml.safe_dump(content))
    release = held_out(path)
    assert release.count == 2
    assert accountants.get(accountant).epsilon([release], 1e-5) <= 2.0 * (1 + 1e-9)


def test_pate_of_an_own_table_trains_and_measures_in_private(own: Path) -> None:
    pate = {
        "kind": "pate", "teachers": {"count": 4, "epochs": 1}, "queries": 8,
        "aggregation": {"kind": "gnmax", "noise": 60}, "student": {"epochs": 1},
    }  # fmt: skip
    path = recipe(
        own,
        {"public": {"from": "train", "records": 60}},
        method=pate,
        model={"kind": "linear"},
        privacy={"delta": 1e-3},
        epochs="auto",
    )
    done = CliRunner().invoke(main, ["train", path, "--verbose", "--out", str(own.parent / "out")])
    assert done.exit_code == 0, done.stderr
    assert "held-out" in done.stdout


@pytest.mark.parametrize(
    ("data", "method", "said"),
    [
        ({"class_weights": [1, 5]}, FULL, "records that weigh alike"),
        ({}, FULL | {"weight_decay": 0.1}, "a loss without penalty"),
    ],
)
def test_intervals_are_not_of_another_loss(own: Path, data: dict[str, Any], method: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(recipe(own, data, method=method | {"inference": "intervals"}), ())
