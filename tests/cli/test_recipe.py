"""`dpsgd recipe list | show | validate | schema`, and what is said of what a recipe leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.cli import complete
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe, question, recipe_hash, shipped_recipes

GOOD = """\
name: x
data: {name: digits}
model: {kind: linear}
method: {kind: dp-sgd, batch_size: 10}
privacy: {budget: {rho: 1}}
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["recipe", *args])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(GOOD.replace("10", "0") + "sed: 1\n")
    return tmp_path


def test_list_names_every_shipped_recipe_with_its_question() -> None:
    brief, whole = run("list"), run("list", "--all")
    assert (brief.exit_code, whole.exit_code) == (0, 0)
    rows = [line.split(maxsplit=1) for line in whole.stdout.splitlines() if line.startswith("  ")]
    assert dict(rows) == {name: question(file) for name, file in shipped_recipes().items()} and len(rows) == len(
        dict(rows)
    )
    assert "  quickstart " in brief.stdout and "yu2019/" not in brief.stdout
    assert f"papers: {len(rows) - len(brief.stdout.splitlines()) + 5} more" in brief.stdout


def test_a_shell_is_offered_recipes_and_keys() -> None:
    command = click.Context(click.Command("train"))
    for typed, offered in (("quick", "quickstart"), ("privacy.budget.e", "privacy.budget.epsilon=")):
        assert [one.value for one in complete(command, click.Argument(["recipe"]), typed)] == [typed, offered]


def test_show_reports_wrong_overrides_beside_wrong_lines(folder: Path) -> None:
    result = run("show", "bad.yaml", "repeats=0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "error: bad.yaml:4: method.batch_size: must be a whole number at least 1 or auto, got 0",
        "       bad.yaml:6: sed: unknown key; did you mean seed?",
        "       override repeats=0: repeats: must be a whole number at least 1 and at most 100000, got 0",
    ]


def test_schema_is_json_that_describes_every_key_of_a_recipe() -> None:
    result = run("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"name", "data", "model", "method", "privacy", "runtime"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert "description" in schema["$defs"]["Privacy"]["properties"]["budget"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shown_recipe_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    shown = run("show", name)
    assert shown.exit_code == 0
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert recipe_hash(load_recipe(str(tmp_path / "shown.yaml")).recipe) == recipe_hash(load_recipe(name).recipe)


NET = """
from torch import nn
def build(shape, outputs, extra):
    kinds = {"none": [], "wrong": [nn.BatchNorm1d(10)], "mixed": [Centre()]}
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(p=0), nn.PReLU(), nn.LayerNorm(10), *kinds[extra])
class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)
"""


def test_check_model_says_how_each_layer_is_clipped_and_what_is_refused(folder: Path) -> None:
    (folder / "net.py").write_text(NET)
    model = "model={kind: python, file: net.py, arguments: {extra: %s}}"
    fine = run("check-model", "good.yaml", model % "none")
    lines = fine.stdout.splitlines()
    assert (fine.exit_code, lines[0]) == (0, "x: inputs (1, 8, 8), 10 outputs")
    assert [line.split(": ")[:2] for line in lines[1:4]] == [
        ["  1", "Linear, 650 parameters"],
        ["  3", "PReLU, 1 parameter"],
        ["  4", "LayerNorm, 20 parameters"],
    ]
    for line, how in zip(lines[1:4], ("closed form", "by each example's own gradient", "own gradient"), strict=True):
        assert how in line
    assert "no layer is refused" in lines[4]
    assert run("check-model", "good.yaml", model % "none", "method={kind: dp-sgd}").exit_code == 0
    wrong = run("check-model", "good.yaml", model % "wrong")
    assert (wrong.exit_code, wrong.stdout.count("REFUSED")) == (2, 1)
    assert "layer '5': BatchNorm1d mixes" in wrong.stderr
    mixed = run("check-model", "good.yaml", model % "mixed")
    assert (mixed.exit_code, "mixes examples" in mixed.stderr) == (2, True)
