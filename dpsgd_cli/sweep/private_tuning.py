"""A private choice among the cells of a sweep: the number of runs, their cells, and the run that is published.

Random stopping: the price of the best of a random number of runs holds if that number is drawn from its law, without
looking at data, and if nobody who sees the best run knows the number. So the number comes from the operating system's
entropy, and is kept in the sweep's folder before the first run: a sweep that resumes after a kill makes the runs that
were drawn. Drawing anew because of how the first runs ended would make the number depend on data. With `select.seed` it
can be repeated, and is an experiment.

Random stopping shows the output of one run, and the price. It shows nothing about other runs, not even whether there
were any. The theorem (`pricing.py`) covers the best run's settings, weights and metrics on test records. So while a
sweep runs, everything that reveals more is in a hidden folder that only its owner may read: how often each cell runs,
results, checkpoints, failures, and the logs of a cluster. No progress is shown. When all runs are over, the best run's
recipe (as one trial) and weights go to `<sweep>.chosen`, the statement to `<sweep>.result.json`, and the hidden folder
is removed. A sweep that has published is never drawn again. A killed process leaves the hidden folder, and the same
command continues with the runs that were drawn.

Not covered: observations of the machine (time, processes, the queue of a cluster, removed files on a disk, the message
of a run that was stopped). A sweep with any seed is an experiment, and keeps everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.accounting.joint_composition import why_records_apart
from dpsgd_cli.accounting.repeated_selection import Choice
from dpsgd_cli.common.whole_files import hidden_name
from dpsgd_cli.engine import bundle
from dpsgd_cli.engine.metrics import less_is_better
from dpsgd_cli.errors import DataError, RecipeError, RunError
from dpsgd_cli.noise.settings import noise_source
from dpsgd_cli.recipe.loading import dump_recipe
from dpsgd_cli.results import book as books
from dpsgd_cli.results import files, store
from dpsgd_cli.results.evaluated import run_of
from dpsgd_cli.sweep import pricing
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import RESULT, Folder
from dpsgd_cli.sweep.settings import RandomStopping, Sweep

DRAW = ".draw.json"
CHOSEN = ".chosen"
_NOTE = (
    "How often each cell runs, drawn before the first run. Keep it secret, and keep it: to draw again after having seen"
    " a result would break what is stated about the choice."
)


def check_choice(sweep: Sweep, source: str, cells: Sequence[Cell]) -> None:
    """Raise RecipeError for a choice among these cells that has no proof."""
    select = sweep.select
    if select is not None and (apart := why_records_apart([run_of(cell.loaded) for cell in cells])) is not None:
        raise RecipeError(f"{source}: select: {select.kind} chooses among runs on the same records; {apart}")


def draw(select: RandomStopping, cells: int) -> list[int]:
    """Return how many runs each of `cells` cells makes: their total follows the law, and each run's cell is uniform.

    The geometric and logarithmic laws are truncated negative binomials with shape 1 and 0, of at least one run. A
    Poisson number may be 0.
    """
    seed = secrets.randbits(128) if select.seed is None else select.seed
    source = np.random.Generator(np.random.Philox(seed))
    gamma = math.exp(-Choice(select.mean, select.law).log_inverse_gamma) if select.law != "poisson" else 0.0
    runs = {
        "geometric": lambda: int(source.geometric(gamma)),
        "logarithmic": lambda: int(source.logseries(1 - gamma)) if gamma < 1 else 1,
        "poisson": lambda: int(source.poisson(select.mean)),
    }[select.law]()
    counts: list[int] = np.bincount(source.integers(cells, size=runs), minlength=cells).tolist()
    return counts


def read_draw(place: Folder, cells: Sequence[Cell]) -> list[int] | None:
    """Return the numbers of runs that were drawn for these cells; None if not drawn yet, DataError if damaged."""
    path = place.file(DRAW)
    if not path.exists():
        return None
    runs = files.read_json(path).get("runs")
    names = [cell.directory for cell in cells]
    if not isinstance(runs, dict) or not all(isinstance(runs.get(name), int) for name in names):
        raise DataError(
            f"{path}: does not say how often each cell of this sweep runs; restore it, or choose another --out"
        )
    return [runs[name] for name in names]


def write_draw(place: Folder, select: RandomStopping, cells: Sequence[Cell]) -> None:
    """Draw the numbers of runs and keep them, unless some are kept. Of several processes, the first draws for all."""
    counts = draw(select, len(cells))
    path = place.file(DRAW)
    runs = {cell.directory: count for cell, count in zip(cells, counts, strict=True)}
    content = files.to_json({"note": _NOTE, "law": select.law, "mean": select.mean, "runs": runs})
    with contextlib.suppress(FileExistsError):
        files.write_whole(path, content, owner_only=True, replace=False)


def repeated(cells: Sequence[Cell], counts: Sequence[int]) -> list[Cell]:
    """Return the cells with a count above 0, each with that number of trials."""
    found = []
    for cell, count in zip(cells, counts, strict=True):
        if count:
            recipe = cell.loaded.recipe.changed(repeats=count)
            found.append(dataclasses.replace(cell, loaded=dataclasses.replace(cell.loaded, recipe=recipe)))
    return found


def choose(
    sweep: Sweep, cells: Sequence[Cell], finished: Sequence[tuple[Cell, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Return the chosen trial and its settings; None without `select:` or unless all `cells` that run are `finished`.

    `finished` has the documents of the results, as they were read once for everything that is stated of them.
    """
    if sweep.select is None or len(finished) < len(cells):
        return None
    return best_of([(cell, row) for cell, document in finished for row in document["trials"]], sweep.select)


