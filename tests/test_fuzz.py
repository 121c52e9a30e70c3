"""A share of `tests/fuzz.py`, what it once found, and prices of mutated ledgers and results."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dpsgd_cli.engine import bundle
from dpsgd_cli.main import main
from dpsgd_cli.results.reading import sealed
from dpsgd_cli.training import checkpoint
from tests import fuzz
from tests.cli.accounting import run
from tests.conftest import Train, WriteRecipe, recipe_writer
from tests.fuzz import GONE, ODD

PRICED = 250
"""Of all mutations of a result, drawn by a fixed seed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    fuzz.make_inputs(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("own.yaml", b"\xff\xfe"), ("own.yaml", b"name: &a [*a]"), ("own.yaml", b"{" * 2000),
        ("own.yaml", b"? [a]\n: b"), ("own.yaml", b"name: t\ndata: []\nmodel: 3\nmethod: {kind: [dp-sgd]}\n"),
        ("own.csv", b"y\n"), ("own.csv", b"a,y\n1,0\n2,1\n3"), ("own.csv.gz", b"\x1f\x8b\x08\x00"),
        ("own.npy", b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f8', 'fortran_order': False, 'shape': (-69, 3), }\n"),
        *(("own.jsonl", content) for content in (b"{", b"[]", b"1", b"null", b"[" * 100_000, b'{"trial": 1e400}')),
    ],
)  # fmt: skip
def test_files_that_are_not_in_order_are_answered(tmp_path: Path, name: str, content: bytes) -> None:
    recipe = recipe_writer(tmp_path)(data={"path": name, "target": "x.npy" if name == "own.npy" else "y"})
    np.save(tmp_path / "x.npy", np.arange(8) % 2)
    (tmp_path / name).write_bytes(content)
    is_input = name.endswith(("yaml", "jsonl"))
    for command in [["train"], ["account"], ["sweep"]] if is_input else [["train", "--dry-run"]]:
        assert fuzz.fault(tmp_path, [*command, name if is_input else recipe.name]) is None


@pytest.mark.parametrize(
    "override",
    [
        "privacy.budget={epsilon: 1e300, delta: 1e-300}", "privacy.budget={epsilon: 1e-300, delta: 0.5}",
        "privacy.budget={rho: 1e-300}", "privacy.schedule={kind: exponential, initial: 1e300, decay: auto}",
        "privacy.schedule={kind: polynomial, initial: 3, final: auto, decay: 1e300}",
        "privacy.clipping={kind: flat, norm: 1e308}", "seed=" + "9" * 299,
    ],
)  # fmt: skip
def test_overrides_at_the_edge_are_answered(tmp_path: Path, override: str) -> None:
    recipe_writer(tmp_path)()
    assert fuzz.fault(tmp_path, ["account", "tiny.yaml", override, "--accountant", "rdp"]) is None


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("name",), "\ud800"), (("privacy", "scope"), "\ud800"), (("privacy", "sensitivity"), "\ud800"),
        (("provenance", "chosen"), True), (("privacy", "attacker", "true_positives", "0.001"), 1e308),
    ],
)  # fmt: skip
def test_documents_that_once_were_internal_errors(
    inputs: Path, tmp_path: Path, path: tuple[str, ...], new: Any
) -> None:
    directory = tmp_path / fuzz.own_result(inputs).name
    shutil.copytree(fuzz.own_result(inputs), directory)
    document = json.loads((directory / "result.json").read_text())
    fuzz.seal(directory, fuzz.changed(document, path, new))
    for command in (("report", directory), ("compare", directory, fuzz.own_result(inputs)), ("evaluate", directory)):
        refused(*command, says="result.json")


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("recipe.yaml", "  path: ", "path: ", "is no resolved recipe of this version"),
        ("recipe.yaml", "  path: ", "  path: \x00", "is no resolved recipe of this version"),
        ("recipe.yaml", "  path: own.csv", "  path: \ud800", "recipe.yaml: cannot be read"),
        ("recipe.yaml", "  path: own.csv", "  path: [1]", "data.path: "),
        ("history.csv", "\n0,0,0,", "\n0,0,18446744073709551616,", "history.csv: is no table of epochs"),
        ("history.csv", "\n0,0,0,", "\n0,0,0,x", "history.csv: is no table of epochs"),
    ],
)
def test_files_that_once_were_internal_errors(
    inputs: Path, tmp_path: Path, name: str, old: str, new: str, says: str
) -> None:
    directory = tmp_path / fuzz.own_result(inputs).name
    shutil.copytree(fuzz.own_result(inputs), directory)
    text = (directory / name).read_text()
    assert text.count(old) == 1
    (directory / name).write_text(text.replace(old, new), encoding="utf-8", errors="surrogatepass")
    fuzz.seal(directory, json.loads((directory / "result.json").read_text()))
    command = ("report", directory) if name == "history.csv" else ("compare", directory, fuzz.own_result(inputs))
    refused(*command, says=says)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("history", 0, 2, "loss"), GONE), (("released", "0/2"), "0"), (("method", "done"), "2"), (("done",), 10**400),
        (("method", "values"), torch.zeros(1)), (("init_seeds",), [1]), (("ledgers", 0), []),
    ],
)  # fmt: skip
def test_checkpoints_that_once_were_internal_errors(
    inputs: Path, tmp_path: Path, path: tuple[Any, ...], new: Any
) -> None:
    saved = fuzz.checkpoint_in(inputs)
    content = checkpoint.load(saved)
    assert content is not None
    checkpoint.save(tmp_path / saved.name, fuzz.changed(content, path, new))
    for command in ("--resume", "--finish"):
        refused("train", inputs / "own.yaml", command, "--out", tmp_path, says="remove it and train again")


