"""Copies of recipes: equal when read back, equal to the bit when trained, and explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dpsgd_cli.main import main
from dpsgd_cli.recipe.copying import explained
from dpsgd_cli.recipe.loading import load_recipe, named_files, shipped_recipes
from dpsgd_cli.training.plans import resolve_auto


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


COPIED = [
    ("quickstart", ["epochs=2", "repeats=2"]),
    ("quickstart", ["epochs=3", "repeats=1", "method={kind: dp-sgd, batching: full}"]),
    ("lectures/cancer-dp-gd", ["data.name=breast-cancer", "repeats=1"]),
    ("lee2018/dp-agd", ["data.name=breast-cancer", "folds=2"]),
    ("beyond/cancer-piecewise", ["data.name=breast-cancer", "repeats=1"]),
]


@pytest.mark.parametrize(("name", "changes"), COPIED)
def test_a_copy_trains_to_the_same_weights(
    name: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("recipe", "copy", name, *changes, "-o", "mine.yaml")
    assert done.exit_code == 0, done.output
    again = run("recipe", "copy", name, "-o", "mine.yaml")
    assert again.exit_code == 2 and "exists; it is not overwritten" in again.stderr
    copied = load_recipe("mine.yaml").recipe
    assert copied == resolve_auto(load_recipe(name, changes)).recipe
    text = Path("mine.yaml").read_text()
    assert text.count("auto\n") <= 4 and f"A copy of {name} " in text
    for out, given in (("one", [name, *changes]), ("two", ["mine.yaml"])):
        trained = run("train", *given, "save_model=true", "--out", out)
        assert trained.exit_code == 0, trained.output
    (one,), (two,) = (list(Path(out).glob("*/model.safetensors")) for out in ("one", "two"))
    first, second = load_file(one), load_file(two)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    documents = [json.loads((file.parent / "result.json").read_text()) for file in (one, two)]
    assert documents[0]["privacy"] == documents[1]["privacy"] and documents[0]["metrics"] == documents[1]["metrics"]


def test_every_shipped_recipe_that_needs_no_file_has_a_copy_that_is_equal_to_it(tmp_path: Path) -> None:
    copied = 0
    for name in shipped_recipes():
        loaded = load_recipe(name)
        if named_files(loaded.recipe) or loaded.recipe.data.name not in ("digits", "breast-cancer", "mnist", "adult"):
            continue
        settled = resolve_auto(loaded)
        (tmp_path / "copy.yaml").write_text(explained(settled))
        assert load_recipe(str(tmp_path / "copy.yaml")).recipe == settled.recipe
        copied += 1
    assert copied >= 20


def test_a_copy_says_what_was_chosen_and_why_and_stays_beside_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text("a,b,y\n" + "".join(f"{i % 7},{i % 3},{'no' if i % 2 else 'yes'}\n" for i in range(60)))
    recipe = {
        "name": "own",
        "data": {
            "path": "own.csv",
            "target": "y",
            "classes": ["no", "yes"],
            "bounds": {"a": [0, 7], "b": [0, 3]},
            "preprocess": [{"bin": {}}],
        },
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full"},
        "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}},
    }
    Path("own.yaml").write_text(yaml.safe_dump(recipe))
    elsewhere = run("recipe", "copy", "own.yaml", "-o", "sub/mine.yaml")
    assert elsewhere.exit_code == 2 and "own.csv" in elsewhere.stderr and not Path("sub").exists()
    done = run("recipe", "copy", "own.yaml")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if "waves:" in line)
    assert lines[at - 1].lstrip().startswith("# Was automatic: ")
    assert any("# L2 bound C of one record's whole gradient" in line for line in lines)
