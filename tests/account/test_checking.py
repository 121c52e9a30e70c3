"""`dpsgd check` finds each forgery whose hashes were made anew, and nothing in what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from dpsgd_cli.results import reading
from tests.conftest import GRADIENT, OWN, PCA, StopAt, Train, WriteRecipe, recipe_writer
from tests.training.test_finish import finish, stopped

UNIFORM = {"schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-3}
Forge = Callable[[dict[str, Any], list[dict[str, Any]]], None]


def check(directory: Path) -> tuple[int, dict[str, str], str]:
    """Exit code, the mark of each verdict, and all that was said."""
    done: Result = CliRunner().invoke(main, ["check", str(directory)])
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    return done.exit_code, {line[0]: line[1] for line in lines}, done.output


def forge(directory: Path, change: Forge) -> None:
    """Change the document and the lines of the ledger, and make all hashes anew."""
    document = json.loads((directory / "result.json").read_text())
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    change(document, lines)
    (directory / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = {name: (directory / name).read_bytes() for name in reading.HASHED if (directory / name).is_file()}
    for name in ("files", "nonprivate_files"):
        document.pop(name)
    (directory / "result.json").write_text(json.dumps(reading.sealed(document, files)))


def claims(epsilon: float) -> Forge:
    def change(document: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        del lines
        document["privacy"]["epsilon"] = epsilon
        for row in document["trials"]:
            row["epsilon"] = epsilon

    return change


def less(**values: float) -> Forge:
    """A ledger that costs less, with a claim that is true of it."""

    def change(document: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["phase"] == "train":
                line.update({name: factor * line[name] for name, factor in values.items()})
        _state(document, lines)

    return change


def cut(document: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Only the first epoch of each trial stays, with a claim that is true of it."""
    lines[:] = [line for line in lines if line["epoch"] == 0]
    _state(document, lines)


