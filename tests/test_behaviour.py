"""`python -m tests.behaviour` has valid recipes, and finds what differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests import behaviour


@pytest.mark.parametrize("name", behaviour.VARIANTS)
def test_a_variant_can_be_planned(name: str, tmp_path: Path) -> None:
    plan, _ = loop.plan_recipe(resolve_auto(load_recipe(str(behaviour.variant(name, tmp_path)))))
    assert plan is not None


def test_what_differs_is_found(tmp_path: Path) -> None:
    """Nothing between two trainings of one recipe; a weight, a price and a metric that are another."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        behaviour.record("adam", folder)
    assert behaviour.differences(new / "adam", old / "adam") == []
    weights = load_file(old / "adam.safetensors")
    save_file({name: value * 2 for name, value in weights.items()}, old / "adam.safetensors")
    told = json.loads((old / "adam.json").read_text())
    told |= {"epsilon": told["epsilon"] / 2, "metrics": told["metrics"] | {"test_accuracy": {"mean": -1}}}
    (old / "adam.json").write_text(json.dumps(told))
    assert behaviour.differences(new / "adam", old / "adam") == [
        "another epsilon", "weights differ by 0.5 of their size", "other metrics: test_accuracy",
    ]  # fmt: skip
