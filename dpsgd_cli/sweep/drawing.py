"""How many runs random stopping makes, and of which cells: drawn once, before any run, and kept.

The price of the best of a random number of runs holds if that number is drawn from its law, without looking at data,
and nobody knows it who sees the best. So it comes from the operating system, and it is kept in the sweep's folder
before the first run: a sweep that goes on after a kill makes the runs that were drawn. Drawing anew because of how the
first runs ended would make the number depend on data. With `select.seed` it can be repeated, and is an experiment.

Not here: what it costs (`pricing.py`), which run is chosen (`choosing.py`).
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence

import numpy as np

from dpsgd_cli.data.evaluated import run_of
from dpsgd_cli.errors import DataError, RecipeError
from dpsgd_cli.privacy.selection import Choice
from dpsgd_cli.privacy.together import why_records_apart
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.results import store
from dpsgd_cli.results.leftovers import hidden_name
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import Folder
from dpsgd_cli.sweep.schema import ExponentialChoice, RandomStopping, Sweep

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
    random = np.random.Generator(np.random.Philox(seed))
    gamma = math.exp(-Choice(select.mean, select.law).log_inverse_gamma) if select.law != "poisson" else 0.0
    runs = {
        "geometric": lambda: int(random.geometric(gamma)),
        "logarithmic": lambda: int(random.logseries(1 - gamma)) if gamma < 1 else 1,
        "poisson": lambda: int(random.poisson(select.mean)),
    }[select.law]()
    counts: list[int] = np.bincount(random.integers(cells, size=runs), minlength=cells).tolist()
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
