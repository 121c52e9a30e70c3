"""The audit of private bounds and categories: a sound release passes, and each planted bug is found by its check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from dpsgd_cli.audit import data_neighbours, discovered
from dpsgd_cli.audit.findings import judged
from dpsgd_cli.data import discover, preparation
from dpsgd_cli.data.preparation import private_releases
from dpsgd_cli.noise import run as noise
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto

ALL = ["counts of private columns", "noise of private columns"]


def audited(folder: Path, seed: int | None, adjacency: str = "add-remove", **columns: Any) -> dict[str, bool]:
    """Whether each check refutes the claim."""
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, 4.0] * 6, "b": ["x", "y"] * 12, "y": [0, 1] * 12})
    unit = columns.pop("unit", None)
    if unit is not None:
        frame["who"] = [f"u{row // 3}" for row in range(24)]
    frame.to_csv(folder / "own.csv", index=False)
    recipe = {
        "name": "own",
        "data": {"path": "own.csv", "target": "y", "classes": [0, 1], "preprocess": [{"bin": {}}]}
        | (columns or {"bounds": {"a": "private"}, "categorical": {"b": "private"}}),
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0},
        "privacy": {"budget": {"epsilon": 1.0, "delta": 1e-5}, "adjacency": adjacency}
        | ({} if unit is None else {"unit": unit}),
        "epochs": 2,
        "seed": seed,
    }
    (folder / "own.yaml").write_text(yaml.safe_dump({k: v for k, v in recipe.items() if v is not None}))
    loaded = resolve_auto(load_recipe(str(folder / "own.yaml")))
    plan = plan_and_outline(loaded)[0]
    assert plan is not None
    rows = judged([*discovered.compare(loaded), *data_neighbours.compare_preprocessing(loaded, plan)], 0.9999)
    return {row["name"]: row["refuted"] for row in rows}


@pytest.mark.parametrize(("seed", "adjacency"), [(0, "add-remove"), (None, "replace-one"), (None, "zero-out")])
def test_a_sound_release_is_not_refuted(tmp_path: Path, seed: int | None, adjacency: str) -> None:
    found = audited(tmp_path, seed, adjacency)
    assert {*ALL, "preprocessing 0 (discover)"} < set(found)
    assert not any(found.values())


USERS: dict[str, Any] = {"column": "who", "most_rows": 3}


def test_a_sound_release_of_users_is_not_refuted_and_rows_that_count_in_full_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any(audited(tmp_path, 0, unit=USERS).values())
    monkeypatch.setattr(preparation, "shares_of", lambda keys, _: np.ones(len(keys)))
    assert [name for name, refuted in audited(tmp_path, 0, unit=USERS).items() if refuted] == [ALL[0]]


def refuted(folder: Path, seed: int | None) -> list[str]:
    return [name for name, wrong in audited(folder, seed).items() if wrong]


@pytest.mark.parametrize("seed", [0, None])
def test_too_little_noise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    add = noise.add_noise

    def less(sums: torch.Tensor, fresh: torch.Tensor, scale: torch.Tensor, grid: noise.Grid | None) -> None:
        add(sums, fresh, 0.9 * scale, grid)

    monkeypatch.setattr(noise, "add_noise", less)
    assert ALL[1] in refuted(tmp_path, seed)


@pytest.mark.parametrize("counts", ["counts_of_numbers", "counts_of_codes"])
def test_a_record_that_is_counted_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: str) -> None:
    once = getattr(discover, counts)
    twice = {
        "counts_of_numbers": lambda *given: 2 * once(*given),
        "counts_of_codes": lambda *given: (once(*given)[0], 2 * once(*given)[1]),
    }
    monkeypatch.setattr(discover, counts, twice[counts])
    assert ALL[0] in refuted(tmp_path, 0)


def test_a_release_that_is_not_charged_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(data: Any, adjacency: Any, base: Path) -> list[Any]:
        return private_releases(data, adjacency, base)[:1]

    monkeypatch.setattr("dpsgd_cli.data.private_releases", half)
    assert "preprocessing 0 (discover)" in refuted(tmp_path, 0)
