"""Trials that start, stop and continue: nothing is lost, nothing is released twice, nothing foreign is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import entries_from_lines
from dpsgd_cli.errors import RunError
from dpsgd_cli.training import checkpoint, start
from tests.conftest import OWN, PCA, Replaced, StopAt, Train, WriteRecipe


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
