"""A result is never taken at its word: what was lost, edited or replaced is found wherever a result is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.accounting.ledger import entries_from_lines
from dpsgd_cli.errors import DataError
from dpsgd_cli.main import main
from dpsgd_cli.results import reading, store
from tests.conftest import recipe_writer

FILES = ("recipe.yaml", "trials.csv", "history.csv", "ledger.jsonl", "model.safetensors")
Edit = Callable[[Path], None]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its data and, in `out`, its result with a model."""
    folder = tmp_path_factory.mktemp("trained")
    done = run("train", recipe_writer(folder)(save_model=True, seed=None), "--out", folder / "out")
    assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(trained, tmp_path / "project"))


def run(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(main, [command, *map(str, arguments)])


def result_in(project: Path) -> Path:
    (directory,) = (project / "out").glob("tiny-*")
    return directory


def every_reader(project: Path) -> dict[str, Result]:
    """Whoever reads a result by itself."""
    directory = result_in(project)
    return {
        "train": run("train", project / "tiny.yaml", "--out", project / "out"),
        "account": run("account", directory),
        "gate": run("account", directory, "--max-epsilon", "1000"),
        "gate of a folder": run("account", project / "out", "--max-epsilon", "1000"),
        "gate of its ledger": run("account", directory / "ledger.jsonl", "--max-epsilon", "1000"),
        "compare": run("compare", directory, "--out", project / "compared"),
    }


def replace(name: str, old: str, new: str) -> Edit:
    def edit(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text
        (directory / name).write_text(text.replace(old, new))

    return edit


def set_in_document(*path: Any, to: Any) -> Edit:
    """Edit a value of `result.json`."""

    def edit(directory: Path) -> None:
        document = json.loads((directory / "result.json").read_text())
        here = document
        for key in path[:-1]:
            here = here[key]
        assert here[path[-1]] != to
        here[path[-1]] = to
        (directory / "result.json").write_text(json.dumps(document, indent=2))

    return edit


def cut_to_a_sixth(directory: Path) -> None:
    lines = (directory / "ledger.jsonl").read_text().splitlines(keepends=True)
    (directory / "ledger.jsonl").write_text("".join(lines[: len(lines) // 6]))


def without_trial_1(directory: Path) -> None:
    lines = (directory / "ledger.jsonl").read_text().splitlines(keepends=True)
    (directory / "ledger.jsonl").write_text("".join(line for line in lines if '"trial": 1' not in line))


def quieter(directory: Path) -> None:
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"noise_multiplier": 99.0}) + "\n" for line in lines)
    (directory / "ledger.jsonl").write_text(text)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (cut_to_a_sixth, "ledger.jsonl: was changed after the result was written: it has 1 lines, and"),
        (without_trial_1, "ledger.jsonl: was changed after the result was written: it has 3 lines"),
        (quieter, "ledger.jsonl: was changed after the result was written (its lines are as many)"),
        (set_in_document("privacy", "epsilon", to=0.1), "result.json: was changed after it was written"),
        (set_in_document("metrics", "test_accuracy", "mean", to=0.999), "result.json: was changed"),
        (set_in_document("trials", 0, "test_accuracy", to=0.999), "result.json: was changed"),
        (set_in_document("privacy", "noise_source", to="magic"), "result.json: was changed"),
        (set_in_document("files", "ledger.jsonl", "lines", to=1), "result.json: was changed"),
        (replace("trials.csv", "0,", "1,"), "trials.csv: was changed after the result was written"),
        (replace("recipe.yaml", "epochs: 3", "epochs: 4"), "recipe.yaml: was changed after the result was written"),
        (lambda at: (at / "recipe.yaml").write_text(""), "recipe.yaml: was changed"),
        (lambda at: (at / "recipe.yaml").write_text("{"), "recipe.yaml: was changed"),
        (lambda at: (at / "model.safetensors").write_bytes(b"x"), "model.safetensors: was changed"),
        *[(lambda at, name=name: (at / name).unlink(), f"{name}: is missing") for name in FILES],
    ],
)  # fmt: skip
def test_whoever_reads_a_result_finds_what_was_done_to_it(project: Path, edit: Edit, told: str) -> None:
    edit(result_in(project))
    for name, done in every_reader(project).items():
        if name == "gate of its ledger" and not (result_in(project) / "ledger.jsonl").exists():
            continue
        assert done.exit_code == 2, (name, done.stdout, done.stderr)
        assert isinstance(done.exception, SystemExit), name
        assert told in done.stderr, (name, done.stderr)
        assert done.stdout == "", name


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda document: document.pop("privacy"), "privacy: missing"),
        (lambda document: document.pop("nonprivate_sha256"), "nonprivate_sha256: missing"),
        (lambda document: document.pop("files"), "files: missing"),
        (lambda document: document.update(metrics=[1, 2]), "metrics: input should be a valid dict"),
        (lambda document: document.update(metrics={"test_accuracy": 0.5}), "metrics.test_accuracy: input should be"),
        (lambda document: document["metrics"]["test_accuracy"].update(mean="0.9"), "metrics.test_accuracy.mean: input"),
        (lambda document: document.update(trials=7), "trials: input should be a valid list"),
        (lambda document: document.update(trials=[]), "trials: list should have at least 1 item"),
        (lambda document: document["trials"][0].pop("epochs"), "trials.0.epochs: missing"),
        (lambda document: document["trials"][0].update(test_accuracy=[1]), "trials.0.test_accuracy"),
        (lambda document: document["privacy"].update(epsilon=True), "privacy.epsilon: input should be"),
        (lambda document: document["privacy"].update(delta=None), "privacy: value error, it names an accountant"),
        (lambda document: document.update(warnings="none"), "warnings: input should be a valid list"),
    ],
)
def test_a_result_of_other_types_is_one_clear_error(project: Path, edit: Callable[[Any], Any], told: str) -> None:
    path = result_in(project) / "result.json"
    document = json.loads(path.read_text())
    edit(document)
    # new hashes where there were some, so that nothing but the type is wrong
    path.write_text(json.dumps(reading.sealed(document) if "nonprivate_sha256" in document else document))
    for name, done in every_reader(project).items():
        assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (name, done.exception)
        assert f"result.json: not a result: {told}" in done.stderr, (name, done.stderr)


