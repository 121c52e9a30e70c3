"""`dpsgd recipe list | show | validate | schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe, question, shipped_recipes

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
    result = run("list")
    assert result.exit_code == 0
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert rows == [[name, question(file)] for name, file in shipped_recipes().items()]


def test_show_prints_the_resolved_recipe_which_is_a_recipe(folder: Path) -> None:
    result = run("show", "good.yaml", "repeats=3")
    assert result.exit_code == 0
    (folder / "shown.yaml").write_text(result.stdout)
    assert load_recipe("shown.yaml").recipe == load_recipe("good.yaml", ["repeats=3"]).recipe
    assert "norm: 1.0" in result.stdout


def test_show_reports_wrong_overrides_beside_wrong_lines(folder: Path) -> None:
    result = run("show", "bad.yaml", "repeats=0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "error: bad.yaml:4: method.batch_size: must be a whole number at least 1, got 0",
        "       bad.yaml:6: sed: unknown key; did you mean seed?",
        "       override repeats=0: repeats: must be a whole number at least 1 and at most 100000, got 0",
    ]


def test_validate_names_what_is_valid(folder: Path) -> None:
    result = run("validate", "good.yaml", "quickstart")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["good.yaml: valid", "quickstart: valid"]


def test_validate_reports_every_problem_of_every_file(folder: Path) -> None:
    result = run("validate", "bad.yaml", "missing.yaml", "good.yaml")
    assert result.exit_code == 2
    assert result.stdout.splitlines() == ["good.yaml: valid"]
    assert len(result.stderr.splitlines()) == 3
    assert "missing.yaml: no such file" in result.stderr


def test_validate_needs_a_recipe() -> None:
    assert run("validate").exit_code == 2


def test_schema_is_json_that_describes_every_key_of_a_recipe() -> None:
    result = run("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"].endswith("2020-12/schema")
    assert {"name", "data", "model", "method", "privacy", "runtime"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert "description" in schema["$defs"]["Privacy"]["properties"]["budget"]
