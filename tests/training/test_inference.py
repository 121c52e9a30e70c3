"""Trained models in use: what they predict is what was measured of them, by what their file says and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from dpsgd_cli.errors import DataError, RunError, UsageError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training.auto_rule import FEATURES
from dpsgd_cli.training.auto_rule import PRECONDITIONED as TABLES
from dpsgd_cli.training.evaluation import LEAST_CLIPPED, residual_clip
from dpsgd_cli.training.inference import Trained
from tests.conftest import OWN, PCA, WriteRecipe

Train = Callable[..., Path]

MOMENTS: dict[str, Any] = {"preconditioner": {"kind": "second-moment", "share": 0.3}, "learning_rate": 2.0}
PRECONDITIONED: dict[str, Any] = {"method": {"kind": "dp-gd", **MOMENTS}}
BATCHES: dict[str, Any] = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 12, **MOMENTS}
LEAST_SQUARES: dict[str, Any] = {"method": {"kind": "dp-least-squares"}, "epochs": None}

KINDS: dict[str, dict[str, Any]] = {
    "scaled": {},
    "projected": {"data": OWN | {"preprocess": PCA}},
    "fitted": {"data": OWN | {"preprocess": [{"scale": {"by": "standard"}}]}},
    "fitted-projection": {"data": OWN | {"preprocess": [*PCA, {"scale": {"by": "min-max"}}]}},
    "public-projection": {"data": OWN | {"preprocess": [{"pca": {"components": 2, "public": True}}]}},
    "folds": {"folds": 3, "repeats": 1},
    "preconditioned": PRECONDITIONED,
    "preconditioned-batches": PRECONDITIONED | {"method": BATCHES},
    "preconditioned-projection": PRECONDITIONED | {"data": OWN | {"preprocess": PCA}, "method": BATCHES},
    "preconditioned-folds": PRECONDITIONED | {"folds": 3, "repeats": 1},
    "least-squares": LEAST_SQUARES,
    "least-squares-folds": LEAST_SQUARES | {"folds": 3, "repeats": 1},
    "double": {"runtime": {"device": "cpu", "dtype": "float64"}},
}


KEPT: dict[str, list[str]] = {
    "scaled": [],
    "projected": ["preprocess/0/1", "preprocess/1/1"],
    "fitted": ["nonprivate_preprocess/0"],
    "fitted-projection": [f"{m}preprocess/{t}/{s}" for m, s in (("nonprivate_", 2), ("", 1)) for t in (0, 1)],
    "public-projection": ["preprocess/0"],
}
"""What of preprocessing is kept beside the weights."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_read_back_is_worth_what_its_result_says(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path, kind: str
) -> None:
    """Guarantee: no array computed from training rows without noise is in the file under another name."""
    directory = train(write_recipe(**KINDS[kind]), save_models=True)
    rows = store.read_document(directory)["trials"]
    trained = Trained.load(directory)
    with safe_open(directory / "model.safetensors", "np") as file:
        kept = [name for name in file.keys() if "preprocess/" in name]  # noqa: SIM118
    assert kind not in KEPT or sorted(kept) == KEPT[kind]
    document = store.read_whole(directory)
    secret = kind in ("fitted", "fitted-projection")
    assert ("model.safetensors" in document["nonprivate_files"]) == secret
    assert ("model.safetensors" in document["files"]) == (not secret)
    for name, found in trained.metrics().items():
        assert found == [row[f"test_{name}"] for row in rows]
    if "folds" not in KINDS[kind]:
        held = np.load(tmp_path / "tiny.npz")
        for trial, row in enumerate(rows):
            right = trained.predict(trained.source.rows(held["x_test"]), trial) == held["y_test"]
            assert right.mean() == row["test_accuracy"]


@pytest.mark.parametrize("transform", [None, "log"])
def test_targets_are_predicted_and_judged_in_their_own_unit(
    transform: str | None, write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    """Also on a log scale, and within their bounds."""
    ages = np.random.default_rng(0).uniform(0, 1, 80)
    pd.DataFrame({"a": ages, "y": 100 + 200 * ages}).to_csv(tmp_path / "line.csv", index=False)
    settings: dict[str, Any] = {"path": "line.csv", "target": "y", "task": "regression", "target_bounds": [100, 250]}
    settings |= {"target_transform": transform}
    directory = train(write_recipe(data=settings | {"bounds": {"a": [0, 1]}}), save_models=True)
    trained, document = Trained.load(directory), store.read_document(directory)
    again = trained.metrics()
    assert set(again) == {"mae", "rmse", "r2", "loss"}
    for name, found in again.items():
        assert found == [row[f"test_{name}"] for row in document["trials"]]
    middle, *ends = trained.decided(np.array([[0.5], [9.0], [-9.0]])).tolist()
    assert ends == [250, 100] and (middle == 212.5 if transform is None else 100 < middle < 212.5)
    everything = trained.metrics(tmp_path / "line.csv")
    for trial in range(trained.trials):
        predictions = trained.predict(trained.source.rows(tmp_path / "line.csv"), trial)
        assert ((predictions >= 100) & (predictions <= 250)).all()
        errors = np.abs(predictions - (100 + 200 * ages))
        assert everything["mae"][trial] == pytest.approx(errors.mean(), rel=1e-4)
        assert everything["rmse"][trial] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-4)


