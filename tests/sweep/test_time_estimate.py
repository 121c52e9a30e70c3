"""The estimate of a dry run: from the method's own steps and evaluation, on rows of chance, for every way to train."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dpsgd_cli import data
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.sweep import time_estimate
from dpsgd_cli.sweep.expansion import cell_of
from dpsgd_cli.sweep.planning import Planned, Planner
from dpsgd_cli.sweep.time_estimate import Pace, Rehearsals
from dpsgd_cli.training.start import Trials
from tests.conftest import GRADIENT, OWN, WAYS, WriteRecipe

ADAPTIVE = ("shuffle-validation", "private-selection")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is not looked at here, so little of it is enough; and nobody may read data."""
    monkeypatch.setattr(time_estimate, "_SECONDS", 1e-9)
    monkeypatch.setattr(time_estimate, "_PATIENCE", 1e-9)

    def refuse(*_: Any) -> None:
        raise AssertionError("a dry run read data")

    monkeypatch.setattr(data, "prepare", refuse)


def planned(write_recipe: WriteRecipe, *overrides: str, **sections: Any) -> Planned:
    found = Planner().plan(cell_of(0, load_recipe(str(write_recipe(**sections)), overrides), {}))
    assert found.error is None
    return found


def seconds(one: Planned, rehearsals: Rehearsals | None = None) -> float | None:
    return (rehearsals or Rehearsals()).seconds([one])


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ADAPTIVE])
def test_every_way_to_train_can_be_rehearsed(write_recipe: WriteRecipe, name: str) -> None:
    found = seconds(planned(write_recipe, **WAYS[name]))
    assert found is not None and 0 < found < math.inf


@pytest.mark.parametrize(
    "sections",
    [
        {"folds": 3},
        {"folds": 3, "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1}},
        {"data": {"name": "breast-cancer", "preprocess": [{"unit-norm": {}}]},
         "model": {"kind": "convex", "loss": "logistic"},
         "method": {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1, "learning_rate": 0.1},
         "privacy": {"delta": 1e-3, "schedule": {"kind": "uniform", "initial": 4}}},
        {"method": GRADIENT | {"kind": "sgd", "batching": "shuffle"}, "privacy": None},
        {"data": OWN | {"classes": [0, 1, 2]}, "seed": None},
    ],
)  # fmt: skip
def test_folds_single_records_plain_and_secure_training_too(write_recipe: WriteRecipe, sections: Any) -> None:
    found = seconds(planned(write_recipe, **sections))
    assert found is not None and 0 < found < math.inf


@pytest.mark.parametrize("name", ADAPTIVE)
def test_where_only_the_run_tells_there_is_no_estimate(write_recipe: WriteRecipe, name: str) -> None:
    assert seconds(planned(write_recipe, **WAYS[name])) is None


def test_steps_and_evaluations_are_what_the_run_has(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 rows in batches of 12 are 4 steps an epoch; 12 test rows at every second epoch, and the training rows last."""
    monkeypatch.setattr(time_estimate, "_pace", lambda *_: Pace(step=1.0, row=1e-3))
    found = seconds(planned(write_recipe, "epochs=5", "runtime.evaluate_every=2"))
    assert found == pytest.approx(5 * 4 * 1.0 + (3 * 12 + 48) * 1e-3)


def test_the_longest_cell_decides(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_estimate, "_pace", lambda *_: Pace(step=1.0, row=0.0))
    cells = [planned(write_recipe, f"epochs={epochs}") for epochs in (3, 4)]
    assert Rehearsals().seconds(cells) == 4 * 4


def test_packs_alike_are_rehearsed_once(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pace(one: Planned, outline: data.Outline, trials: int) -> Pace:
        asked.append(trials)
        return Pace(1.0, 0.0)

    monkeypatch.setattr(time_estimate, "_pace", pace)
    rehearsals = Rehearsals()
    for rate, repeats in ((1, 2), (2, 2), (1, 3)):
        seconds(planned(write_recipe, f"method.learning_rate={rate}", f"repeats={repeats}"), rehearsals)
    assert asked == [2, 3]


def test_of_a_large_data_set_only_a_part_is_made_up(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 48 rows of 4 numbers: a full-batch step is taken to cost three times what theirs does."""
    monkeypatch.setattr(time_estimate, "_NUMBERS", 64)
    full = planned(write_recipe, "epochs=1", method={"kind": "dp-sgd", "batching": "full", "learning_rate": 1})
    asked: list[int] = []

    def timed(trials: Trials, done: int = 0) -> Pace:
        asked.append(len(trials.context.table))
        return Pace(1.0, 0.0)

    monkeypatch.setattr(time_estimate, "_timed", timed)
    assert (seconds(full), asked) == (3.0, [16])
