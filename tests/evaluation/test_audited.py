"""Tier D on the held-out part of users, with bugs that it must refute."""

from __future__ import annotations

from collections.abc import Callable
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
from dpsgd_cli.training.plans import resolve_auto

Patch = pytest.MonkeyPatch
USERS = {"privacy": {"unit": {"column": "who", "most_rows": 2}}}
BY = {"data": {"evaluation": {"by": ["sex", "region"]}}}
KINDS: dict[str, dict[str, Any]] = {"users": USERS, "both": USERS | BY}


def refuted(changes: dict[str, Any], folder: Path) -> list[str]:
    """The refuted findings of a recipe for 200 rows of 60 users, with four classes."""
    rng, rows = np.random.default_rng(0), 200
    frame = pd.DataFrame(
        {"a": rng.random(rows).round(3), "who": rng.integers(0, 60, rows), "y": rng.integers(0, 4, rows)}
    )
    frame = frame.assign(sex=rng.choice(["f", "m"], rows), region=rng.choice(["n", "s", "e"], rows))
    frame.to_csv(folder / "own.csv", index=False)
    data = {"path": "own.csv", "target": "y", "classes": [0, 1, 2, 3], "bounds": {"a": [0, 1]}, "split": {"test": 0.3}}
    data |= {"categorical": {"sex": ["f", "m"], "region": ["n", "s", "e"]}} | changes.get("data", {})
    privacy = {"budget": {"epsilon": 1.0, "delta": 1e-5}} | changes.get("privacy", {})
    if "unit" not in privacy:
        data["drop"] = ["who"]
    method = {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0}
    recipe: dict[str, Any] = {
        "name": "own",
        "data": {k: v for k, v in data.items() if v is not None},
        "model": {"kind": "linear"},
    }
    recipe |= {"method": method, "privacy": privacy, "epochs": 2, "seed": 0}
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    settled = resolve_auto(load_recipe(str(folder / "own.yaml"), ()))
    found = list(compare_file(settled))
    assert len(found) >= 4
    return [one.name for one in found if one.refutes(0.95)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_refuted(kind: str, tmp_path: Path) -> None:
    assert refuted(KINDS[kind], tmp_path) == []


def users_by_row(patch: Patch) -> None:
    """A coin a row, so that a user's rows come into both parts."""
    own = Keys.held_out

    def held(self: Keys, cut: Any) -> np.ndarray:
        return own(Keys(np.arange(len(self)).astype(np.uint64) + self.values, False), cut)

    patch.setattr(Keys, "held_out", held)


def in_both(patch: Patch) -> None:
    patch.setattr(preparation, "held_out_rows", lambda source, data, base: source.train)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("users", users_by_row),
        ("users", in_both),
    ],
)
def test_a_planted_bug_is_refuted(
    kind: str, plant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    assert refuted(KINDS[kind], tmp_path)
