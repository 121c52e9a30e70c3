"""Convex recipes from file to result: folds, packs of budgets, theory, and what is refused on the way."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.errors import ModelError, RecipeError
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member

SMALL = ["data.name=breast-cancer", "data.preprocess=[{scale: {by: bounds}}]", "runtime.threads=1"]


def loaded(recipe: str, *changes: str) -> LoadedRecipe:
    return load_recipe(recipe, [*SMALL, *changes])


def finished(directory: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    with (directory / "trials.csv").open(newline="") as file:
        return json.loads((directory / "result.json").read_text()), list(csv.DictReader(file))


def test_folds_train_side_by_side_and_are_tested_on_what_they_did_not_see(tmp_path: Path) -> None:
    recipe = loaded("lee2018/dp-agd-better", "privacy.budget.epsilon=20", "repeats=2")
    document, trials = finished(loop.run(resolve_auto(recipe), loop.Options(tmp_path)))
    assert [(row["fold"], row["repeat"]) for row in trials] == [(str(i % 5), str(i // 5)) for i in range(10)]
    assert document["metrics"]["test_accuracy"]["n"] == 10
    assert document["metrics"]["test_accuracy"]["mean"] > 0.9
    assert document["metrics"]["nonprivate_train_objective"]["mean"] > 0
    assert 0 < document["privacy"]["epsilon"] <= 20
    said = " ".join(document["privacy"]["declarations"])
    assert "records is public: 569; each trial trains on at most 513" in said
    assert "public to it" in said and "The 114 test records" not in said


def test_folds_of_two_files_count_what_was_priced(tmp_path: Path) -> None:
    """10 and 5 rows, 3 folds: prices count 10 - 3 + 5 - 1 = 11 records, though by seed 1 no fold trains on so many."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.random((10, 2)),
        "y": np.arange(10) % 2,
        "x_test": rng.random((5, 2)),
        "y_test": np.arange(5) % 2,
    }
    np.savez(tmp_path / "two.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "two.yaml").write_text(
        "name: two\ndata: {path: two.npz, classes: [0, 1], preprocess: []}\nmodel: {kind: convex}\nfolds: 3\n"
        "method: {kind: dp-gd}\nseed: 1\nepochs: 1\n"
        "privacy: {adjacency: zero-out, budget: {epsilon: 1, delta: 1.0e-5}}\n"
    )
    held = np.bincount(Keys.of_places((10, 5)).parts(3, "fold 0", 1))
    assert held.min() > 10 // 3 + 5 // 3
    document, _ = finished(loop.run(resolve_auto(load_recipe(str(tmp_path / "two.yaml"), ())), loop.Options(tmp_path)))
    assert "each trial trains on at most 11 of them" in " ".join(document["privacy"]["declarations"])


@pytest.mark.parametrize("name", ["dp-agd", "dp-gd-plain", "objective-perturbation", "sgd-ma"])
def test_budgets_of_one_method_train_as_one_pack_to_what_each_gets_alone(name: str, tmp_path: Path) -> None:
    more = ["method.batch_size=50"] if name == "sgd-ma" else []
    recipes = [loaded(f"lee2018/{name}", f"privacy.budget.epsilon={e}", "folds=2", *more) for e in (2, 5)]
    members = [Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, recipes)]
    together = loop.run_pack(members, loop.Options(tmp_path / "pack"))
    for one, directory in zip(recipes, together, strict=True):
        ours, theirs = (
            finished(directory)[0],
            finished(loop.run(resolve_auto(one), loop.Options(tmp_path / "alone")))[0],
        )
        assert ours["privacy"] == theirs["privacy"]
        for metric in ours["metrics"]:
            assert ours["metrics"][metric]["mean"] == pytest.approx(theirs["metrics"][metric]["mean"], rel=1e-3)
    assert finished(together[0])[0]["metrics"] != finished(together[1])[0]["metrics"]


def test_a_convex_model_tells_two_classes_apart(tmp_path: Path) -> None:
    recipe = load_recipe("lee2018/dp-agd", ["data.name=digits"])
    with pytest.raises(ModelError, match="two classes"):
        loop.run(resolve_auto(recipe), loop.Options(tmp_path))


def test_a_dry_run_states_the_budget_and_the_records_of_a_fold() -> None:
    from click.testing import CliRunner

    from dpsgd_cli.cli.train import command

    ran = CliRunner().invoke(command, ["lee2018/dp-agd", "--dry-run"])
    assert ran.exit_code == 0
    assert "dp-agd: until the budget is spent" in ran.output
    assert "epsilon                   at most 0.4000 at delta 1e-08, by zcdp" in ran.output
    assert "records is public: 48842; each trial trains on at most 39605" in ran.output
    assert "32561" not in ran.output


OWN_TARGETS = """
name: large
data: {path: large.csv, target: y, task: regression, bounds: {a: [0, 1]}, preprocess: [{scale: {by: bounds}}]}
model: {kind: convex, loss: squared, target_bound: 2}
method: {kind: dp-gd, learning_rate: 0.5}
privacy: {clipping: {kind: flat, norm: 3}, budget: {epsilon: 5, delta: 1e-4}, schedule: {kind: uniform, initial: auto}}
epochs: 5
seed: 0
"""


def regression_recipe(folder: Path) -> Path:
    """Targets from 10 to 50, which a bound of 2 clamps to 2."""
    rows = [f"{i % 41 / 40},{10 + i % 41}" for i in range(205)]
    (folder / "large.csv").write_text("\n".join(["a,y", *rows]))
    (folder / "large.yaml").write_text(OWN_TARGETS)
    return folder / "large.yaml"


def test_test_metrics_are_of_targets_as_they_are_and_the_clamping_is_declared(tmp_path: Path) -> None:
    recipe = load_recipe(str(regression_recipe(tmp_path)))
    document, trials = finished(loop.run(resolve_auto(recipe), loop.Options(tmp_path / "out")))
    mae, loss = (float(trials[0][name]) for name in ("test_mae", "test_loss"))
    # half the mean square is at least half the square of the mean: of clamped targets it would be below 4
    assert mae > 10 and loss >= mae**2 / 2 * (1 - 1e-6)
    assert float(trials[0]["nonprivate_train_loss"]) < 4
    assert any("clamped to [-2, 2]" in said for said in document["privacy"]["declarations"])


def test_an_own_file_needs_a_bound_on_its_targets(tmp_path: Path) -> None:
    path = regression_recipe(tmp_path)
    path.write_text(OWN_TARGETS.replace(", target_bound: 2", ""))
    with pytest.raises(RecipeError, match=r"large.yaml:3: data.target_bounds: missing; give \[low, high\]"):
        load_recipe(str(path))
