"""A private choice among the cells of a sweep: how many runs there are, of which cells, and which one is published.

random stopping The price of the best of a random number of runs holds if that number is drawn from its law, without
                looking at data, and nobody knows it who sees the best. So it comes from the operating system, and it is
                kept in the sweep's folder before the first run: a sweep that goes on after a kill makes the runs that
                were drawn. Drawing anew because of how the first runs ended would make the number depend on data. With
                `select.seed` it can be repeated, and is an experiment.
exponential     The choice by the exponential mechanism is a release: it is made once and kept in the folder.

Not here: what it costs (`pricing.py`), what is shown of it (`released.py`).
"""

from __future__ import annotations

import math
import os
import random
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpsgd_cli.data.evaluated import run_of
from dpsgd_cli.errors import DataError, RecipeError
from dpsgd_cli.metrics import less_is_better
from dpsgd_cli.privacy.selection import Choice
from dpsgd_cli.privacy.together import why_records_apart
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.results import store
from dpsgd_cli.results.leftovers import hidden_name
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import Folder
from dpsgd_cli.sweep.schema import ExponentialChoice, RandomStopping, Sweep

CHOICE = ".choice.json"
DRAW = ".draw.json"
_NOTE = (
    "How often each cell runs, drawn before the first run. Keep it secret, and keep it: to draw again after having seen"
    " a result would break what is stated about the choice."
)


def check_choice(sweep: Sweep, source: str, cells: Sequence[Cell]) -> None:
    """Raise RecipeError for a choice among these cells that has no proof."""
    select = sweep.select
    apart = None if select is None else why_records_apart([run_of(cell.loaded) for cell in cells])
    if select is not None and apart is not None:
        raise RecipeError(f"{source}: select: {select.kind} chooses among runs on the same records; {apart}")
    if isinstance(select, ExponentialChoice) and any(c.loaded.recipe.data.task != "classification" for c in cells):
        raise RecipeError(f"{source}: select: exponential counts correct classifications; data.task is another")


def draw(select: RandomStopping, cells: int) -> list[int]:
    """How many runs each of `cells` cells makes: a number of runs by the law, each of a cell drawn uniformly.

    Geometric and logarithmic laws are the truncated negative binomial's with shape 1 and 0: at least one run. A Poisson
    number may be 0.
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


def kept(place: Folder, cells: Sequence[Cell]) -> list[int] | None:
    """The numbers that were drawn for these cells before; None when there are none. DataError when they are damaged."""
    path = place.file(DRAW)
    if not path.exists():
        return None
    runs = store.read_json(path).get("runs")
    names = [cell.directory for cell in cells]
    if not isinstance(runs, dict) or not all(isinstance(runs.get(name), int) for name in names):
        raise DataError(
            f"{path}: does not say how often each cell of this sweep runs; restore it, or choose another --out"
        )
    return [runs[name] for name in names]


def draw_and_keep(place: Folder, select: RandomStopping, cells: Sequence[Cell]) -> None:
    """Draw, unless somebody did before; of several processes at once, one draws for all."""
    counts = draw(select, len(cells))
    path = place.file(DRAW)
    runs = {cell.directory: count for cell, count in zip(cells, counts, strict=True)}
    temporary = hidden_name(path)
    try:
        with open(temporary, "x", encoding="utf-8", opener=_for_the_owner) as file:
            file.write(store.to_json({"note": _NOTE, "law": select.law, "mean": select.mean, "runs": runs}))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        temporary.unlink(missing_ok=True)


def _for_the_owner(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def repeated(cells: Sequence[Cell], counts: Sequence[int]) -> list[Cell]:
    """The cells that were drawn, each as many trials as it was drawn."""
    return [_repeated(cell, count) for cell, count in zip(cells, counts, strict=True) if count]


def _repeated(cell: Cell, count: int) -> Cell:
    recipe = cell.loaded.recipe.model_copy(update={"repeats": count})
    return Cell(cell.number, LoadedRecipe(recipe, cell.loaded.base, cell.loaded.source), cell.settings)


def choose(sweep: Sweep, place: Folder, cells: Sequence[Cell], records: Callable[[Cell], int]) -> dict[str, Any] | None:
    """The chosen trial and its settings; None without `select:` or while cells are missing.

    `records` gives the (public) number of records that a cell trains on.
    """
    select = sweep.select
    if select is None or not all(store.is_complete(place.path / cell.directory) for cell in cells):
        return None
    kept = place.file(CHOICE)
    if kept.exists():
        return store.read_json(kept)
    trials = [(cell, row) for cell in cells for row in store.read_document(place.path / cell.directory)["trials"]]
    if isinstance(select, RandomStopping):
        chosen = _best(trials, select)
    else:
        chosen = _exponential(trials, select, records)
    if chosen is None:
        return {"directory": None, "note": "no trial chosen: none was drawn, or none stayed finite"}
    cell, row = chosen
    told = {"directory": cell.directory, "trial": row["trial"], "settings": cell.settings}
    if isinstance(select, ExponentialChoice):
        store.write_whole(kept, store.to_json(told))
    return told


def _best(trials: Sequence[tuple[Cell, Any]], select: RandomStopping) -> tuple[Cell, Any] | None:
    sign = -1 if less_is_better(select.metric) else 1
    finite = [(cell, row) for cell, row in trials if row.get(select.metric) is not None]
    return max(finite, key=lambda one: sign * one[1][select.metric], default=None)


def _exponential(
    trials: Sequence[tuple[Cell, Any]], select: ExponentialChoice, records: Callable[[Cell], int]
) -> tuple[Cell, Any] | None:
    """P(trial) proportional to exp(epsilon / 2 * count), by Gumbel noise: epsilon-DP for counts of sensitivity 1.

    A trial without a count (it diverged) counts 0, so that whether it may be chosen depends on no record.
    """
    source: random.Random = random.SystemRandom() if select.seed is None else random.Random(select.seed)
    scores = []
    for cell, row in trials:
        count = round((row.get("nonprivate_train_accuracy") or 0.0) * records(cell))
        gumbel = -math.log(-math.log(source.random() or 5e-324))
        scores.append(select.epsilon / 2 * count + gumbel)
    return max(zip(scores, range(len(trials)), trials, strict=True))[2] if trials else None
