"""What random stopping shows: the output of one run, and the price; nothing of others, nor that there were any.

The theorem (`pricing.py`) covers the best run's settings, weights and metrics on test records. So while a sweep goes
on, everything that tells more lies in a hidden folder that only its owner may read: how often each cell runs, results,
checkpoints, failures, the logs of a cluster; and no progress is shown. When all runs are over, the best one's recipe
(as one trial) and weights go to `<sweep>.chosen`, the statement to `<sweep>.result.json`, and the hidden folder is
removed. A sweep that has published is never drawn again. A process that is killed leaves the hidden folder, and the
same command goes on with the runs that were drawn.

Not covered: what a watcher of the machine sees (time, processes, the queue of a cluster, removed files on a disk, the
message of a run that was stopped).
A sweep that a seed takes part in is an experiment, and keeps everything (`report.py`).
Not here: which run is the best (`choosing.py`), what it costs (`pricing.py`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.loading import dump_recipe
from dpsgd_cli.recipe.schema.privacy import noise_source
from dpsgd_cli.results import store
from dpsgd_cli.results.leftovers import hidden_name
from dpsgd_cli.sweep import choosing, pricing
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import Folder
from dpsgd_cli.sweep.schema import RandomStopping, Sweep

RESULT = ".result.json"
CHOSEN = ".chosen"
MODEL = "model.safetensors"


def is_secret(sweep: Sweep, cells: Sequence[Cell]) -> bool:
    """Whether only the best run may be seen: random stopping in which nothing comes from a seed."""
    select = sweep.select
    if not isinstance(select, RandomStopping):
        return False
    return noise_source(select.seed, *(cell.loaded.recipe.seed for cell in cells)) == "secure"


def private_folder(public: Folder) -> Folder:
    """Where everything lies until the best is published."""
    return Folder(public.path / f".{public.stem}.private", public.stem)


def open_private(private: Folder) -> None:
    """Make the hidden folder, for its owner alone."""
    private.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(private.path, 0o700)


def read(public: Folder) -> dict[str, Any] | None:
    """What was published; None before."""
    path = public.file(RESULT)
    return store.read_json(path) if path.exists() else None


def publish(
    public: Folder, sweep: Sweep, cells: Sequence[Cell], every: Sequence[pricing.Spent | None]
) -> dict[str, Any] | None:
    """Publish the best of the runs of `cells`, and remove all others; None while some are missing.

    `every` has what bounds one run of each cell of the file, drawn or not. Several processes may do so at once: all
    choose the same, and one that finds the runs gone reads what was published.
    """
    private = private_folder(public)
    try:
        told = read(public) or _published(public, private, sweep, cells, every) or read(public)
    except (OSError, DataError):
        told = read(public)
        if told is None:
            raise
    if told is not None:
        shutil.rmtree(private.path, ignore_errors=True)
    return told


def _published(
    public: Folder, private: Folder, sweep: Sweep, cells: Sequence[Cell], every: Sequence[pricing.Spent | None]
) -> dict[str, Any] | None:
    best = choosing.choose(sweep, private, cells, lambda cell: 0)
    if best is None:
        return None
    chosen: dict[str, Any] = {"directory": None, "note": best.get("note")}
    if best["directory"] is not None:
        cell = next(cell for cell in cells if cell.directory == best["directory"])
        chosen = _output(cell, store.read_document(private.path / cell.directory), best["trial"])
        chosen["directory"] = f"{public.stem}{CHOSEN}"
        _put(cell, private.path / cell.directory, best["trial"], public.path / chosen["directory"])
    privacy = pricing.statement([], sweep, every) | {"all_trials": None}
    told = {"sweep": public.stem, "privacy": privacy, "chosen": chosen}
    store.write_whole(public.file(RESULT), store.to_json(told))
    return told


def _output(cell: Cell, document: dict[str, Any], trial: int) -> dict[str, Any]:
    """What one run says of itself, and of its recipe."""
    row = next(row for row in document["trials"] if row["trial"] == trial)
    metrics = {name: value for name, value in row.items() if name.startswith("test_")}
    recipe = {key: document["privacy"][key] for key in ("declarations", "uncovered_steps")}
    return {"settings": cell.settings, "metrics": metrics, **recipe}


def _put(cell: Cell, source: Path, trial: int, place: Path) -> None:
    """The recipe and the weights of one trial, whole or not at all."""
    staging = hidden_name(place)
    try:
        staging.mkdir()
        recipe = cell.loaded.recipe.model_copy(update={"repeats": 1})
        (staging / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        if (source / MODEL).is_file():
            (staging / MODEL).write_bytes(_weights(source / MODEL, trial))
        store.keep([staging])
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _weights(path: Path, trial: int) -> bytes:
    """The tensors of one trial, named as those of a result that has no other."""
    from safetensors.torch import load_file, save

    prefix, tensors = f"trial-{trial}/", load_file(path)
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    return save(own or tensors)
