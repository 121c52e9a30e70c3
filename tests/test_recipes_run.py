"""Shipped recipes train for an epoch, on random records in the layout of their data sets: one of each kind.

What is kept of a recipe is everything but sizes: preprocessing, model kind, method, clipping, schedule and budget.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli.data import card_files, card_readers, cards, opening
from dpsgd_cli.data.cards import Card
from dpsgd_cli.data.dataset import Part, RawDataset
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe, resolved, shipped_recipes
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto

RECIPES = shipped_recipes()
RECORDS = 24


def stand_in(card: Card, owner: str | None = None) -> RawDataset:
    """Random records with the card's layout and classes, a few in each of its files; two of each user."""
    rng = np.random.default_rng(0)

    def part(which: str) -> Part | None:
        files = [file for file in card.files if file.part == which and file.holds != "labels"]
        count = RECORDS * len(files)
        if not files:
            return None
        x: np.ndarray
        if card.layout.integers:
            x = rng.integers(0, 50, (count, *card.layout.shape))
        elif card.layout.columns is None:
            x = rng.random((count, *card.layout.shape), np.float32)
        else:
            tops = [1 if c.values is None else len(c.values) for c in card.layout.columns]
            x = np.floor(rng.random((count, len(tops))) * tops).astype(np.float32)
        whose = None if owner is None else (np.arange(count) // 2).astype(str)
        return Part(x, np.arange(count) % len(card.labels), owners=whose)

    train = part("train")
    assert train is not None
    return RawDataset(card.name, train, part("test"), card.layout, card.labels, (), (), {"stand-in": "0"})


def shrink(recipe: Recipe, has_test: bool) -> Recipe:
    """The same recipe for one epoch of one small trial."""
    content: dict[str, Any] = resolved(recipe)
    size = content["method"].get("batch_size")
    if isinstance(size, int) and size > 1:
        content["method"]["batch_size"] = 6
    if "hidden" in content["model"]:
        content["model"]["hidden"] = [3] * len(content["model"]["hidden"])
    if content["model"]["kind"] == "wrn":
        content["model"] |= {"depth": 10, "width": 1}
    if content["data"].get("augment") is not None:
        content["data"]["augment"]["copies"] = 2
    if content["data"].get("validation") is not None:
        content["data"]["validation"].pop("records", None)
        content["data"]["validation"]["fraction"] = 0.25
    if not has_test:
        content["folds"] = None  # the card's own split holds out more than there is
        content["data"]["split"] = {"test": 0.25}
    if isinstance(recipe.method, Gradient):
        content["epochs"] = 1
    if content["data"].get("public") is not None:
        content["data"]["public"]["records"] = 8
    if isinstance(recipe.method, PateMethod):
        content["method"]["teachers"] |= {"count": 4, "epochs": 1}
        content["method"]["student"]["epochs"] = 1
        if "threshold" in content["method"]["aggregation"]:
            content["method"]["aggregation"]["threshold"] = 0
        content["method"]["queries"] = 8
    for step in content["data"].get("preprocess") or []:
        if step.get("pca"):  # fewer components than public records: more are what rounding leaves
            step["pca"]["components"] = min(step["pca"]["components"], 6)
    dtype = content["runtime"]["dtype"]
    runtime = {"device": "cpu", "threads": 1, **({"dtype": dtype} if dtype == "float64" else {})}
    content |= {"repeats": 1, "runtime": runtime}
    return Recipe.model_validate(content)


def on_stand_in(file: Path, folder: Path, patch: pytest.MonkeyPatch) -> LoadedRecipe:
    """Return a shipped recipe, shrunk, with random records for its data set, or for its own file (in `folder`)."""
    recipe = load_recipe(str(file)).recipe
    patch.setattr(opening, "_kept", {})
    if recipe.data.path is not None:
        x, x_test = np.random.default_rng(0).random((2, RECORDS, 12), np.float32)
        y = np.arange(RECORDS) % len(recipe.data.classes or ())
        np.savez(folder / recipe.data.path, x=x, y=y, x_test=x_test, y_test=y)
        return LoadedRecipe(shrink(recipe, has_test=True), folder, str(file))
    assert recipe.data.name is not None
    card = cards.load_card(recipe.data.name)
    patch.setattr(card_readers, "read", stand_in)
    patch.setattr(card_files, "records", lambda card, file: RECORDS)
    return LoadedRecipe(shrink(recipe, any(file.part == "test" for file in card.files)), file.parent, str(file))


@functools.cache
def firsts() -> set[Path]:
    """The first recipe of each combination of model and method with its privacy."""
    found: dict[str, Path] = {}
    for file in RECIPES.values():
        recipe = load_recipe(str(file)).recipe
        kinds = {} if recipe.privacy is None else dict(recipe.privacy)
        privacy = [type(kinds.get(name)) for name in ("budget", "clipping", "schedule", "noise")]
        found.setdefault(repr((type(recipe.model), recipe.method.kind, recipe.adjacency, privacy)), file)
    return set(found.values())


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=name, marks=() if file in firsts() else pytest.mark.long) for name, file in RECIPES.items()],
)
def test_a_recipe_trains(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = on_stand_in(file, tmp_path, monkeypatch)
    recipe = small.recipe
    directory = loop.run(resolve_auto(small), loop.Options(out=tmp_path, save_models=True))
    document = json.loads((directory / "result.json").read_text())
    assert all(math.isfinite(metric["mean"]) for metric in document["metrics"].values())
    ledger = (directory / "ledger.jsonl").read_text()
    assert bool(ledger) == (recipe.privacy is not None)
    budget = document["privacy"]["budget"] if recipe.privacy is not None else None
    if budget is not None and document["privacy"]["budget_covers"] == "total":
        spent = "rho" if "rho" in budget else "epsilon"
        assert document["privacy"][spent] <= budget[spent]
    if small.recipe.data.measured_privately:
        assert "held-out" in ledger
        return
    # its model, read back, is worth what the result says, to the digit
    again = Trained.load(directory).own_metrics()
    assert again == {name: [trial[f"test_{name}"] for trial in document["trials"]] for name in again}
    assert {f"test_{name}" for name in again} == {name for name in document["metrics"] if name.startswith("test_")}
