"""Whatever is in a recipe, an override, a table, an array or a ledger: an answer or an error of ours, no traceback."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dpsgd_cli.main import main
from dpsgd_cli.recipe import expected
from tests.conftest import recipe_writer

FAST = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
NUMBERS = (
    "0",
    "-1",
    "1e-320",
    "1e308",
    "-1e308",
    ".inf",
    ".nan",
    "1e400",
    "99999999999999999999",
    "9" * 299,
    "0x10",
    "1",
)
WORDS = (
    "",
    "null",
    "true",
    "[]",
    "{}",
    "[[]]",
    "a",
    "auto",
    "~",
    "{a: 1}",
    "[1, 2]",
    "\x00",
    "!!python/object:os.system x",
)
ODD = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.text(max_size=8))


def answered(*args: str | Path) -> None:
    """Fails for a traceback, and for what the command line reports as a bug of ours."""
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 1, 2)
    assert "bug of ours" not in result.output, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    """A recipe that is in order."""
    return recipe_writer(folder)()


def numeric_keys() -> Iterator[str]:
    """Every key of the schema that may be a number, as far as kinds do not have to be chosen."""
    for path in expected.key_paths(expected.recipe_schema(), None):
        yield ".".join(map(str, path))


@FAST
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
@example(b"\xff\xfe")
@example(b"name: &a [*a]")
@example(b"{" * 2000)
@example(b"? [a]\n: b")
@example(b"name: t\ndata: []\nmodel: 3\nmethod: {kind: [dp-sgd]}\n")
def test_bytes_as_a_recipe(folder: Path, content: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(content)
    for command in ("train", "account", "sweep"):
        answered(command, path)


@settings(FAST, max_examples=60)
@given(st.sampled_from([*dict.fromkeys(numeric_keys())]), ODD)
@example("privacy.budget", "{epsilon: 1e300, delta: 1e-300}")
@example("privacy.budget", "{epsilon: 1e-300, delta: 0.5}")
@example("privacy.budget", "{rho: 1e-300}")
@example("privacy.schedule", "{kind: exponential, initial: 1e300, decay: auto}")
@example("privacy.schedule", "{kind: polynomial, initial: 3, final: auto, decay: 1e300}")
@example("privacy.clipping", "{kind: flat, norm: 1e308}")
@example("seed", "9" * 299)
def test_an_override_of_any_key(tiny: Path, key: str, value: str) -> None:
    answered("account", tiny, f"{key}={value}", "--accountant", "rdp", "--accountant", "gaussian")


CELL = st.one_of(
    st.sampled_from(["", "1", "0", "x", "1e999", "nan", '"', "\x00", "1,2", "\n", "-0"]), st.text(max_size=3)
)


@FAST
@given(st.one_of(st.lists(st.lists(CELL, max_size=4).map(",".join), max_size=6).map("\n".join), st.text(max_size=40)))
@example("y\n")
@example("a,y\n1,0\n2,1\n3")
def test_text_as_a_table(folder: Path, tiny: Path, text: str) -> None:
    (folder / "table.csv").write_text(text, errors="replace")
    answered("train", table_recipe(folder, tiny, {"path": "table.csv", "target": "y"}), "--dry-run")


@FAST
@given(st.binary(max_size=80), st.sampled_from([".npz", ".npy", ".parquet", ".csv.gz"]))
@example(b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f8', 'fortran_order': False, 'shape': (-69, 3), }\n", ".npy")
@example(b"\x1f\x8b\x08\x00", ".csv.gz")
def test_bytes_as_a_file_of_data(folder: Path, tiny: Path, content: bytes, kind: str) -> None:
    (folder / f"file{kind}").write_bytes(content)
    labels = folder / "labels.npy"
    np.save(labels, np.arange(8) % 2)
    target = "labels.npy" if kind == ".npy" else "y"
    data = {"path": f"file{kind}", "target": target, "classes": [0, 1]}
    answered("train", table_recipe(folder, tiny, data), "--dry-run")


@FAST
@given(st.dictionaries(st.sampled_from(["x", "y", "x_test", "y_test"]), st.sampled_from(range(9)), max_size=4))
def test_arrays_of_any_kind(folder: Path, tiny: Path, chosen: dict[str, int]) -> None:
    kinds: list[Any] = [
        np.zeros((3, 2)), np.zeros(3), np.zeros((0, 2)), np.array(["a", "b", "c"]), np.full((3, 2), np.nan),
        np.array(1), np.zeros((3, 2), complex), np.array([0, 1, 0]),
        np.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    ]  # fmt: skip
    with zipfile.ZipFile(folder / "arrays.npz", "w") as file:
        for name, number in chosen.items():
            content = io.BytesIO()
            np.save(content, kinds[number])
            file.writestr(f"{name}.npy", content.getvalue())
    answered("train", table_recipe(folder, tiny, {"path": "arrays.npz", "bounds": [0, 1]}), "--dry-run")


VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just(10**400),
)
KEYS = ("kind", "noise_multiplier", "adjacency", "batching", "sampling_rate", "sensitivity", "count", "trial", "phase",
        "epoch", "within", "epsilon", "delta", "rho", "source", "label", "step")  # fmt: skip
LINE = {"kind": "gaussian-sum", "noise_multiplier": 1.0, "adjacency": "add-remove", "batching": "full", "count": 1}


@settings(FAST, max_examples=80)
@given(st.dictionaries(st.sampled_from(KEYS), VALUE, max_size=3), st.booleans())
def test_any_line_as_a_ledger(folder: Path, changes: dict[str, Any], whole: bool) -> None:
    path = folder / "ledger.jsonl"
    path.write_text(json.dumps((LINE if whole else {}) | changes) + "\n")
    answered("account", path)


@FAST
@given(
    st.one_of(
        st.binary(max_size=40), st.sampled_from([b"{", b"[]", b"1", b"null", b"[" * 100_000, b'{"trial": 1e400}'])
    )
)
def test_bytes_as_a_ledger(folder: Path, content: bytes) -> None:
    path = folder / "bytes.jsonl"
    path.write_bytes(content)
    answered("account", path)


def table_recipe(folder: Path, tiny: Path, data: dict[str, Any]) -> Path:
    content = yaml.safe_load(tiny.read_text()) | {"data": data}
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
