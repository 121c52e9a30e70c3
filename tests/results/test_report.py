"""The page beside a result: its numbers are those of the ledger, it needs nothing else, and tells nothing that is not
public."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dpsgd_cli.accounting.ledger import read_entries
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.main import main
from dpsgd_cli.results import report, store, summary
from dpsgd_cli.results.document import Box
from tests.conftest import Train, WriteRecipe, toy_result, write_result


def pages(directory: Path) -> tuple[str, str]:
    """The text of the report, and its page."""
    written = report.write(directory)
    assert [page.name for page in written] == list(report.NAMES)
    plain, drawn = (page.read_text(encoding="utf-8") for page in written)
    return plain, drawn


def test_what_is_marked_is_not_on_the_page(tmp_path: Path) -> None:
    """Two results that differ in everything that is marked, and in nothing else, have the same pages."""
    line = json.dumps({"trial": 0, "seed": None, "phase": "train", "epoch": 0, "mechanism": "gaussian",
                       "noise_multiplier": 20.0, "adjacency": "zero-out", "batching": "shuffle",
                       "sampling_rate": 1.0, "sensitivity": 1.0, "count": 1})  # fmt: skip
    made = []
    for place, value in (("one", 0.123), ("two", 987.5)):
        plain = toy_result([line], trials=1)
        privacy = plain.privacy | {"scope": "each trial", "spent": None, "uncovered_steps": ["<b>was read</b>"]}
        row = {"epoch": 0, "trial": 0, "epsilon": 1.0, "test_accuracy": 0.5, "nonprivate_train_loss": value}
        metrics = {name: {"mean": number, "std": None, "ci95": None, "n": 1}
                   for name, number in (("test_accuracy", 0.5), ("nonprivate_train_accuracy", value))}  # fmt: skip
        directory = tmp_path / place / "toy-12345678"
        write_result(
            directory,
            dataclasses.replace(
                plain, privacy=privacy, history=[row], metrics=metrics, nonprivate_warnings=[f"saw {value}"],
                timing={"steps": 1, "nonprivate_train_seconds": value}, provenance={"seed": None},
            ),
            "name: toy\n",
        )  # fmt: skip
        made.append(pages(directory))
    assert made[0] == made[1]
    plain_text, drawn = made[0]
    assert "Never publish fields named `nonprivate_...`" in plain_text
    assert "&lt;b>was read" in plain_text and "<b>" not in drawn


def test_a_page_is_made_of_files_that_are_as_they_were_written(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe())
    assert len(read_entries(directory / "ledger.jsonl")) == 2
    ledger = (directory / "ledger.jsonl").read_text()
    (directory / "ledger.jsonl").write_text(ledger.splitlines(keepends=True)[0])
    result = CliRunner().invoke(main, ["report", str(directory)])
    assert result.exit_code == 2 and "ledger.jsonl: was changed after the result was written" in result.stderr
    assert CliRunner().invoke(main, ["report", str(directory.parent / "..")]).exit_code == 2


def test_train_writes_the_page_once_and_a_folder_of_results_gets_its_pages(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe, out = str(write_recipe()), str(tmp_path / "out")
    assert CliRunner().invoke(main, ["train", recipe, "--out", out]).exit_code == 0
    (directory,) = (tmp_path / "out").iterdir()
    (directory / "report.html").unlink()
    assert CliRunner().invoke(main, ["train", recipe, "--out", out]).exit_code == 0
    assert (directory / "report.html").is_file()
    empty = CliRunner().invoke(main, ["report", str(tmp_path / "nothing")])
    assert empty.exit_code == 2 and "holds no result" in empty.stderr
    written = CliRunner().invoke(main, ["report", out])
    assert written.stdout.splitlines() == [str(directory / name) for name in report.NAMES]


def test_the_first_lines_say_quality_epsilon_day_version_and_data(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe(repeats=1))
    plain, _ = pages(directory)
    document = store.read_document(directory)
    accuracy, constant = (document["metrics"][name]["mean"] for name in ("test_accuracy", "constant_accuracy"))
    first = plain.splitlines()[0]
    assert first.startswith(f"# tiny: test accuracy {accuracy:.4f} (baseline {constant:.4f}), epsilon 4.0")
    assert first.endswith(" at delta 0.001")
    line = next(line for line in plain.splitlines() if line.startswith("Written on 20"))
    assert f"by dpsgd {document['provenance']['version']}. Data: `tiny.npz` (its hash" in line
    (hidden,) = document["provenance"]["nonprivate_data_sha256"].values()
    assert hidden[:12] not in plain


STATED = {
    "accountant": "pld", "epsilon": 1.0, "delta": 1e-5, "bound": "upper", "adjacency": "add-remove",
    "noise_source": "secure",
}  # fmt: skip
BEST = Attacker({0.01: 0.1}, 0.62459, "pld", 1.0, 0.1)


@pytest.mark.parametrize(
    ("changed", "answers", "warned"),
    [
        ({}, ["Each record", "62.46% instead of 50%", "Accuracy 0.8000"], [False, False, False]),
        ({"unit": {"column": "mrn"}}, ["Each user", "62.46% instead of 50%", "Accuracy 0.8000"], [False, False, False]),
        ({"epsilon": 12.0}, ["Each record", "62.46% instead of 50%", "Accuracy 0.8000"], [False, True, False]),
        ({"epsilon": None}, ["Each record", "62.46% instead of 50%", "Accuracy 0.8000"], [False, True, False]),
        ({"bound": "estimate"}, ["Each record", "62.46% instead of 50%", "Accuracy 0.8000"], [False, True, False]),
        ({"noise_source": "seeded"}, ["Each record", "62.46% instead of 50%", "Accuracy 0.8000"], [False, True, False]),
        ({"accountant": None}, ["Nobody", "Unlimited", "Accuracy 0.8000"], [True, True, False]),
    ],
)  # fmt: skip
def test_the_first_screen_warns_of_what_does_not_protect(
    changed: dict[str, Any], answers: list[str], warned: list[bool]
) -> None:
    metrics = {"test_accuracy": {"mean": 0.8}, "constant_accuracy": {"mean": 0.7}}
    boxes = summary.cards({"privacy": STATED | changed, "metrics": metrics}, BEST).boxes
    assert [(box.answer, box.warned) for box in boxes if isinstance(box, Box)] == list(
        zip(answers, warned, strict=True)
    )


def test_the_first_screen_warns_of_a_model_that_is_no_better_than_a_constant() -> None:
    for name, model, constant, best in (
        ("accuracy", 0.7, 0.7, False),
        ("rmse", 2.0, 3.0, True),
        ("rmse", 3.0, 2.0, False),
    ):
        metrics = {f"test_{name}": {"mean": model}, f"constant_{name}": {"mean": constant}}
        box = summary.cards({"privacy": STATED, "metrics": metrics}, "unknown").boxes[-1]
        assert isinstance(box, Box) and box.warned == (not best) == (box.answer == "No better than a constant")
