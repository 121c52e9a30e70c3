"""Every kind of mistake in a recipe is reported at its line, in words, and none hides or causes another."""

from __future__ import annotations

from typing import Any

import pytest

from dpsgd_cli.common.yaml_tree import SourceLocation, read_tree
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.schema import Recipe


def problems(text: str) -> list[str]:
    tree, wrong = read_tree(text, SourceLocation("r.yaml", 1))
    assert tree is not None
    assert wrong == []
    recipe, found = validate(tree, Recipe)
    assert (recipe is None) == bool(found)
    return [str(problem) for problem in found]


@pytest.mark.parametrize("text", ["- a", "3", "words"])
def test_what_is_no_mapping_is_told_what_a_recipe_is(text: str) -> None:
    (only,) = problems(text)
    assert only.startswith("r.yaml:1: must be a section with keys name, description, data, model, method, privacy")


def test_all_problems_are_reported_together() -> None:
    text = """\
name: a b
data: {name: digits, nme: 3, preprocess: [{pca: {components: 0, public: true}}]}
modl: {kind: linear}
method: {kind: sgd, batch_size: many, learning_rate: -1}
privacy: {budget: {rho: 0}}
runtime:
seed: -1
"""
    places = [problem.split(": must")[0].split(": unknown")[0] for problem in problems(text)]
    assert sorted(places[:8]) == [
        "r.yaml:1: name",
        "r.yaml:2: data.nme",
        "r.yaml:2: data.preprocess.0.pca.components",
        "r.yaml:3: modl",
        "r.yaml:4: method.batch_size",
        "r.yaml:4: method.learning_rate",
        "r.yaml:5: privacy.budget.rho",
        "r.yaml:6: runtime",
    ]
    assert places[8] == "r.yaml:7: seed"
    assert sorted(places[9:]) == [
        "r.yaml:1: epochs: method sgd has no budget to stop at; give a number",
        "r.yaml:5: privacy: method sgd has no privacy; leave this section out or use dp-sgd",
    ]


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in plain data."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [slot for key in keys for slot in slots(value[key])]
