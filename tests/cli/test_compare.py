"""`dpsgd compare` as a stranger uses it: what is not comparable is not subtracted, and nothing is overwritten."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main

MINE = """\
name: mine
data: {path: mine.csv, target: y, classes: [0, 1], bounds: {a: [0, 1], b: [0, 1]}}
model: {kind: linear}
method: {kind: dp-sgd, batching: full, learning_rate: 1}
privacy: {budget: {epsilon: 2, delta: 1e-5}}
epochs: 3
seed: 0
repeats: 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user's own, with a table and its recipe."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 7 / 7},{i % 5 / 5},{i % 2}" for i in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


def written(done: Result) -> Path:
    """The folder that the command says it has written to."""
    assert done.exit_code == 0, done.output
    place = re.search(r"written to (\S+): comparison\.csv", done.stderr)
    assert place is not None, done.stderr
    return Path(place[1])


def verdicts(done: Result) -> list[str]:
    with (written(done) / "comparison.csv").open(newline="") as file:
        return [row["verdict"] for row in csv.DictReader(file)]


def recipe(here: Path, name: str, **changes: str) -> str:
    text = MINE.replace("name: mine", f"name: {name}")
    for old, new in changes.items():
        assert f"{old}: " in text
        text = re.sub(rf"(?m)^{old}: .*$", new, text)
    (here / f"{name}.yaml").write_text(text)
    return f"{name}.yaml"


def test_different_data_are_not_subtracted(here: Path) -> None:
    done = run("mine.yaml", "quickstart", "--epsilon", "1", "--repeats", "2", "epochs=2", "--report", "page.html")
    assert verdicts(done) == ["baseline", "not compared: different data"]
    place = written(done)
    rows = json.loads((place / "comparison.json").read_text())["rows"]
    assert [(row["data"], row["difference"]) for row in rows] == [("mine.csv", None), ("digits", None)]
    for text in (done.stdout, (here / "page.html").read_text()):
        assert "not compared: different data" in text and "mine.csv" in text
        assert "A difference is stated only between results on the same test records" in text
        assert "judged" not in text


def test_results_at_other_budgets_are_not_subtracted(here: Path) -> None:
    for name, epsilon in (("a", 1), ("b", 2), ("c", 2)):
        other = [f"privacy.budget.epsilon={epsilon}", f"name={name}", "--out", "results"]
        assert CliRunner().invoke(main, ["train", "mine.yaml", *other]).exit_code == 0
    directories = [str(next(Path("results").glob(f"{name}-*"))) for name in "bac"]
    found = verdicts(run(*directories))
    assert found[:2] == ["baseline", "not compared: different budgets"]
    assert "(paired)" in found[2]


def test_results_on_other_test_records_are_not_subtracted(here: Path) -> None:
    folded = recipe(here, "folded", repeats="repeats: 1\nfolds: 3")
    moved = recipe(here, "moved", repeats="repeats: 2")
    (here / moved).write_text((here / moved).read_text().replace("target: y,", "target: y, split: {test: 0.3},"))
    for file in ("mine.yaml", folded, moved):
        assert CliRunner().invoke(main, ["train", file]).exit_code == 0
    directories = [str(next(Path("results").glob(f"{name}-*"))) for name in ("mine", "folded", "moved")]
    done = run(*directories)
    assert verdicts(done) == ["baseline", *["not compared: different test records"] * 2]
    for told in ("20% of its records", "30% of its records", "3 folds"):
        assert told in done.stdout


def test_the_folds_go_with_the_data(here: Path) -> None:
    """A shipped recipe with 5 folds and a table with a test set, and the other way round."""
    done = run("mine.yaml", "lee2018/privgene", "--data-of", "mine.yaml", "--repeats", "2", "--epsilon", "2")
    assert "(paired)" in verdicts(done)[1]
    with (written(done) / "comparison.csv").open(newline="") as file:
        assert [(row["n"], row["test_records"]) for row in csv.DictReader(file)] == [
            ("2", "20% of its records (split seed 0)")
        ] * 2
    folded = recipe(here, "folded", repeats="repeats: 1\nfolds: 3")
    done = run(folded, "mine.yaml", "--data-of", folded, "--epsilon", "2")
    assert "paired, corrected for shared folds" in verdicts(done)[1]


def test_tests_on_other_records_of_the_same_data_are_refused_before_training(here: Path) -> None:
    folded = recipe(here, "folded", repeats="repeats: 1\nfolds: 3")
    done = run("mine.yaml", folded)
    assert done.exit_code == 2 and not Path("results").exists()
    for told in ("20% of its records (split seed 0) (mine.yaml)", "3 folds (folded.yaml)", "--folds K", "--data-of"):
        assert told in done.stderr
    assert "paired" in verdicts(run("mine.yaml", folded, "--folds", "3"))[1]


def test_no_page_is_of_a_metric_that_is_not_private(here: Path) -> None:
    arguments = ("mine.yaml", "--metric", "nonprivate_train_loss", "--report", "page.html")
    done = run(*arguments)
    assert (done.exit_code, Path("page.html").exists(), Path("results").exists()) == (2, False, False)
    assert "choose another --metric" in done.stderr


def test_the_table_names_the_accountant_of_each_epsilon(here: Path) -> None:
    done = run("mine.yaml", "lee2018/dp-agd", "--data-of", "mine.yaml", "--epsilon", "2", "--repeats", "1")
    header, _, ours, theirs = (line.split(" | ") for line in done.stdout.splitlines()[:4])
    assert header[1:3] == ["epsilon (add-remove) at delta 1e-05", "accountant"]
    assert (ours[2], theirs[2]) == ("gaussian", "zcdp")
    assert "stated by different accountants (gaussian, zcdp)" in done.stdout


def test_without_privacy_there_is_no_budget_to_differ_in(here: Path) -> None:
    """Beside a baseline at one budget its price is told; beside several there is no one baseline."""
    plain = recipe(here, "plain", method="method: {kind: sgd, batching: full, learning_rate: 1}", privacy="")
    assert "(paired)" in verdicts(run("mine.yaml", plain, "--epsilon", "1"))[1]
    assert (
        verdicts(run("mine.yaml", plain, "--epsilon", "1,2"))[2] == "without privacy; --baseline compares all with it"
    )