def test_what_a_sweep_reads_is_checked(project: Path) -> None:
    sweep = project / "sweep.yaml"
    sweep.write_text("name: s\nrecipes: [tiny.yaml]\ngrid: {epochs: [1, 2]}\n")
    out = project / "swept"
    assert run("sweep", sweep, "--out", out).exit_code == 0
    first = next(iter(sorted(out.glob("tiny-*"))))
    quieter(first)
    done = run("sweep", sweep, "--out", out)
    assert done.exit_code == 2 and "ledger.jsonl: was changed after the result was written" in done.stderr
    assert run("account", out, "--max-epsilon", "1000").exit_code == 2
    compared = run("compare", out, "--out", project / "compared")
    assert compared.exit_code == 2 and "ledger.jsonl" in compared.stderr, compared.output
    set_in_document("privacy", "epsilon", to=0.1)(first)
    for command in (("sweep", sweep, "--out", out), ("compare", out, "--out", project / "compared")):
        done = run(*command)
        assert done.exit_code == 2 and "result.json: was changed after it was written" in done.stderr


def test_a_ledger_alone_is_priced_with_a_remark(project: Path) -> None:
    alone = project / "ledger.jsonl"
    shutil.copy(result_in(project) / "ledger.jsonl", alone)
    done = run("account", alone)
    assert done.exit_code == 0 and "nothing vouches for this ledger" in done.stdout
    assert run("account", alone, "--max-epsilon", "1000").exit_code == 0


def test_results_in_the_making_are_not_priced(project: Path) -> None:
    shutil.copytree(result_in(project), project / "out" / ".tiny.writing-host_1_00000000")
    quieter(project / "out" / ".tiny.writing-host_1_00000000")
    assert run("account", project / "out").exit_code == 0


def test_a_result_without_privacy_has_nothing_to_account_for(project: Path) -> None:
    recipe = recipe_writer(project)(privacy=None, method={"kind": "sgd", "batch_size": 12, "learning_rate": 0.5})
    assert run("train", recipe, "--out", project / "plain").exit_code == 0
    done = run("account", project / "plain")
    assert done.exit_code == 2 and "was trained without privacy" in done.stderr


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = ("mechanism", "trial", "seed", "phase", "epoch", "count", "noise_multiplier", "adjacency", "batching",
        "sampling_rate", "sensitivity", "label", "epsilon", "delta", "source", "rho", "within")  # fmt: skip
LINE = {"trial": 0, "seed": 0, "phase": "train", "epoch": 0, "noise_multiplier": 4.0, "adjacency": "add-remove",
        "batching": "full", "sampling_rate": 1.0, "sensitivity": 1.0, "epsilon": 0.1, "delta": 1e-6, "rho": 0.1,
        "count": 2, "label": "x"}  # fmt: skip


@given(
    st.sampled_from(["gaussian", "pure", "approximate", "zcdp"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3),
)
def test_a_damaged_ledger_line_of_any_type_is_one_clear_error(kind: str, damage: dict[str, Any]) -> None:
    """It is read as something that can be priced, or its line is named."""
    line = json.dumps({"mechanism": kind} | LINE | damage)
    found, told = {}, ""
    try:
        found = entries_from_lines([line], "ledger")
    except DataError as error:
        told = str(error)
    if told:
        assert told.startswith("ledger:1: not a ledger line: ") and len(told) < 400
        return
    ((trial, (entry,)),) = found.items()
    assert isinstance(trial, int) and hash(entry) and 0 <= entry.release.count <= 2**53
    numbers = [value for name, value in vars(entry.release.mechanism).items() if name in LINE and name != "label"]
    assert all(isinstance(value, float | str) for value in numbers)


@pytest.mark.parametrize("text", ["1e400", "-1", "true", '"x"', "[]", "{}", "null", "2.5", "1" * 400, "NaN"])
@pytest.mark.parametrize("key", ["count", "trial", "epoch", "noise_multiplier", "label", "adjacency", "mechanism"])
def test_each_value_of_a_line_has_its_type(key: str, text: str) -> None:
    """`1e400` is infinite noise, which is a number; an epoch may be null. A label may be any text."""
    allowed = {("noise_multiplier", "1e400"), ("noise_multiplier", "2.5"), ("epoch", "null"), ("label", '"x"')}
    line = json.dumps({"mechanism": "gaussian"} | LINE | {key: "HERE"}).replace('"HERE"', text)
    if (key, text) in allowed:
        assert entries_from_lines([line], "ledger")
    else:
        with pytest.raises(DataError, match=r"^ledger:1: not a ledger line: "):
            entries_from_lines([line], "ledger")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"NaN", b"[" * 100_000, b"null"])
def test_what_is_no_document_is_named(project: Path, content: bytes) -> None:
    path = result_in(project) / "result.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"result\.json: (cannot be read|not a result)"):
        store.read_document(path.parent)
