"""Tier D on a recipe's own file: a removed record moves nobody else, and a split by row number is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dpsgd_cli.audit.data_neighbours import compare_file
from dpsgd_cli.data import preparation
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.training.plans import resolve_auto

FRACTION: dict[str, Any] = {"data": {"split": {"test": 0.3}}}
COUNT: dict[str, Any] = {"data": {"split": {"test": 20}}}
FOLDS: dict[str, Any] = {"folds": 3}
PATE = {
    "data": {"split": {"test": 20}, "public": {"from": "test", "records": 8}},
    "method": {
        "kind": "pate",
        "aggregation": {"kind": "gnmax", "noise": 4},
        "teachers": {"count": 10, "epochs": 1, "learning_rate": 1.0},
        "student": {"epochs": 1, "learning_rate": 1.0},
    },
    "privacy": {"delta": 1e-5},
}
USERS = {"privacy": {"unit": {"column": "who", "most_rows": 2}}}
ZERO_OUT = {**FRACTION, "privacy": {"adjacency": "zero-out"}}
PRIVATE = {"data": {"split": {"test": 0.3}, "bounds": {"a": "private"}, "categorical": {"b": "private"}}}
KINDS = {"fraction": FRACTION, "count": COUNT, "folds": FOLDS, "pate": PATE, "users": USERS, "zero-out": ZERO_OUT}
KINDS |= {"private": PRIVATE}


def findings(changes: dict[str, Any], folder: Path) -> list[bool]:
    """Whether each removal refutes the claim of a recipe for 90 rows, some of them identical, of 30 users."""
    rows = np.arange(90)
    frame = pd.DataFrame({"a": (rows // 2) / 100, "b": rows % 2 * (rows > 20), "who": rows // 3, "y": rows // 2 % 2})
    frame.to_csv(folder / "own.csv", index=False)
    recipe: dict[str, Any] = {
        "name": "own",
        "data": {"path": "own.csv", "target": "y", "classes": [0, 1], "bounds": [0, 1]},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0},
        "privacy": {"budget": {"epsilon": 1.0, "delta": 1e-5}},
        "epochs": 2,
        "seed": 0,
    }
    if "unit" not in changes.get("privacy", {}):
        recipe["data"]["drop"] = ["who"]
    for section, own in changes.items():
        merged = isinstance(own, dict) and section != "method" and "delta" not in own
        recipe[section] = {**recipe[section], **own} if merged else own
    if recipe["method"]["kind"] == "pate":
        del recipe["epochs"]
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    return [one.refutes(0.95) for one in compare_file(resolve_auto(load_recipe(str(folder / "own.yaml"), ())))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_record_moves_nobody_else(kind: str, tmp_path: Path) -> None:
    found = findings(KINDS[kind], tmp_path)
    assert found == [False] * 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("zero-out", "users")])
def test_parts_by_row_number_are_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "content_keys", lambda *arrays: Keys.of_places([len(arrays[0])]))
    assert any(findings(KINDS[kind], tmp_path))


def test_users_by_rank_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked(names: Any) -> Keys:
        return Keys(np.arange(len(names)), by_place=True, of_users=True)

    monkeypatch.setattr(Keys, "of_names", ranked)
    assert any(findings(USERS, tmp_path))


def test_identical_records_that_share_a_coin_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbering that counts from the end moves the others when one is removed."""
    monkeypatch.setattr(preparation, "content_keys", lambda *arrays: Keys(np.arange(len(arrays[0]))[::-1] + 7, False))
    assert any(findings(FRACTION, tmp_path))


def test_by_adjacency_a_records_content_or_place_decides(tmp_path: Path) -> None:
    """And without privacy what the recipe says, or else its batching's adjacency."""
    method = {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0}
    given: dict[str, Any] = {"name": "own", "data": {"path": "own.csv", "target": "y"}, "model": {"kind": "linear"}}
    privacy = {"budget": {"epsilon": 1.0, "delta": 1e-5}}
    for adjacency, by_place in (("add-remove", False), ("replace-one", True), ("zero-out", True)):
        made = Recipe.model_validate({**given, "method": method, "privacy": {**privacy, "adjacency": adjacency}})
        assert made.data.by_place == by_place
    plain = {"kind": "sgd", "batching": "full", "learning_rate": 1.0}
    for coins, by_place in ((None, False), ("place", True), ("content", False)):
        data = given["data"] | ({} if coins is None else {"coins": coins})
        assert Recipe.model_validate({**given, "data": data, "method": plain, "epochs": 1}).data.by_place == by_place
    data = given["data"] | {"coins": "place"}
    with pytest.raises(ValueError, match="with it, the adjacency decides"):
        Recipe.model_validate({**given, "data": data, "method": method, "privacy": privacy})
