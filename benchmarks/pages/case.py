"""One line of a page: what is trained for it, and how a row that was trained from something else is told.

A row keeps two things. `recipe`: a hash of the recipe and its changes as they are written, so that a new option which
nobody set makes nothing stale; seed and repeats aside. `behaviour`: what the shipped recipe, shrunk, trained to on
stand-in records when the row was made (`tests/behaviour.py`), which shows defaults and code that changed. A row is
stale when either is another today. Not seen: what only real records, a case's changes, sizes or more than one epoch
would show, in code that the shrunk recipe does not reach; how the area under the curve is taken; a default of a size;
another file of a data set (its card's SHA-256 is checked when it is read, and the card's splits are in `behaviour` as
far as the stand-in is split by them).
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass

from dpsgd_cli.recipe.loading import NOT_IN_HASH, LoadedRecipe, load_recipe

TOLERANCE = 1e-4
"""Relative; what another processor's order of sums may move, and no change of a method is as small."""


@dataclass(frozen=True)
class Case:
    """One training of a page. `table` and `name` say where it goes; cases with one `pack` train together.

    `trials` is how many it wants, `chunk` how many of them train at a time (each with all its folds). `curves`: how
    many seeds keep their history.
    """

    table: str
    name: str
    recipe: str
    changes: tuple[str, ...] = ()
    trials: int = 10
    chunk: int = 5
    curves: int = 0
    pack: str = ""

    def loaded(self, first: int = 0, trials: int = 1) -> LoadedRecipe:
        """The recipe for so many trials from trial `first` on."""
        return load_recipe(self.recipe, (*self.changes, f"seed={first * self.folds}", f"repeats={trials}"))

    @functools.cached_property
    def folds(self) -> int:
        """How many seeds a trial takes: one for each of its folds."""
        return load_recipe(self.recipe, self.changes).recipe.folds or 1

    @functools.cached_property
    def hash(self) -> str:
        """8 hex digits of the recipe with its changes, as written."""
        content = self.loaded().recipe.model_dump(mode="json", exclude_unset=True)
        for key in (*NOT_IN_HASH, "seed", "repeats"):
            section, _, last = key.rpartition(".")
            (content.get(section, {}) if section else content).pop(last, None)
        written = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(written.encode()).hexdigest()[:8]

    @property
    def behaviour(self) -> float:
        """What its shipped recipe trains to today."""
        return behaviour(self.recipe)


@functools.cache
def behaviour(recipe: str) -> float:
    """One number of what a shipped recipe, shrunk, trains to on stand-in records: all weights and test metrics.

    On one thread, and without metrics of an order of records: of few, pairs tie or not as the order of sums has it.
    """
    import scipy.linalg  # what is loaded later would have its own number of threads
    import torch
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from tests.behaviour import trained

    del scipy

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            weights, told = trained(recipe)
    finally:
        torch.set_num_threads(threads)
    size = sum(float(value.double().abs().sum()) for value in weights.values())
    own = {name: value["mean"] for name, value in told["metrics"].items() if name.startswith("test_")}
    metrics = {name: value for name, value in own.items() if not name.startswith("test_f1_")}  # of single classes
    for name in ("test_auc", "test_average_precision", "test_recall"):
        metrics.pop(name, None)
    return float(f"{size + sum(metrics.values()):.7g}")


def is_same(one: float, other: float) -> bool:
    """Whether two behaviours are one."""
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
