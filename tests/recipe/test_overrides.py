"""`KEY=VALUE`: where it lands in a recipe, what it may create, and how it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dpsgd_cli.common.yaml_tree import SourceLocation, read_tree
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.overrides import apply_overrides
from dpsgd_cli.recipe.schema import Recipe

GOOD = """\
name: x
data:
  name: digits
  preprocess: [{pca: {components: 60, public: true}}]
model: {kind: mlp, hidden: [3, 4]}
method: {kind: dp-sgd, batch_size: 10}
privacy:
  schedule: {kind: exponential, initial: 10, decay: 0.01}
  budget: {rho: 1}
"""


def applied(*overrides: str) -> tuple[Any, list[str]]:
    """The recipe's data after `overrides`, and every problem of form and content."""
    tree, _ = read_tree(GOOD, SourceLocation("r.yaml", 1))
    assert tree is not None
    problems = apply_overrides(tree, overrides)
    return tree.plain(), [str(problem) for problem in problems + validate(tree, Recipe)[1]]


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("method.batch_size=256", ("method", "batch_size"), 256),
        ("method.learning_rate=1e-3", ("method", "learning_rate"), 1e-3),
        ("seed=null", ("seed",), None),
        ("seed=", ("seed",), None),
        ("description=what = this", ("description",), "what = this"),
        ("privacy.budget={epsilon: 3, delta: 1e-5}", ("privacy", "budget"), {"epsilon": 3, "delta": 1e-5}),
        ("data.preprocess.0.pca.components=30", ("data", "preprocess", 0, "pca", "components"), 30),
        ("data.preprocess.0={unit-norm: {}}", ("data", "preprocess", 0), {"unit-norm": {}}),
        ("model.hidden.1=7", ("model", "hidden"), [3, 7]),
        ("model.hidden=[5]", ("model", "hidden"), [5]),
        ("data.split.test=0.3", ("data", "split"), {"test": 0.3}),
        ('data.bounds["mean radius"]=[5,25]', ("data", "bounds"), {"mean radius": [5, 25]}),
        ("data.bounds['a.b = \"c\"']=[5,25]", ("data", "bounds"), {'a.b = "c"': [5, 25]}),
        ('data.bounds["pay"]=[5,25]', ("data", "bounds"), {"pay": [5, 25]}),
        ('data.bounds["größe \\"x\\""]=[5,25]', ("data", "bounds"), {'größe "x"': [5, 25]}),
    ],
)
def test_an_override_lands_at_its_key(override: str, path: tuple[Any, ...], value: object) -> None:
    data, problems = applied(override)
    assert problems == []
    for key in path:
        data = data[key]
    assert data == value


@pytest.mark.parametrize(
    ("override", "path", "kind"),
    [
        ("privacy.clipping.norm=3", ("privacy", "clipping"), "flat"),
        ("method.optimizer.momentum=0.9", ("method", "optimizer"), "sgd"),
    ],
)
def test_a_section_that_the_recipe_leaves_out_begins_as_the_default_kind(
    override: str, path: tuple[str, ...], kind: str
) -> None:
    data, problems = applied(override)
    assert problems == []
    for key in path:
        data = data[key]
    assert data["kind"] == kind
