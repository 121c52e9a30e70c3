"""Trials that start, stop and continue: nothing is lost, nothing is released twice, nothing foreign is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import entries_from_lines
from dpsgd_cli.errors import RunError
from dpsgd_cli.results import store
from dpsgd_cli.training import checkpoint, start
from tests.conftest import GRADIENT, OWN, PCA, Replaced, StopAt, Train, WriteRecipe, left_in


@pytest.mark.parametrize("seconds", [0, 1000])
def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, way: dict[str, Any], seconds: int, stop_at: StopAt
) -> None:
    """Interrupted in its second epoch, with checkpoints at every epoch or at the interruption only."""
    recipe = write_recipe(**way, save_model=True)
    whole = train(recipe, out=tmp_path / "whole")
    overrides = [f"runtime.checkpoint_seconds={seconds}"]
    with pytest.raises(RunError, match=r"interrupted; 2 of \d+ epochs are kept: the same command with --resume"):
        train(recipe, *overrides, progress=stop_at(2, KeyboardInterrupt()))
    said: list[str] = []
    assert left_in(tmp_path / "out") == {".tiny-"}
    continued = train(recipe, *overrides, resume=True, say=said.append)
    assert any(text.startswith("Continuing after epoch 2 of") for text in said)
    for name in ("trials.csv", "history.csv", "ledger.jsonl", "model.safetensors"):
        assert (continued / name).read_bytes() == (whole / name).read_bytes()
    assert store.read_document(continued)["privacy"] == store.read_document(whole)["privacy"]
    assert left_in(tmp_path / "out") == {"tiny"}


CANCER: dict[str, Any] = {"data": {"name": "breast-cancer"}, "model": {"kind": "convex"}}
SPENT: dict[str, Any] = {"privacy": {"budget": {"rho": 0.5}, "delta": 1e-3}, "epochs": None}
FOLDS: dict[str, Any] = {"folds": 3, "repeats": 1}
SIDE_BY_SIDE: dict[str, dict[str, Any]] = {
    "dp-agd": CANCER | SPENT | {"method": {"kind": "dp-agd", "refresh": 2}, "repeats": 3},
    "dp-agd, folds": CANCER | SPENT | FOLDS | {"method": {"kind": "dp-agd", "refresh": 2}},
    "dp-agd, momentum": CANCER | SPENT | FOLDS | {"method": {"kind": "dp-agd", "refresh": 2, "momentum": 0.5}},
    "dp-agd, network": SPENT | {"method": {"kind": "dp-agd", "refresh": 20}},
    "dp-gd": CANCER | FOLDS | {"method": {"kind": "dp-gd"}},
    "dp-gd, tail": CANCER | FOLDS | {
        "method": {"kind": "dp-gd", "learning_rate": 4, "averaging": {"kind": "tail"},
                   "preconditioner": {"kind": "second-moment"}},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}},
    },
    "sgd-ma": CANCER | FOLDS | {"method": {"kind": "dp-sgd", "batch_size": 50},
                                "privacy": {"budget": {"epsilon": 2, "delta": 1e-3}, "accountant": "rdp-markov"}},
    "gd": CANCER | FOLDS | {"method": {"kind": "gd"}, "privacy": None},
    "sgd": FOLDS | {"method": {"kind": "sgd", "batch_size": 12, "learning_rate": 0.1}, "privacy": None},
    "poisson": FOLDS,
    "shuffle": FOLDS | {"method": GRADIENT | {"batching": "shuffle"},
                        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}}},
}  # fmt: skip


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_trials_and_folds_that_were_stopped_are_those_that_were_not(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt, name: str
) -> None:
    """DP-AGD once carried margins along that a resumed run computed anew: other roundings, and soon other choices."""
    recipe = write_recipe(**SIDE_BY_SIDE[name], save_model=True)
    whole = train(recipe, out=tmp_path / "whole")
    with pytest.raises(RunError, match=r"interrupted; 1 of"):
        train(recipe, progress=stop_at(1, KeyboardInterrupt()))
    with pytest.raises(RunError, match=r"interrupted; 2 of"):
        train(recipe, resume=True, progress=stop_at(2, KeyboardInterrupt()))
    continued = train(recipe, resume=True)
    for file in ("trials.csv", "history.csv", "ledger.jsonl", "model.safetensors"):
        assert (continued / file).read_bytes() == (whole / file).read_bytes()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[data.Dataset]:
    """Every data set that runs prepare."""
    seen = []

    def prepare(*args: Any) -> data.Dataset:
        seen.append(data.prepare(*args))
        return seen[-1]

    monkeypatch.setattr(start, "data", Replaced(data, prepare=prepare))
    return seen


def test_secure_private_preprocessing_is_released_once_and_used_again(
    train: Train, write_recipe: WriteRecipe, prepared: list[data.Dataset], stop_at: StopAt
) -> None:
    """A resumed run trains on the features that its weights were trained on; a new run draws new ones."""
    recipe = write_recipe(data=OWN | {"preprocess": PCA}, seed=None)
    with pytest.raises(RunError, match="1 of 3"):
        train(recipe, progress=stop_at(1, KeyboardInterrupt()))
    directory = train(recipe, resume=True)
    first, second = prepared
    np.testing.assert_array_equal(first.train_x, second.train_x)
    np.testing.assert_array_equal(first.test_x, second.test_x)
    for entries in entries_from_lines((directory / "ledger.jsonl").open(), "ledger").values():
        assert [entry.phase for entry in entries] == ["before", "train", "train", "train"]
    train(recipe, "name=anew")
    assert not np.allclose(prepared[2].train_x, first.train_x)


def test_secure_runs_continue_from_their_weights(train: Train, write_recipe: WriteRecipe, stop_at: StopAt) -> None:
    """With a step length of almost nothing the published weights are those that the stopped run was started with."""
    method = GRADIENT | {"batching": "poisson", "learning_rate": 1e-12}
    recipe = write_recipe(seed=None, method=method, model={"kind": "mlp", "hidden": [3]}, save_model=True)
    with pytest.raises(RunError, match="1 of 3"):
        train(recipe, progress=stop_at(1, KeyboardInterrupt()))
    (saved,) = (recipe.parent / "out").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    weights = read_model(train(recipe, resume=True))
    flat = torch.cat([weights[name].flatten() for name in weights if name.startswith("trial-1/")])
    assert sorted(flat.tolist()) == pytest.approx(sorted(content["method"]["values"][1].tolist()), abs=1e-6)
    other = read_model(train(recipe, "name=anew"))
    assert not torch.allclose(weights["trial-0/1.weight"], other["trial-0/1.weight"])


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(str(directory / "model.safetensors"))
    return found


def test_a_checkpoint_that_does_not_fit_is_refused(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    recipe = write_recipe()
    with pytest.raises(RunError, match="kept"):
        train(recipe, progress=stop_at(1, KeyboardInterrupt()))
    stored = dict(np.load(tmp_path / "tiny.npz"))
    np.savez(tmp_path / "tiny.npz", **{**stored, "x": stored["x"] * 0.5})
    with pytest.raises(RunError, match="belongs to another recipe, other data or other code; remove it"):
        train(recipe, resume=True)


def resealed(saved: Path, **changes: Any) -> None:
    """Edit a checkpoint with care: its sum is made anew."""
    content = checkpoint.load(saved)
    assert content is not None
    checkpoint.save(saved, content | changes)


CHARGES: dict[str, Callable[[list[list[str]]], list[list[str]]]] = {
    "emptied": lambda ledgers: [[] for _ in ledgers],
    "one emptied": lambda ledgers: [ledgers[0], []],
    "last line gone": lambda ledgers: [ledgers[0], ledgers[1][:-1]],
    "cheaper": lambda ledgers: [[line.replace('"count": 4', '"count": 1') for line in own[:-1]] for own in ledgers],
}


def test_what_was_done_and_what_was_charged_must_agree(
    train: Train, write_recipe: WriteRecipe, way: dict[str, Any], stop_at: StopAt
) -> None:
    """An emptied ledger once lowered a result's epsilon from 332.5 to 314.0. Charges of preprocessing stay here."""
    recipe = write_recipe(**way)
    with pytest.raises(RunError, match="2 of"):
        train(recipe, progress=stop_at(2, KeyboardInterrupt()))
    (saved,) = (recipe.parent / "out").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    before = [[line for line in own if '"phase": "before"' in line] for own in content["ledgers"]]
    trained = [[line for line in own if '"phase": "before"' not in line] for own in content["ledgers"]]
    for change in CHARGES.values():
        fewer = [first + rest for first, rest in zip(before, change(trained), strict=True)]
        checkpoint.save(saved, content | {"ledgers": fewer})
        with pytest.raises(RunError, match=r"2 finished epochs were not charged as they are.*train again"):
            train(recipe, resume=True)