def without_pca(document: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """The release before training is left out, with a claim that is true of what stays."""
    lines[:] = [line for line in lines if line["phase"] != "before"]
    _state(document, lines)


def _state(document: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    from dpsgd_cli.accounting import accountants
    from dpsgd_cli.accounting.mechanism import from_record

    privacy = document["privacy"]
    own = [from_record(line) for line in lines if line["trial"] == 0]
    claims(accountants.get(privacy["accountant"]).epsilon(own, privacy["delta"]))(document, lines)
    privacy["attacker"] = None


def says(key: str, value: Any) -> Forge:
    return lambda document, lines: document["privacy"].update({key: value})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result of two trials on 48 rows, beside its recipe and its data."""
    folder = tmp_path_factory.mktemp("made")
    settings = {"data": OWN | {"preprocess": PCA}, "method": GRADIENT | {"batching": "poisson"}, "privacy": UNIFORM}
    recipe = recipe_writer(folder)(**settings, epochs=3)
    assert CliRunner().invoke(main, ["train", str(recipe), "--out", str(folder / "out")]).exit_code == 0
    return folder


@pytest.fixture
def result(made: Path, tmp_path: Path) -> Path:
    """A copy of it to forge."""
    shutil.copytree(made, tmp_path / "copy")
    (found,) = (tmp_path / "copy" / "out").iterdir()
    return found


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (claims(0.1), "claim"),
        (lambda document, lines: document["privacy"]["attacker"].update(mu=0.01), "claim"),
        (lambda document, lines: document["privacy"]["attacker"]["true_positives"].update({"0.01": 0.01}), "claim"),
        (says("rho", 1e-3), "claim"),
        (says("adjacency", "replace-one"), "claim"),
        (says("unit", {"column": "user", "most_rows": 3}), "claim"),
        (says("noise_source", "secure"), "claim"),
        (says("delta", 1e-9), "claim"),
        (lambda document, lines: lines.pop(), "ledger"),
        (cut, "ledger"),
        (without_pca, "ledger"),
        (less(noise_multiplier=2), "ledger"),
        (less(sampling_rate=0.5), "ledger"),
        (less(sensitivity=0.5), "ledger"),
        (says("declarations", []), "ledger"),
        (says("scope", "all trainings ever"), "terms"),
        (says("unit", {"column": "user", "most_rows": 3}), "terms"),
        (lambda document, lines: document["metrics"]["test_accuracy"].update(mean=0.99), "numbers"),
        (lambda document, lines: document["trials"][0].update(test_accuracy=0.99), "numbers"),
        (says("bound", "estimate"), "numbers"),  # unlike the metadata of the model
    ],
)
def test_a_forgery_with_new_hashes_is_found(result: Path, change: Forge, verdict: str) -> None:
    forge(result, change)
    code, marks, told = check(result)
    assert (code, marks["files"], marks[verdict]) == (1, "ok", "FAILED"), told
    assert "hashes are no signature" in told


@pytest.mark.parametrize("command", [["report"], ["compare"], ["compare", "."]])
def test_no_page_repeats_a_claim_that_is_too_low(result: Path, command: list[str], tmp_path: Path) -> None:
    forge(result, claims(0.1))
    place = result.parent if command[1:] else result
    out = ["--out", str(tmp_path / "new")] if command[0] == "compare" else []
    done = CliRunner().invoke(main, [command[0], str(place), *out])
    assert done.exit_code == 2 and "epsilon 0.1000 is claimed; the ledger costs" in " ".join(done.stderr.split())


def test_an_edited_page_is_found(result: Path) -> None:
    page = result / "report.html"
    page.write_text(page.read_text().replace("epsilon", "Epsilon", 1))
    code, marks, _ = check(result)
    assert (code, [what for what, mark in marks.items() if mark != "ok"]) == (1, ["page"])


def test_a_changed_file_is_found_and_nothing_else_is_believed(result: Path) -> None:
    path = result / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    code, marks, told = check(result)
    assert (code, marks) == (1, {"files": "FAILED"}) and "nothing else was checked" in told


def test_another_recipe_is_found(result: Path) -> None:
    recipe = result / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("initial: 4", "initial: 5"))
    forge(result, lambda document, lines: None)
    code, marks, told = check(result)
    assert (code, marks["ledger"]) == (1, "FAILED") and "z 5" in told
    recipe.write_text(f"{recipe.read_text()}nonsense: 1\n")
    forge(result, lambda document, lines: None)
    code, marks, told = check(result)
    assert (code, marks["recipe"]) == (1, "FAILED") and "nonsense" in told


def test_other_code_and_other_data_are_found_and_missing_data_are_said(result: Path, write_recipe: WriteRecipe) -> None:
    data = result.parent.parent / "tiny.npz"
    held = data.read_bytes()
    data.write_bytes(held + b" ")
    code, marks, told = check(result)
    assert (code, marks["code"]) == (1, "FAILED") and "another content of tiny.npz" in told
    data.unlink()
    code, marks, told = check(result)
    assert (code, marks["claim"], marks["ledger"]) == (0, "ok", "unknown") and "cannot be checked here" in told


def test_a_run_that_was_stopped_passes(train: Train, write_recipe: WriteRecipe, stop_at: StopAt) -> None:
    recipe = write_recipe(method=GRADIENT | {"batching": "poisson"}, privacy=UNIFORM, epochs=6, save_model=True)
    stopped(train, recipe, stop_at)
    finish(recipe)
    (directory,) = (recipe.parent / "out").glob("tiny-*")
    code, marks, told = check(directory)
    assert code == 0 and set(marks.values()) <= {"ok"} and "stopped after 2 epochs of 6" in told, told


def test_a_copy_keeps_its_verdicts_under_another_name(tmp_path: Path, write_recipe: WriteRecipe, train: Train) -> None:
    """And a table beside it, whose hash nobody publishes, is not called compared."""
    method = GRADIENT | {"batching": "poisson"}
    own = train(write_recipe(data=OWN, seed=None, repeats=1, method=method, privacy=UNIFORM, epochs=1))
    assert CliRunner().invoke(main, ["report", str(own), "--publish", str(tmp_path / "sent")]).exit_code == 0
    received = (tmp_path / "sent").rename(tmp_path / "received")
    shutil.copy(tmp_path / "tiny.npz", received)
    code, verdicts, said = check(received)
    assert (code, verdicts["page"], verdicts["ledger"]) == (0, "ok", "ok"), said
    assert "so not compared: tiny.npz" in said
