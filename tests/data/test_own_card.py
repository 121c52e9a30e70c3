"""Cards of a user's own: by folder or by path, with the rules of those that ship."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results.evaluated import run_of

CONTENT = "age,job,late\n" + "".join(f"{20 + i % 50},{'ab'[i % 2]},{'ny'[i % 50 > 25]}\n" for i in range(100))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, a card without licence and citation in a folder beside it, and its file where data sets lie."""
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "trains").mkdir(parents=True)
    (tmp_path / "data" / "trains" / "trains.csv").write_text(CONTENT)
    (tmp_path / "cards").mkdir()
    sha256 = hashlib.sha256(CONTENT.encode()).hexdigest()
    card: dict[str, Any] = {
        "name": "trains",
        "description": "who was late",
        "reader": {"kind": "table", "header": True},
        "files": [{"name": "trains.csv", "records": 100, "sha256": sha256}],
        "columns": {"age": {"bounds": [0, 100]}, "job": {"values": ["a", "b"]}, "late": {}},
        "target": "late",
        "classes": {"no": ["n"], "yes": ["y"]},
        "split": {"test": 20},
        "preprocess": [{"scale": {}}, {"one-hot": {}}],
    }
    (tmp_path / "cards" / "trains.yaml").write_text(yaml.safe_dump(card, sort_keys=False))
    return tmp_path


def written(project: Path, **data: Any) -> Path:
    recipe = {
        "name": "late",
        "data": data,
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full"},
        "privacy": {"budget": {"epsilon": 1, "delta": 1e-3}},
        "epochs": 2,
    }
    (project / "late.yaml").write_text(yaml.safe_dump(recipe))
    return project / "late.yaml"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def test_it_trains_and_keeps_the_hash_of_its_file_to_itself(project: Path) -> None:
    """Anybody may have the files of a shipped card; those of a user's own are private records."""
    recipe, out = written(project, name="cards/trains.yaml"), project / "out"
    done = run("train", recipe, "--out", out)
    assert done.exit_code == 0, done.output
    (directory,) = out.iterdir()
    document = json.loads((directory / "result.json").read_text())
    assert "The number of training records is public: 80." in document["privacy"]["declarations"]
    assert document["provenance"]["data_sha256"] == {}
    assert set(document["provenance"]["nonprivate_data_sha256"]) == {"trains.csv", "cards/trains.yaml"}
    assert "already" in run("train", recipe, "--out", out).stderr
    assert run("account", directory).exit_code == 0
    card = project / "cards" / "trains.yaml"
    card.write_text(card.read_text().replace("- 100", "- 90"))
    changed = run("train", recipe, "--out", out)
    assert (changed.exit_code, "another content of cards/trains.yaml" in changed.stderr) == (1, True)


def test_a_wrong_name_is_told_the_nearest_and_a_bad_card_all_its_problems(project: Path) -> None:
    assert "did you mean 'trains.yaml'?" in run("train", written(project, name="cards/train.yaml")).stderr
    (project / "cards" / "trains.yaml").write_text("name: trains\ndescription: 3\n")
    refused = run("train", written(project, name="cards/trains.yaml"))
    assert refused.exit_code == 2 and "reader: Field required" in refused.stderr


def test_data_sets_of_ones_own_are_listed_and_verified(project: Path) -> None:
    listed = run("data", "list", "--cards", project / "cards")
    assert "trains" in listed.stdout and "here" in listed.stdout and "mnist" not in listed.stdout
    assert "trains.csv: ok" in run("data", "verify", "trains", "--cards", project / "cards").stdout
    assert "did you mean 'trains'" in run("data", "verify", "trian", "--cards", project / "cards").stderr


def test_cards_of_one_name_in_two_places_are_not_the_same_data(project: Path) -> None:
    """Or trials on other records would be added up as if none tested what another trained on."""
    (project / "more").mkdir()
    (project / "more" / "trains.yaml").write_text((project / "cards" / "trains.yaml").read_text())
    found = [run_of(load_recipe(str(written(project, name=f"{folder}/trains.yaml")))) for folder in ("cards", "more")]
    assert found[0].records is not None and found[1].records is not None
    assert found[0].records.data != found[1].records.data


def test_its_model_predicts_by_the_card_that_it_was_trained_with(project: Path) -> None:
    recipe = written(project, name="cards/trains.yaml")
    assert run("train", recipe, "--out", project / "out").exit_code == 0
    (directory,) = (project / "out").glob("late-*")
    (project / "new.csv").write_text("job,age\na,30\nb,50\n")
    told = run("predict", directory, project / "new.csv")
    assert told.exit_code == 0, told.stderr
    assert set(told.stdout.split()[1:]) <= {"no", "yes"}
    assert run("evaluate", directory).exit_code == 0
    card = project / "cards" / "trains.yaml"
    card.write_text(card.read_text().replace("- 100\n", "- 90\n"))
    told = run("predict", directory, project / "new.csv")
    assert told.exit_code != 0
    assert "was trained with another content of cards/trains.yaml" in told.stderr