def test_dp_agd_must_have_charged_what_it_spent(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    stored = dict(np.load(tmp_path / "tiny.npz"))
    two = {key: value % 2 if key.startswith("y") else value for key, value in stored.items()}
    np.savez(tmp_path / "two.npz", **two)
    recipe = write_recipe(
        data=OWN | {"path": "two.npz", "classes": [0, 1]},
        model={"kind": "convex"},
        method={"kind": "dp-agd", "refresh": 1, "splits": 5},
        privacy={"budget": {"epsilon": 1, "delta": 1e-3}},
        epochs=None,
    )
    with pytest.raises(RunError, match="2 of"):
        train(recipe, progress=stop_at(2, KeyboardInterrupt()))
    (saved,) = (tmp_path / "out").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    one, other = content["ledgers"]
    tampered: list[list[list[str]]] = [[[], []], [one, other[:-1]]]
    for fewer in tampered:
        resealed(saved, ledgers=fewer)
        with pytest.raises(RunError, match="2 finished epochs were not charged as they are"):
            train(recipe, resume=True)
    resealed(saved, ledgers=content["ledgers"])
    train(recipe, resume=True)


def test_epochs_that_were_not_trained_are_not_done(train: Train, write_recipe: WriteRecipe, stop_at: StopAt) -> None:
    recipe = write_recipe()
    with pytest.raises(RunError, match="kept"):
        train(recipe, progress=stop_at(2, KeyboardInterrupt()))
    (saved,) = (recipe.parent / "out").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    for done in (1, 3):
        resealed(saved, done=done, history=(content["history"] * 2)[:done])
        with pytest.raises(RunError, match=f"its {done} finished epochs were not charged as they are"):
            train(recipe, resume=True)