def test_model_and_recipe_are_all_that_is_needed(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    directory = train(write_recipe(data=OWN | {"preprocess": PCA}), save_models=True)
    x = np.load(tmp_path / "tiny.npz")["x_test"]
    before = Trained.load(directory)
    alone = tmp_path / "elsewhere" / "alone"
    alone.mkdir(parents=True)
    for name in ("model.safetensors", "recipe.yaml"):
        shutil.copy(directory / name, alone)
    shutil.rmtree(directory)
    (tmp_path / "tiny.npz").unlink()
    after = Trained.load(alone)
    for trial in range(2):
        assert np.array_equal(before.outputs(before.source.rows(x), trial), after.outputs(after.source.rows(x), trial))


def test_outputs_are_those_of_the_preprocessed_rows_times_the_weights(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    steps = [{"scale": {"to": [-1, 1]}}, {"bias": {"value": 2}}]
    directory = train(write_recipe(data=OWN | {"preprocess": steps}), save_models=True)
    x = np.load(tmp_path / "tiny.npz")["x_test"].astype(np.float32)
    by_hand = np.hstack([2 * np.clip(x, 0, 1) - 1, np.full((len(x), 1), 2, np.float32)])
    trained = Trained.load(directory)
    with safe_open(directory / "model.safetensors", "np") as file:
        for trial in range(2):
            weight, bias = (file.get_tensor(f"trial-{trial}/1.{name}") for name in ("weight", "bias"))
            outputs = by_hand @ weight.T + bias
            assert trained.outputs(trained.source.rows(x), trial) == pytest.approx(outputs, abs=1e-5)
            shares = np.exp(outputs.astype(float))
            assert trained.probabilities(outputs) == pytest.approx(shares / shares.sum(axis=1, keepdims=True))
            module = trained.module(trial)
            assert type(module) is torch.nn.Sequential
            assert module(torch.from_numpy(by_hand)).detach().numpy() == pytest.approx(outputs, abs=1e-5)


TABLE = {
    "path": "own.csv",
    "target": "y",
    "classes": ["no", "yes"],
    "categorical": {"job": ["smith", "nurse"]},
    "bounds": {"age": [0, 100]},
    "split": {"test": 6},
}


@pytest.fixture
def table(tmp_path: Path) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 100, 30), "job": rng.choice(["smith", "nurse"], 30)})
    frame["y"] = np.where(frame["age"] > 50, "yes", "no")
    frame.to_csv(tmp_path / "own.csv", index=False)
    return frame


def test_tables_keep_their_words(write_recipe: WriteRecipe, train: Train, table: pd.DataFrame, tmp_path: Path) -> None:
    directory = train(
        write_recipe(
            data=TABLE, epochs=20, privacy=None, method={"kind": "sgd", "batching": "full", "learning_rate": 20}
        ),
        save_models=True,
    )
    trained = Trained.load(directory)
    rows = trained.source.rows(table[["job", "age"]])
    right = trained.predict(rows, 0) == table["y"]
    assert right.mean() > 0.8
    assert trained.metrics(table)["accuracy"][0] == right.mean()
    table["age"] += 75
    above = int((table["age"] > 100).sum())
    assert trained.remarks(trained.source.rows(table)) == [
        f"{above} values of 'age' outside of its bounds 0 to 100: clamped to the nearer bound, as in training"
    ]
    capped = table.assign(age=table["age"].clip(0, 100))
    assert np.array_equal(
        trained.outputs(trained.source.rows(table), 0), trained.outputs(trained.source.rows(capped), 0)
    )
    with pytest.raises(DataError, match="'job': 30 cells, first in data row 1, not among"):
        trained.source.rows(table.assign(job="pilot"))


def test_two_classes_by_one_output(write_recipe: WriteRecipe, train: Train, table: pd.DataFrame) -> None:
    sections: dict[str, Any] = {
        "data": TABLE,
        "method": {"kind": "gd", "learning_rate": 1},
        "privacy": None,
        "epochs": 50,
    }
    directory = train(write_recipe(**sections, model={"kind": "convex", "loss": "logistic"}), save_models=True)
    trained = Trained.load(directory)
    outputs = trained.outputs(trained.source.rows(table), 0)
    assert outputs.shape == (30, 1)
    positive = 1 / (1 + np.exp(-outputs[:, 0].astype(float)))
    assert trained.probabilities(outputs)[:, 1] == pytest.approx(positive)
    assert trained.decided(outputs).tolist() == np.where(positive > 0.5, "yes", "no").tolist()
    hinge = train(write_recipe(**sections, model={"kind": "convex", "loss": "hinge"}), save_models=True)
    with pytest.raises(UsageError, match="loss hinge are margins and no probabilities"):
        Trained.load(hinge).probabilities(outputs)


