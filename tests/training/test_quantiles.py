"""Huber and quantile losses of targets: what a trained model predicts, at the price of any other loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training.explain import explain
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import WriteRecipe

Train = Callable[..., Path]
COSTS: dict[str, Any] = {"path": "costs.csv", "target": "y", "task": "regression", "target_bounds": [0, 1000]}
COSTS |= {"bounds": {"a": [0, 1]}, "preprocess": [{"bin": {}}]}
RULED: dict[str, Any] = {"method": {"kind": "dp-gd"}, "epochs": 300, "repeats": 1}
RULED |= {"privacy": {"budget": {"epsilon": 30, "delta": 1e-5}}}


@pytest.fixture
def costs(tmp_path: Path) -> pd.DataFrame:
    """1,000 costs with a long tail, which grow with a."""
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"a": rng.random(1000)})
    table["y"] = np.minimum(rng.lognormal(3.5 + table["a"], 0.8), 1000)
    table.to_csv(tmp_path / "costs.csv", index=False)
    return table


def test_a_model_predicts_the_asked_quantile_of_a_long_tail(
    write_recipe: WriteRecipe, train: Train, costs: pd.DataFrame
) -> None:
    """A share q of the targets lies below it; each loss has the same price."""
    below, spent, errors = {}, set(), {}
    losses: dict[str, dict[str, Any]] = {
        "squared": {"loss": "squared"},
        "median": {"loss": "quantile"},
        "0.9": {"loss": "quantile", "quantile": 0.9},
        "huber": {"loss": "huber", "huber_width": 0.01},
    }
    for name, model in losses.items():
        directory = train(write_recipe(data=COSTS, model={"kind": "convex"} | model, **RULED), save_models=True)
        trained, (trial,) = Trained.load(directory), store.read_document(directory)["trials"]
        told = trained.predict(trained.source.rows(costs), 0)
        below[name], errors[name] = (costs["y"] < told).mean(), np.abs(costs["y"] - told).mean()
        spent.add(trial["epsilon"])
        for metric, again in trained.metrics().items():
            assert again == pytest.approx([trial[f"test_{metric}"]]), metric
        assert name != "median" or explain(trained).shapes
    assert below["median"] == pytest.approx(0.5, abs=0.06) and below["0.9"] == pytest.approx(0.9, abs=0.05)
    assert below["huber"] == pytest.approx(0.5, abs=0.1)
    assert errors["median"] < np.abs(costs["y"] - costs["y"].median()).mean()
    assert len(spent) == 1


def test_settings_by_rule_follow_the_bounds_of_a_loss(write_recipe: WriteRecipe, costs: pd.DataFrame) -> None:
    """A slope of a quantile loss is at most max(q, 1 - q), one of huber its width: clip norms by hand, with a bias."""
    norms = {}
    for name, model in {
        "q": {"loss": "quantile", "quantile": 0.9},
        "h": {"loss": "huber", "huber_width": 0.02},
    }.items():
        recipe = resolve_auto(
            load_recipe(str(write_recipe(data=COSTS, model={"kind": "convex"} | model, **RULED)))
        ).recipe
        assert recipe.privacy is not None
        norms[name] = recipe.privacy.clipping.norm_bound(None)
    assert norms == pytest.approx({"q": 0.9 * np.sqrt(2), "h": 0.02 * np.sqrt(2)}, rel=1e-5)
