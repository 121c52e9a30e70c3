"""Who may read a result's files, and its public copy: nothing that is marked or of this computer, and usable."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from dpsgd_cli.errors import PrivacyError, UsageError
from dpsgd_cli.main import main
from dpsgd_cli.results import reading, store
from tests.conftest import Train, WriteRecipe

COPY = {"recipe.yaml", "result.json", "trials.csv", "history.csv", "ledger.jsonl", "model.safetensors"}


@pytest.fixture(autouse=True)
def _usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def result(tmp_path: Path, write_recipe: WriteRecipe, train: Train) -> Path:
    """Trained without a seed on data at an absolute place."""
    path = write_recipe(
        seed=None, data={"path": str(tmp_path / "tiny.npz"), "bounds": [0, 1], "classes": [0, 1, 2]}, repeats=1
    )
    return train(path, save_models=True)


def names(value: object) -> list[str]:
    """Every key of a document."""
    if isinstance(value, dict):
        return [*value, *(name for inner in value.values() for name in names(inner))]
    return [name for inner in value for name in names(inner)] if isinstance(value, list) else []


def test_what_is_marked_is_for_its_owner_alone(result: Path) -> None:
    for file in result.iterdir():
        text = file.read_bytes()
        if b"nonprivate_" in text and not file.name.startswith("report."):
            assert file.stat().st_mode & 0o077 == 0, file.name
    modes = {file.name: file.stat().st_mode & 0o777 for file in result.iterdir()}
    assert modes["result.json"] == modes["trials.csv"] == modes["history.csv"] == 0o600
    assert modes["ledger.jsonl"] == modes["recipe.yaml"] == 0o644


def test_the_public_copy_holds_nothing_that_is_marked(tmp_path: Path, result: Path) -> None:
    copy = store.public_copy(result, tmp_path / "copy")
    assert {file.name for file in copy.iterdir()} == COPY
    document, own = (json.loads((place / "result.json").read_text()) for place in (copy, result))
    marked = {name: document[name] for name in names(document) if name.startswith("nonprivate_")}
    assert marked.pop("nonprivate_sha256") != own["nonprivate_sha256"]
    assert marked == {"nonprivate_warnings": [], "nonprivate_files": {}}
    assert document["privacy"] == own["privacy"] and "test_accuracy" in document["metrics"]
    for name in ("trials.csv", "history.csv"):
        (whole, kept) = (next(csv.reader((place / name).read_text().splitlines())) for place in (result, copy))
        assert kept == [column for column in whole if not column.startswith("nonprivate_")] != whole
    for file in copy.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    assert (copy / "ledger.jsonl").read_bytes() == (result / "ledger.jsonl").read_bytes()


def test_the_public_copy_can_be_used(tmp_path: Path, result: Path) -> None:
    def run(*arguments: object) -> str:
        found = CliRunner().invoke(main, [str(one) for one in arguments])
        assert found.exit_code == 0, found.output
        return found.stdout

    copy = tmp_path / "copy"
    run("report", result, "--publish", copy)
    assert {file.name for file in copy.iterdir()} == COPY | {"report.md", "report.html"}
    assert "nonprivate_" not in (copy / "report.md").read_text()
    np.save(tmp_path / "new.npy", np.load(tmp_path / "tiny.npz")["x_test"])
    (tmp_path / "tiny.npz").unlink()
    assert run("predict", copy, tmp_path / "new.npy") == run("predict", result, tmp_path / "new.npy")
    prices = [json.loads(run("account", place, "--format", "json")) for place in (copy, result)]
    assert [row["epsilon"] for row in prices[0]] == [row["epsilon"] for row in prices[1]]
    run("report", copy)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"seed": 0, "repeats": 1}, "seed"),
        ({"seed": None, "repeats": 2}, "of one trial, and it holds 2"),
        ({"privacy": None, "method": {"kind": "sgd", "batch_size": 12, "learning_rate": 0.5}}, "without privacy"),
    ],
)
def test_what_may_not_be_handed_on_is_not_copied(
    tmp_path: Path, write_recipe: WriteRecipe, train: Train, sections: dict[str, object], why: str
) -> None:
    with pytest.raises(PrivacyError, match=why):
        store.public_copy(train(write_recipe(**sections)), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_step_that_nothing_covers_is_not_handed_on(tmp_path: Path, write_recipe: WriteRecipe, train: Train) -> None:
    data = {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2], "preprocess": [{"scale": {"by": "standard"}}]}
    with pytest.raises(PrivacyError, match="does not cover"):
        store.public_copy(train(write_recipe(seed=None, repeats=1, data=data)), tmp_path / "copy")


def test_a_marked_file_that_is_no_table_is_not_copied(
    tmp_path: Path, result: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of every result that holds what was not released, and whose marked part nobody can leave out."""
    monkeypatch.setitem(reading.FILES, "model.safetensors", reading.FILES["trials.csv"])
    with pytest.raises(ValueError, match="holds values that were not released"):
        store.public_copy(result, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_nothing_lies_beside_the_copy(tmp_path: Path, result: Path) -> None:
    (tmp_path / "copy").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        store.public_copy(result, tmp_path / "copy")
