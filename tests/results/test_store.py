"""Result directories: whole or absent, readable by anyone's JSON and CSV."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpsgd_cli.engine.bundle import Bundle
from dpsgd_cli.errors import DataError, RunError
from dpsgd_cli.results import files, store
from dpsgd_cli.results.result import Result
from tests.conftest import toy_result, write_result

RESULT = toy_result(['{"trial": 0}', '{"trial": 1}'])


def write(directory: Path, result: Result = RESULT) -> None:
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


def test_other_readers_of_json_are_served(tmp_path: Path) -> None:
    """JSON has no infinity: it becomes null, and nothing else changes."""
    text = files.to_json({"epsilon": math.inf, "rho": math.nan, "rows": [(1, 2.5), "é"], "whole": 3})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == {
        "epsilon": None,
        "rho": None,
        "rows": [[1, 2.5], "é"],
        "whole": 3,
    }
    assert "é" in text and text.endswith("}\n")


def test_tables_have_every_column_and_empty_cells() -> None:
    text = files.to_csv([{"a": 1, "b": 0.1}, {"a": 2, "c": 'quoted, "so"'}, {"b": None}])
    assert text.startswith("a,b,c\n1,0.1,\n")
    assert list(csv.DictReader(text.splitlines())) == [
        {"a": "1", "b": "0.1", "c": ""},
        {"a": "2", "b": "", "c": 'quoted, "so"'},
        {"a": "", "b": "", "c": ""},
    ]
    assert files.to_csv([]) == "\n"


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
