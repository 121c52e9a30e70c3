"""Runs of MLflow: everything that is public is logged, and nothing else. A stub stands for MLflow, which brings some
hundred packages along; with MLFLOW installed, `test_the_real_one` logs to a folder."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.results import store
from tests.conftest import Train, WriteRecipe

TRACKED: dict[str, Any] = {"runtime": {"device": "cpu", "threads": 1, "track": "mlflow"}}


class Stub(types.ModuleType):
    """What dpsgd calls of MLflow, writing down what it is given."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = importlib.util.spec_from_loader("mlflow", None)
        self.experiments: list[str] = []
        self.runs: list[dict[str, Any]] = []

    def set_experiment(self, name: str) -> None:
        self.experiments.append(name)

    @contextlib.contextmanager
    def start_run(self, run_name: str) -> Iterator[None]:
        self.runs.append({"name": run_name, "params": {}, "tags": {}, "metrics": {}, "artifacts": []})
        yield

    def log_params(self, params: dict[str, str]) -> None:
        self.runs[-1]["params"] |= params

    def set_tags(self, tags: dict[str, str]) -> None:
        self.runs[-1]["tags"] |= tags

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self.runs[-1]["metrics"].setdefault(name, []).append((step, value))

    def log_artifact(self, path: str) -> None:
        self.runs[-1]["artifacts"].append((Path(path).name, Path(path).read_text()))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setitem(sys.modules, "mlflow", made)
    return made


def test_a_run_for_each_trial_of_all_that_is_public(write_recipe: WriteRecipe, train: Train, stub: Stub) -> None:
    directory = train(write_recipe(**TRACKED))
    document = store.read_document(directory)
    assert stub.experiments == ["tiny"] and len(stub.runs) == len(document["trials"]) == 2
    with (directory / "history.csv").open(newline="") as file:
        history = list(csv.DictReader(file))
    for trial, run in enumerate(stub.runs):
        assert run["params"]["method.batch_size"] == "12" and run["params"]["privacy.budget.epsilon"] == "4.0"
        assert run["tags"]["dpsgd.adjacency"] == "add-remove" and run["tags"]["dpsgd.result"] == directory.name
        assert (None, document["privacy"]["epsilon"]) in run["metrics"]["epsilon"]
        told = [(step, value) for step, value in run["metrics"]["test_accuracy"] if step is not None]
        own = [row for row in history if int(row["trial"]) == trial]
        assert told == [(int(row["epoch"]), float(row["test_accuracy"])) for row in own] and len(told) == 3
        assert dict(run["artifacts"])["ledger.jsonl"] == (directory / "ledger.jsonl").read_text()


def test_nothing_that_is_marked_is_logged(write_recipe: WriteRecipe, train: Train, stub: Stub) -> None:
    """Guarantee: no name of a column, key or file marked `nonprivate_`, and no hash of the private file."""
    directory = train(write_recipe(**TRACKED))
    everything = repr(stub.runs)
    assert "nonprivate_train_loss" in (directory / "history.csv").read_text()
    assert "nonprivate" not in everything
    hashes = store.read_document(directory)["provenance"]["nonprivate_data_sha256"]
    assert hashes and not any(found in everything for found in hashes.values())


def test_without_mlflow_nothing_is_trained(
    write_recipe: WriteRecipe, train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "mlflow" else real(name, *more))
    with pytest.raises(UsageError, match=r"pip install 'dpsgd\[mlflow\]'"):
        train(write_recipe(**TRACKED))
    assert not (tmp_path / "out").exists()


def test_a_store_that_fails_leaves_the_result(
    write_recipe: WriteRecipe, train: Train, stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise ConnectionError(f"no server for {name}")

    monkeypatch.setattr(stub, "set_experiment", broken)
    with pytest.raises(RunError, match="is written, but MLflow did not take it: ConnectionError: no server"):
        train(write_recipe(**TRACKED))
    (directory,) = (tmp_path / "out").glob("tiny-*")
    assert store.is_complete(directory)