def best_of(trials: Sequence[tuple[Cell, Any]], select: RandomStopping) -> dict[str, Any]:
    """Return the best of `trials` and its settings; the first of several that are best."""
    sign = -1 if less_is_better(select.metric) else 1
    finite = [(cell, row) for cell, row in trials if row.get(select.metric) is not None]
    if not finite:
        return {"directory": None, "note": "no trial chosen: none was drawn, or none stayed finite"}
    cell, row = max(finite, key=lambda one: sign * one[1][select.metric])
    return {"directory": cell.directory, "trial": row["trial"], "settings": cell.settings}


def is_secret(sweep: Sweep, cells: Sequence[Cell]) -> bool:
    """Return True if only the best run may be seen: random stopping without any randomness from a seed."""
    select = sweep.select
    return select is not None and noise_source(select.seed, *(cell.loaded.recipe.seed for cell in cells)) == "secure"


def private_folder(public: Folder) -> Folder:
    """Return the hidden folder that holds everything until the best run is published."""
    return Folder(public.path / f".{public.stem}.private", public.stem)


def open_private(private: Folder) -> None:
    """Create the hidden folder, accessible to its owner alone."""
    private.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.chmod(private.path, 0o700)


def published(public: Folder) -> dict[str, Any] | None:
    """Return the published result, or None before there is one."""
    path = public.file(RESULT)
    return files.read_json(path) if path.exists() else None


def publish(
    public: Folder, sweep: Sweep, cells: Sequence[Cell], every: Sequence[pricing.Spent | None], book: Path | None = None
) -> dict[str, Any] | None:
    """Publish the best of the runs of `cells`, and remove all others. Returns None while some are missing.

    `every` bounds one run of each cell of the file, drawn or not. `book` was charged for the sweep. Several processes
    may publish at once: all choose the same run, and a process that finds the runs gone reads the published result.
    """
    private = private_folder(public)
    try:
        told = published(public) or _publish(public, private, sweep, cells, every, book) or published(public)
    except (OSError, DataError, RunError):
        told = published(public)
        if told is None:
            raise
    if told is not None:
        shutil.rmtree(private.path, ignore_errors=True)
    return told


def _publish(
    public: Folder,
    private: Folder,
    sweep: Sweep,
    cells: Sequence[Cell],
    every: Sequence[pricing.Spent | None],
    book: Path | None,
) -> dict[str, Any] | None:
    finished = private.finished(cells)
    best = choose(sweep, cells, finished)
    if best is None:
        return None
    charged = {} if book is None else {"book": books.named(book, public.path, public.stem)}
    if book is not None:
        books.release(book, public.path, [public.stem])
    chosen: dict[str, Any] = {"directory": None, "note": best.get("note")}
    if best["directory"] is not None:
        cell, document = next(one for one in finished if one[0].directory == best["directory"])
        chosen = _output(cell, document, best["trial"])
        chosen["directory"] = f"{public.stem}{CHOSEN}"
        _put(cell, private.path / cell.directory, best["trial"], public.path / chosen["directory"])
    privacy = pricing.statement([], sweep, every) | {"all_trials": None} | charged
    told = {"sweep": public.stem, "privacy": privacy, "chosen": chosen}
    with contextlib.suppress(FileExistsError):
        files.write_whole(public.file(RESULT), files.to_json(told), replace=False)
    return published(public)


def _output(cell: Cell, document: dict[str, Any], trial: int) -> dict[str, Any]:
    """Return the settings and test metrics of one run, and the declarations of its recipe."""
    row = next(row for row in document["trials"] if row["trial"] == trial)
    metrics = {name: value for name, value in row.items() if name.startswith("test_")}
    recipe = {key: document["privacy"][key] for key in ("declarations", "uncovered_steps")}
    return {"settings": cell.settings, "metrics": metrics, **recipe}


def _put(cell: Cell, source: Path, trial: int, place: Path) -> None:
    """Write the recipe and the weights of one trial to `place`, whole or not at all, unless another process did.

    That process may have removed the weights from `source` since.
    """
    staging = hidden_name(place)
    try:
        staging.mkdir()
        (staging / "recipe.yaml").write_text(dump_recipe(cell.loaded.recipe.changed(repeats=1)), encoding="utf-8")
        if (source / bundle.NAME).is_file():
            # each run of the sweep states its own price, and the published one was chosen
            chosen = bundle.read(source / bundle.NAME).of_trials(slice(trial, trial + 1))
            (staging / bundle.NAME).write_bytes(chosen.stating(None).to_bytes())
        store.keep([staging])
        with contextlib.suppress(FileExistsError, OSError) if place.is_dir() else contextlib.nullcontext():
            staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