@pytest.mark.parametrize("line", ["{", "[]"])
def test_a_damaged_ledger_line_in_a_checkpoint_is_refused_by_account(inputs: Path, tmp_path: Path, line: str) -> None:
    saved = fuzz.checkpoint_in(inputs)
    content = checkpoint.load(saved)
    assert content is not None
    checkpoint.save(tmp_path / saved.name, fuzz.changed(content, ("ledgers", 0, 0), line))
    refused("account", tmp_path / saved.name, says=saved.name)


def refused(*args: str | Path, says: str) -> None:
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code in (1, 2), result.output
    assert "bug of ours" not in result.output and says in result.output.replace("\n", " "), result.output


@pytest.mark.parametrize("name", ["format", "input_shape", "classes", "layout", "preprocess", "made_from"])
def test_a_model_file_that_lacks_what_predicting_needs_is_refused(inputs: Path, tmp_path: Path, name: str) -> None:
    source = fuzz.own_result(inputs)
    directory = tmp_path / source.name
    shutil.copytree(source, directory)
    about = {key: value for key, value in bundle.read(source / "model.safetensors").about.items() if key != name}
    save_file(load_file(source / "model.safetensors"), directory / "model.safetensors", {"dpsgd": json.dumps(about)})
    fuzz.seal(directory, json.loads((source / "result.json").read_text()))
    refused("predict", directory, inputs / "own.csv", says="model.safetensors")


def answer(source: Path, what: object) -> list[dict[str, Any]] | None:
    """The rows, or None for a refusal; fails for a traceback and for what is reported as an internal error."""
    told = run(str(source), "--accountant", "gaussian", "--accountant", "zcdp", "--format", "json")
    assert told.exception is None or isinstance(told.exception, SystemExit), (what, told.exception)
    assert told.exit_code in (0, 1, 2), what
    assert "internal error" not in told.output.lower() and "Traceback" not in told.output, (what, told.output)
    return json.loads(told.stdout) if told.exit_code == 0 else None


def test_a_mutated_ledger_line_is_refused_or_costs_what_it_says(tmp_path: Path) -> None:
    """What is priced after a change that leaves the mechanism alone costs the same (mu = 1/2 exactly)."""
    line: dict[str, Any] = {
        "trial": 0, "seed": 0, "phase": "train", "epoch": 1, "mechanism": "gaussian", "noise_multiplier": 2.0,
        "adjacency": "zero-out", "batching": "shuffle", "sampling_rate": 1.0, "sensitivity": 1.0, "label": "gradient",
        "count": 1,
    }  # fmt: skip
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(line))
    plain = answer(path, "unchanged")
    assert plain is not None
    harmless = {"trial", "seed", "phase", "epoch", "sensitivity", "label", "within", "unit", "batching", "adjacency"}
    for key in [*line, "within", "unit"]:
        for odd in ODD:
            if odd is GONE and key not in line:
                continue
            path.write_text(json.dumps(fuzz.changed({**line, **({} if key in line else {key: 0})}, (key,), odd)))
            rows = answer(path, (key, odd))
            if rows is not None and key in harmless:
                assert all(row["epsilon"] is None or row["epsilon"] >= 0.9999 * plain[0]["epsilon"] for row in rows)
            is_same = odd is not True and odd == line.get(key)
            if rows is not None and key in ("mechanism", "sampling_rate") and not is_same:
                raise AssertionError((key, odd))


def test_a_mutated_result_is_refused_or_costs_no_less(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe(method={"kind": "dp-gd", "learning_rate": 1}, epochs=1, repeats=2))
    result = directory / "result.json"
    document = json.loads(result.read_text())
    plain = answer(directory, "unchanged")
    assert plain is not None
    cases = [(path, odd) for path in list(fuzz.places(document))[1:] for odd in ODD]
    for path, odd in random.Random(0).sample(cases, PRICED):
        made = fuzz.changed(document, path, odd)
        try:
            made = sealed(made)
        except (TypeError, AttributeError, KeyError, ValueError):
            continue
        result.write_text(json.dumps(made))
        rows = answer(directory, (path, odd))
        if rows is not None and all(row["delta"] <= plain[0]["delta"] for row in rows):
            least = {row["accountant"]: row["epsilon"] for row in plain}
            assert all(row["epsilon"] is None or row["epsilon"] >= least[row["accountant"]] for row in rows), path


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_inputs_are_answered(inputs: Path, tmp_path: Path, kind: str) -> None:
    first = list(fuzz.KINDS).index(kind)
    cases = [fuzz.run_case(n, inputs, tmp_path / f"{n}") for n in range(first, 9 * len(fuzz.KINDS), len(fuzz.KINDS))]
    assert [(case.number, case.arguments, case.wrong) for case in cases if case.wrong is not None] == []
