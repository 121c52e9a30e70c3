"""Event files are read back by TensorBoard's own reader and compared with `history.csv`, cell by cell."""

from __future__ import annotations

import csv
import importlib.util
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.results import store, tensorboard
from dpsgd_cli.training import checkpoint
from tests.conftest import StopAt, Train, WriteRecipe

NAMES = ("trial", "seed", "epoch")
SHOWN = ("runtime.tensorboard=true", "runtime.checkpoint_seconds=0")


def read(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of every point of one run, as TensorBoard loads them; nothing is sampled away."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(run), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def expected(directory: Path, trial: int, epochs: int | None = None) -> dict[str, list[tuple[int, float]]]:
    points: dict[str, list[tuple[int, float]]] = {}
    with (directory / "history.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["trial"] == str(trial) and (epochs is None or int(row["epoch"]) < epochs):
                for name, cell in row.items():
                    if name not in NAMES and cell:
                        points.setdefault(name, []).append((int(row["epoch"]), float(cell)))
    return points


def same(found: dict[str, list[tuple[int, float]]], wanted: dict[str, list[tuple[int, float]]]) -> None:
    """Files hold 32-bit numbers."""
    assert found.keys() == wanted.keys()
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6), name


def live(out: Path) -> list[Path]:
    return sorted(out.glob(".*.tensorboard.writing-*"))


def test_every_column_of_the_history_is_a_curve(write_recipe: WriteRecipe, train: Train, way: dict[str, Any]) -> None:
    directory = train(write_recipe(**way), "runtime.tensorboard=true")
    for trial in range(2):
        wanted = expected(directory, trial)
        assert {"test_accuracy", "noise_multiplier", "epsilon", "nonprivate_train_loss"} <= wanted.keys()
        same(read(directory / "tensorboard" / f"trial-{trial}"), wanted)
    assert {path.name for path in directory.iterdir()} == {*store.FILES, "tensorboard"}
    assert live(directory.parent) == []


def test_without_the_key_there_is_none(write_recipe: WriteRecipe, train: Train) -> None:
    assert not (train(write_recipe()) / "tensorboard").exists()


def test_the_key_is_no_part_of_what_a_run_is(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    plain, shown = (train(write_recipe(), text, out=tmp_path / text) for text in ("seed=0", SHOWN[0]))
    assert plain.name == shown.name
    assert (plain / "history.csv").read_text() == (shown / "history.csv").read_text()


def test_curves_can_be_watched_as_far_as_the_checkpoint_goes(write_recipe: WriteRecipe, train: Train) -> None:
    """Epochs that a checkpoint holds, never others: those would be trained again with other noise."""
    recipe, seen = write_recipe(epochs=5), list[tuple[int, int, list[Any]]]()

    def look(done: int, total: int) -> None:
        out = recipe.parent / "out"
        kept = next((content["done"] for path in out.glob(".*.checkpoint") if (content := checkpoint.load(path))), 0)
        folders = live(out)
        assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)
        shown = [read(run) for folder in folders for run in sorted(folder.glob("*/*"))]
        seen.append((done, kept, shown))

    directory = train(recipe, *SHOWN, progress=look)
    assert [(done, kept, len(shown)) for done, kept, shown in seen] == [
        (1, 1, 2), (2, 2, 2), (3, 3, 2), (4, 4, 2), (5, 4, 2)
    ]  # fmt: skip
    for _, kept, shown in seen:
        for trial, found in enumerate(shown):
            same(found, expected(directory, trial, kept))


def test_nothing_is_shown_before_the_first_checkpoint(write_recipe: WriteRecipe, train: Train) -> None:
    recipe = write_recipe()
    seen: list[Path] = []
    train(recipe, SHOWN[0], progress=lambda done, total: seen.extend(live(recipe.parent / "out")))
    assert seen == []


def test_a_resumed_run_repeats_no_point(write_recipe: WriteRecipe, train: Train, stop_at: StopAt) -> None:
    recipe = write_recipe(epochs=6)
    told: list[list[int]] = []
    with pytest.raises(RunError, match="3 of 6 epochs are kept"):
        train(recipe, *SHOWN, progress=stop_at(3, KeyboardInterrupt()))
    (left,) = live(recipe.parent / "out")
    (run,) = left.glob("*/trial-0")
    assert [step for step, _ in read(run)["epsilon"]] == [0, 1, 2]

    def look(done: int, total: int) -> None:
        (folder,) = live(recipe.parent / "out")
        told.append([step for step, _ in read(next(folder.glob("*/trial-0")))["epsilon"]])

    directory = train(recipe, *SHOWN, resume=True, progress=look)
    assert told == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    for trial in range(2):
        same(read(directory / "tensorboard" / f"trial-{trial}"), expected(directory, trial))
    assert live(directory.parent) == []


def test_a_stopped_run_shows_what_its_last_checkpoint_holds_once(
    write_recipe: WriteRecipe, train: Train, stop_at: StopAt
) -> None:
    """The checkpoint that is written on the way out is the first here, and then its epochs may be seen."""
    recipe = write_recipe(epochs=6)
    with pytest.raises(RunError, match="4 of 6 epochs are kept"):
        train(recipe, SHOWN[0], progress=stop_at(4, KeyboardInterrupt()))
    (left,) = live(recipe.parent / "out")
    assert [[step for step, _ in read(run)["epsilon"]] for run in left.glob("*/*")] == [[0, 1, 2, 3]] * 2


def test_a_new_run_says_that_what_was_seen_is_not_its_own(
    write_recipe: WriteRecipe, train: Train, stop_at: StopAt
) -> None:
    recipe = write_recipe()
    told: list[str] = []
    with pytest.raises(RunError):
        train(recipe, *SHOWN, progress=stop_at(2, KeyboardInterrupt()))
    directory = train(recipe, *SHOWN, say=told.append)
    assert any("this run's epsilon does not cover it" in text for text in told)
    assert live(directory.parent) == []


def test_another_process_keeps_what_it_shows(write_recipe: WriteRecipe, train: Train) -> None:
    """Its folder's name says that it lives: process 1 always does."""
    recipe = write_recipe()
    out = recipe.parent / "out"
    directory = train(recipe, *SHOWN)
    mine = tensorboard.live_folder(checkpoint.place(directory))
    other = mine.with_name(mine.name.replace(f"_{os.getpid()}_", "_1_"))
    dead = mine.with_name(mine.name.replace(f"_{os.getpid()}_", "_4194305_"))
    for folder in (mine, other, dead):
        folder.mkdir()
    assert tensorboard.remove_live(checkpoint.place(directory))
    assert live(out) == [other]
    assert not tensorboard.remove_live(checkpoint.place(directory))


def test_many_trials_are_cut_and_told(write_recipe: WriteRecipe, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "MOST_RUNS", 3)
    told: list[str] = []
    directory = train(write_recipe(repeats=5), *SHOWN, say=told.append)
    assert sorted(path.name for path in (directory / "tensorboard").iterdir()) == ["trial-0", "trial-1", "trial-2"]
    assert "tensorboard shows trials 0 to 2 of 5; history.csv has all of them" in told


def test_a_full_disk_leaves_no_half_written_result(
    write_recipe: WriteRecipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "trial-0")

    recipe = write_recipe()
    monkeypatch.setattr(tensorboard, "write", full)
    with pytest.raises(RunError, match="No space left on device"):
        train(recipe, *SHOWN)
    assert [path.name for path in (recipe.parent / "out").iterdir() if path.name[0] != "."] == []
    assert list((recipe.parent / "out").glob(".*.writing-*")) == live(recipe.parent / "out")


def test_without_tensorboard_the_extra_is_named_before_anything_is_done(
    write_recipe: WriteRecipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    recipe = write_recipe()
    with pytest.raises(UsageError, match=r"pip install 'dpsgd\[tensorboard\]'"):
        train(recipe, SHOWN[0])
    assert not (recipe.parent / "out").exists()
