"""Result directories: whole or absent, read by their owner; and public copies, which hold nothing that is marked."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from dpsgd_cli.engine.bundle import Bundle
from dpsgd_cli.errors import DataError, PrivacyError, RunError, UsageError
from dpsgd_cli.main import main
from dpsgd_cli.results import files, reading, store
from dpsgd_cli.results.result import ResultContent
from tests.conftest import Train, WriteRecipe, toy_result, write_result

RESULT = toy_result(['{"trial": 0}', '{"trial": 1}'])


def write(directory: Path, result: ResultContent = RESULT) -> None:
    write_result(directory, result, "name: toy\n", Bundle([{"weight": torch.eye(2)}]).to_bytes())


def test_a_result_is_read_back(tmp_path: Path) -> None:
    directory = tmp_path / "out" / "toy-1"
    assert not store.is_complete(directory)
    write(directory)
    assert store.is_complete(directory)
    assert {path.name for path in directory.iterdir()} == {*store.FILES, "model.safetensors"}
    assert store.read_document(directory)["timing"] == {"steps": 2}
    assert (directory / "recipe.yaml").read_text() == "name: toy\n"
    assert (directory / "ledger.jsonl").read_text() == '{"trial": 0}\n{"trial": 1}\n'
    torch.testing.assert_close(load_file(str(directory / "model.safetensors"))["weight"], torch.eye(2))
    assert list(directory.parent.iterdir()) == [directory]


@pytest.mark.parametrize("broken", range(6))
def test_a_failure_at_any_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int) -> None:
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > broken:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device") as failure:
        write(tmp_path / "toy-1")
    assert Path(str(failure.value.filename)).name in {*store.FILES, "model.safetensors"}
    assert list(tmp_path.iterdir()) == []


def test_what_a_disk_refuses_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    """No file may grow: the error comes from the system, not from a patched function."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as failure:
            write(tmp_path / "toy-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (Path(str(failure.value.filename)).name, list(tmp_path.iterdir())) == ("recipe.yaml", [])


def test_a_place_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"file.*results cannot be written here \(.*\); choose another folder with --out"
    ):
        store.prepare_place(tmp_path / "file" / "out" / "toy-1")
    store.prepare_place(tmp_path / "new" / "out" / "toy-1")
    assert list((tmp_path / "new" / "out").iterdir()) == []


def test_cells_that_a_sweep_lists_and_nobody_has_are_missing(tmp_path: Path) -> None:
    """What lies in a hidden folder is not to be seen."""
    for place in (tmp_path / "sweeps", tmp_path / ".private"):
        (place / "done").mkdir(parents=True)
        (place / "done" / "result.json").write_text("{}")
        (place / "failed.failed.json").write_text("{}")
        cells = [{"directory": name} for name in ("done", "failed", "gone")]
        (place / "a.sweep.json").write_text(files.to_json({"cells": cells}))
    assert store.missing_cells(tmp_path) == [tmp_path / "sweeps" / "gone"]


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


REGISTRY = {
    "basic": "name data_curators intended_use data_product_type data_product_region description publication_date",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters privacy_parameters_details",
    "deployment_model": "model_name actors release_type release_type_details data_source_type access_type",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources registry_authors",
}
"""Keys of `deployments/transluce_mhusage.yaml` (opendp/deployments-registry-data, September 2026) that are answered."""


def check_deployment(record: dict[str, Any]) -> None:
    """A record has the keys of the registry's own records."""
    assert (set(record), record["status"]) == ({"url_slug", "status", "tier", "deployment"}, "Draft")
    assert {section: " ".join(own) for section, own in record["deployment"].items()} == REGISTRY
    assert all(isinstance(value, str | dict | list) for own in record["deployment"].values() for value in own.values())
    parameters = record["deployment"]["privacy_loss"]["privacy_parameters"]
    assert set(parameters) <= {"epsilon", "rho", "delta"} and all(isinstance(one, float) for one in parameters.values())


def test_the_public_copy_can_be_used(tmp_path: Path, result: Path) -> None:
    def run(*arguments: object) -> str:
        found = CliRunner().invoke(main, [str(one) for one in arguments])
        assert found.exit_code == 0, found.output
        return found.stdout

    copy = tmp_path / "copy"
    run("report", result, "--publish", copy)
    assert {file.name for file in copy.iterdir()} == COPY | {"report.md", "report.html", "deployment.yaml"}
    assert "nonprivate_" not in (copy / "report.md").read_text()
    check_deployment(yaml.safe_load((copy / "deployment.yaml").read_text()))
    with safe_open(copy / "model.safetensors", "np") as file:
        stated = json.loads(file.metadata()["dpsgd"])["privacy"]
    told = json.loads((copy / "result.json").read_text())["privacy"]
    ledger = hashlib.sha256((copy / "ledger.jsonl").read_bytes()).hexdigest()
    assert (stated["epsilon"], stated["delta"], stated["ledger_sha256"]) == (told["epsilon"], told["delta"], ledger)
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


def test_the_first_of_two_results_stays(tmp_path: Path) -> None:
    write(tmp_path / "toy-1")
    write(tmp_path / "toy-1", replace(RESULT, name="late"))
    assert store.read_document(tmp_path / "toy-1")["name"] == "toy"
    assert [path.name for path in tmp_path.iterdir()] == ["toy-1"]


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a result directory"):
        store.read_document(tmp_path)
    for content in (b"{", b"[]", b"\xff"):
        (tmp_path / "result.json").write_bytes(content)
        with pytest.raises(DataError, match=r"result\.json: (cannot be read|not a result)"):
            store.read_document(tmp_path)


def test_nothing_lies_beside_the_copy(tmp_path: Path, result: Path) -> None:
    (tmp_path / "copy").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        store.public_copy(result, tmp_path / "copy")
