"""`dpsgd budget`: what it prints and refuses, and the option `--book` of the commands that charge one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.audit import data_neighbours
from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.results import book as books
from dpsgd_cli.results import report

RECIPE = """\
name: mine
data: {path: t.csv, target: y, classes: [0, 1], bounds: [0, 1]}
model: {kind: linear}
method: {kind: dp-sgd, batching: full, learning_rate: 1}
privacy: {budget: {epsilon: 1, delta: 1.0e-5}}
epochs: 2
"""
TERMS = ("--data", "t.csv", "--epsilon", "3", "--delta", "1e-5")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i / 40},{int(i > 20)}\n" for i in range(40)))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def test_a_book_is_created_charged_and_shown(folder: Path) -> None:
    made = run("budget", "create", "t.book", *TERMS)
    assert made.exit_code == 0, made.output
    assert "epsilon 3.0000 at delta 1e-05, add-remove" in made.output and "t.csv, SHA-256" in made.output
    trained = run("train", "mine.yaml", "--book", "t.book")
    assert trained.exit_code == 0, trained.output
    book = books.read(Path("t.book"))
    entry = f"budget book {book.identity}, entry {book.charges[0]['id']}"
    assert f"charged to  {entry}" in trained.output
    (directory,) = Path("results").glob("mine-*")
    assert entry in (directory / report.NAMES[0]).read_text()
    shown = run("budget", "show", "t.book")
    assert f"{directory.name}, 1 trial: alone epsilon 1.0000, 14.0% of the budget; 1 of 1 published" in shown.output
    told = json.loads(run("budget", "show", "t.book", "--format", "json").output)
    assert (told["epsilon"], told["unit"], len(told["charges"])) == (3.0, None, 1)
    assert f"one run of epsilon {told['epsilon_of_next']:.4f}" in shown.output


def test_what_is_said_to_be_left_is_left(folder: Path) -> None:
    """One run of the epsilon that is named fits, and afterwards nothing does."""
    run("budget", "create", "t.book", *TERMS)
    run("train", "mine.yaml", "--book", "t.book")
    left = json.loads(run("budget", "show", "t.book", "--format", "json").output)["epsilon_of_next"]
    above = run("train", "mine.yaml", "--book", "t.book", f"privacy.budget.epsilon={left + 1e-3}")
    assert above.exit_code == 1 and f"one run of epsilon {left:.4f}" in above.output
    assert run("train", "mine.yaml", "--book", "t.book", f"privacy.budget.epsilon={left}").exit_code == 0
    after = run("train", "mine.yaml", "--book", "t.book", "privacy.budget.epsilon=0.01")
    assert after.exit_code == 1 and "would pass the book's budget" in after.output


def test_a_public_copy_names_the_book_but_not_its_place(folder: Path) -> None:
    run("budget", "create", "t.book", *TERMS)
    run("train", "mine.yaml", "--book", "t.book")
    (directory,) = Path("results").glob("mine-*")
    assert run("report", str(directory), "--publish", "public").exit_code == 0
    document = json.loads(Path("public/result.json").read_text())
    assert document["privacy"]["book"]["book"] == books.read(Path("t.book")).identity
    assert yaml.safe_load(Path("public/recipe.yaml").read_text())["privacy"]["book"] == "t.book"


def test_an_audit_charges_nothing_and_does_not_read_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("budget", "create", "t.book", *TERMS)

    def read(*given: Any) -> Any:
        raise RunError("the file was read")

    monkeypatch.setattr(data_neighbours, "load_raw", read)
    found = run("audit", "mine.yaml", "--book", "t.book", "--tier", "D", "--quick", "--out", "audited")
    assert "not audited: the recipe's own file: its book does not cover" in found.output, found.output
    assert found.exit_code == 0
    assert "the file was read" in run("audit", "mine.yaml", "--tier", "D", "--quick", "--out", "b").output
    assert books.read(Path("t.book")).charges == []


def test_a_book_that_is_there_is_not_replaced_and_what_is_none_is_refused(folder: Path) -> None:
    run("budget", "create", "t.book", *TERMS)
    again = run("budget", "create", "t.book", *TERMS)
    assert again.exit_code == 2 and "a table has one book" in again.output
    shown = run("budget", "show", "t.csv")
    assert shown.exit_code == 2 and "t.csv" in shown.output and "Traceback" not in shown.output
    missing = run("train", "mine.yaml", "--book", "none.book")
    assert missing.exit_code == 2 and "none.book: no such book" in missing.output


def test_a_private_option_for_a_recipe_without_privacy_is_refused(folder: Path) -> None:
    run("budget", "create", "t.book", *TERMS)
    (folder / "open.yaml").write_text(
        RECIPE.replace("dp-sgd, batching: full", "sgd, batch_size: 8").replace(
            "privacy: {budget: {epsilon: 1, delta: 1.0e-5}}\n", ""
        )
    )
    found = run("train", "open.yaml", "--book", "t.book")
    assert found.exit_code == 2 and "privacy" in found.output