@pytest.mark.parametrize(
    ("norm", "model"),
    [
        (0.5, {"kind": "convex", "bias": False}),
        (0.7, {"kind": "convex", "bias": True}),
        (9, {"kind": "convex", "bias": False}),
        (0.7, {"kind": "linear", "bias": False}),
    ],
)
def test_probabilities_are_shares_of_records_however_residuals_were_clipped(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path, norm: float, model: dict[str, Any]
) -> None:
    """Of three kinds of records, whose shares training finds where rows are of one length; and log loss is of these."""
    shares = {"a": 0.1, "b": 0.25, "c": 0.9}
    kinds = np.repeat(list(shares), 1000)
    frame = pd.DataFrame({"kind": kinds, "y": np.concatenate([np.arange(1000) < 1000 * s for s in shares.values()])})
    frame["y"] = np.where(frame["y"], "yes", "no")
    frame.to_csv(tmp_path / "own.csv", index=False)
    known = {"path": "own.csv", "test_path": "own.csv", "target": "y", "classes": ["no", "yes"]}
    directory = train(
        write_recipe(
            data={**known, "categorical": {"kind": list(shares)}, "preprocess": [{"one-hot": {}}]},
            model=model,
            method={"kind": "dp-gd", "learning_rate": 8, "preconditioner": {"kind": "second-moment", "share": 0.1}},
            privacy={
                "clipping": {"kind": "flat", "norm": norm},
                "schedule": {"kind": "uniform", "initial": "auto"},
                "budget": {"epsilon": 1e5, "delta": 1e-5},
            },
            epochs=300,
        ),
        save_models=True,
    )
    trained, asked = Trained.load(directory), pd.DataFrame({"kind": list(shares)})
    found = trained.probabilities(trained.outputs(trained.source.rows(asked), 0))
    assert found[:, 1] == pytest.approx(list(shares.values()), abs=0.02)
    own = np.array(list(shares.values()))
    entropy = -(own * np.log(own) + (1 - own) * np.log(1 - own)).mean()
    assert store.read_document(directory)["trials"][0]["test_log_loss"] == pytest.approx(entropy, abs=0.002)


def test_residuals_that_hardly_count_say_nothing_of_probabilities(write_recipe: WriteRecipe) -> None:
    """Nor do those of rows that differ in length."""

    def clipped(norm: float, classes: int = 2, **changes: Any) -> float | None:
        moments = PRECONDITIONED | {"model": {"kind": "linear", "bias": False}} | changes
        recipe = load_recipe(str(write_recipe(**moments)), [f"privacy.clipping={{kind: flat, norm: {norm}}}"]).recipe
        return residual_clip(recipe, classes)

    assert clipped(0.7) == pytest.approx(0.7 / np.sqrt(2))
    assert clipped(0.7, model={"kind": "linear", "bias": True}) == np.inf == clipped(0.1)
    assert clipped(0.7, 3) == clipped(0.7)
    assert clipped(1, model={"kind": "linear", "bias": True}) == pytest.approx(0.5)
    assert clipped(0.7, method={"kind": "dp-gd", "learning_rate": 1}) == np.inf


def test_what_hardly_counts_is_between_what_the_rule_clips_at_on_tables_and_on_images() -> None:
    assert FEATURES.clips[1] < LEAST_CLIPPED < TABLES.clips[0]


def test_a_model_of_other_code_or_a_changed_file_is_refused(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    code = "from torch import nn\ndef build(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    (tmp_path / "net.py").write_text(code)
    directory = train(write_recipe(model={"kind": "python", "file": "net.py"}), save_models=True)
    assert Trained.load(directory).trials == 2
    (tmp_path / "net.py").write_text(code + "\n")
    with pytest.raises(RunError, match="was trained with another content of net"):
        Trained.load(directory)
    (tmp_path / "net.py").write_text(code)
    with pytest.raises(UsageError, match="there is no trial 2: the result has 2 trials"):
        Trained.load(directory).module(2)
    (directory / "model.safetensors").write_bytes(b"0")
    with pytest.raises(DataError, match="was changed after the result was written"):
        Trained.load(directory)


def test_a_result_without_a_model_says_how_to_get_one(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    directory = train(write_recipe())
    with pytest.raises(DataError, match="so nothing can be predicted"):
        Trained.load(directory)
    with pytest.raises(DataError, match="not a result directory"):
        Trained.load(tmp_path)
