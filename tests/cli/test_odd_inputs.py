"""Files and numbers that nobody should give: an error that names them, in time and in few words."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from tests.conftest import WriteRecipe

BUG = "bug of ours"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def refused(result: Result, *words: str) -> None:
    """A short message of ours, with all of these words."""
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert BUG not in result.stderr
    assert len(result.stderr) < 2000
    for word in words:
        assert word in result.stderr


def train(write_recipe: WriteRecipe, tmp_path: Path, **data: Any) -> Result:
    own = {"target": "y", "bounds": [0, 1], "classes": [0, 1]} | data
    return run("train", write_recipe(data=own), "--out", tmp_path / "out")


def npy(shape: str) -> bytes:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(800)


@pytest.mark.parametrize("shape", ["(-69, 3)", "(9999999999999999999, 3)", "(99999999, 99999999)", "(3", "3", "'a'"])
def test_an_array_of_an_impossible_shape(write_recipe: WriteRecipe, tmp_path: Path, shape: str) -> None:
    (tmp_path / "x.npy").write_bytes(npy(shape))
    np.save(tmp_path / "y.npy", np.arange(8) % 2)
    refused(train(write_recipe, tmp_path, path="x.npy", target="y.npy"), "x.npy cannot be read as a npy array")
    with zipfile.ZipFile(tmp_path / "both.npz", "w") as file:
        file.write(tmp_path / "x.npy", "x.npy")
        file.write(tmp_path / "y.npy", "y.npy")
    refused(train(write_recipe, tmp_path, path="both.npz"), "both.npz")


def test_an_npz_member_that_is_no_array(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    labels = io.BytesIO()
    np.save(labels, np.arange(8) % 2)
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as file:
        file.writestr("x", "hello")
        file.writestr("y.npy", labels.getvalue())
    refused(train(write_recipe, tmp_path, path="odd.npz"), "odd.npz has no array 'x'")


ONE_AFTER_ANOTHER = """
import json, sys
from dpsgd_cli.main import main
for command in json.loads(sys.argv[2]):
    try:
        main([*command, sys.argv[1]])
    except SystemExit as end:
        print(end.code)
"""


@pytest.mark.parametrize("name", ["pipe.yaml", "pipe.jsonl", "pipe.csv"])
def test_a_pipe_is_refused_where_it_would_be_waited_for(write_recipe: WriteRecipe, tmp_path: Path, name: str) -> None:
    """In a process of its own, which may be stopped."""
    os.mkfifo(tmp_path / name)
    given, commands = tmp_path / name, [["train"], ["account"], ["recipe", "validate"], ["sweep"], ["compare"]]
    if name == "pipe.csv":
        given, commands = write_recipe(data={"path": name, "target": "y"}), [["train"]]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, str(given), json.dumps(commands)],
        capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert len(done.stdout.split()) == len(commands) and set(done.stdout.split()) <= {"1", "2"}
    assert done.stderr.count("is a pipe, not a file") == len(commands)


def test_one_endless_line(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "long.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"a" * 100_000_000)
    refused(train(write_recipe, tmp_path, path="long.csv.gz"), "first line is longer than 4000000 characters")


@pytest.mark.parametrize("text", [f"a,y\n{'z' * 5_000_000},1\n2,0\n", f"a,y\n1,{'z' * 5_000_000}\n2,0\n3,1\n"])
def test_a_cell_of_megabytes_is_not_repeated(write_recipe: WriteRecipe, tmp_path: Path, text: str) -> None:
    (tmp_path / "cell.csv").write_text(text)
    refused(train(write_recipe, tmp_path, path="cell.csv"), "a cell is too long")


def test_cells_that_are_lists(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """Left out of a drafted recipe; in training they may be dropped, and are refused otherwise."""
    nested = pd.DataFrame({"a": [[1], [2]] * 6, "b": np.arange(12) / 12 % 0.37, "y": [0, 1] * 6})
    nested.to_parquet(tmp_path / "own.parquet")
    drafted = run("recipe", "new", tmp_path / "own.parquet", "--target", "y")
    assert drafted.exit_code == 0 and "- a     # lists or objects" in drafted.output
    refused(train(write_recipe, tmp_path, path="own.parquet"), "column 'a' holds lists or objects")
    refused(train(write_recipe, tmp_path, path="own.parquet", categorical=["a"]), "column 'a' holds lists or objects")
    refused(train(write_recipe, tmp_path, path="own.parquet", target="a"), "'a' holds lists or objects")
    privacy = {"schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-3}
    own = {"path": "own.parquet", "target": "y", "classes": [0, 1], "bounds": [0, 1], "drop": ["a"]}
    method = {"kind": "dp-sgd", "batching": "full", "learning_rate": 1}
    assert run("train", write_recipe(data=own, method=method, privacy=privacy), "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y": np.zeros(12, [("a", int)])}, "but must be numbers or text"),
        ({"y": np.full(12, 1j)}, "but must be numbers or text"),
    ],
)
def test_arrays_of_other_shapes(write_recipe: WriteRecipe, tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "own.npz", **({"x": np.zeros((12, 2)), "y": np.arange(12) % 2} | arrays))
    refused(run("recipe", "new", tmp_path / "own.npz", "--target", "y"), says)
    refused(train(write_recipe, tmp_path, path="own.npz"), says)
