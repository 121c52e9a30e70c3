"""What a recipe leaves open is said as it will be, and saying it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsgd_cli.commands.recipe import unsaid
from dpsgd_cli.data.preparation import outline
from dpsgd_cli.recipe.loading import load_recipe, recipe_hash, shipped_recipes

OWN = """\
name: x
data: {path: x.csv, target: y}
model: {kind: linear}
method: {kind: dp-sgd, batching: shuffle, batch_size: 10}
privacy: {schedule: {kind: uniform, initial: 3}, delta: 1e-5}
epochs: 3
"""


def of(tmp_path: Path, *overrides: str) -> list[str]:
    (tmp_path / "own.yaml").write_text(OWN)
    return unsaid(load_recipe(str(tmp_path / "own.yaml"), overrides).recipe)


def test_a_recipe_that_leaves_everything_open(tmp_path: Path) -> None:
    assert of(tmp_path) == [
        "# data.preprocess: [{scale: {by: bounds, to: [0.0, 1.0]}}, {one-hot: {}}] (a file of your own)",
        "# seed: none (the operating system's entropy; no run can be repeated)",
        "# privacy.noise_source: secure (no seed)",
    ]


def test_a_recipe_that_leaves_nothing_open(tmp_path: Path) -> None:
    said = ["privacy.noise_source=seeded", "data.preprocess=[]"]
    assert of(tmp_path, "seed=1", *said) == []
    assert of(tmp_path, "seed=1", *said[1:]) == ["# privacy.noise_source: seeded (there is a seed)"]


def test_the_steps_that_are_told_are_those_that_are_taken() -> None:
    """Written into the recipe, they come to the same input."""
    (said,) = (text for text in unsaid(load_recipe("lee2018/dp-agd").recipe) if "data.preprocess" in text)
    steps = said.removeprefix("# data.preprocess: ").removesuffix(" (the card of adult)")
    told, left = (load_recipe("lee2018/dp-agd", change) for change in ([f"data.preprocess={steps}"], []))
    assert told.recipe.data.preprocess is not None and left.recipe.data.preprocess is None
    assert outline(told.recipe.data, told.base) == outline(left.recipe.data, left.base)


@pytest.mark.parametrize("name", shipped_recipes())
def test_what_is_said_changes_no_recipe(name: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dpsgd_cli.main import main

    shown = CliRunner().invoke(main, ["recipe", "show", name])
    assert shown.exit_code == 0
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert recipe_hash(load_recipe(str(tmp_path / "shown.yaml")).recipe) == recipe_hash(load_recipe(name).recipe)
