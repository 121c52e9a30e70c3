"""Charges of a sweep or a comparison to the book of its recipes, before its first run.

All runs without a result are charged together, as one sum that is fixed beforehand; a run that an earlier call charged
and did not publish is not charged again (it goes on, or starts again: nothing of it was published). A failed cell stays
charged. Each shard charges its own cells.

A secret sweep (random stopping) is charged once, for its best run by its law: which cells run, and how often, must not
be seen in the book either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpsgd_cli.accounting.book_filter import Spending
from dpsgd_cli.accounting.repeated_selection import BestOfTrials
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.results import store
from dpsgd_cli.results.book import BookedRun, read
from dpsgd_cli.sweep import planning
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.pricing import unscaled
from dpsgd_cli.sweep.settings import RandomStopping, Sweep
from dpsgd_cli.training import charging

Charged = tuple[SettledRecipe, BookedRun]


def book_of(cells: Sequence[Cell], sweep: Sweep | None = None) -> Path | None:
    """Return the book of all cells; None without one.

    Raises UsageError if cells differ in it, and PrivacyError if the choice of the sweep is drawn from a seed.
    """
    path = charging.common_book([cell.loaded for cell in cells])
    if path is not None and sweep is not None and getattr(sweep.select, "seed", None) is not None:
        raise PrivacyError("select.seed: a choice from a seed is an experiment, which no book covers; leave it out")
    return path


def reserve(path: Path, out: Path, cells: Sequence[Cell], what: str) -> None:
    """Charge the book for all `cells` that have no result in `out`.

    Raises RunError if a cell has a result that was not charged to this book.
    """
    charged = []
    for cell in cells:
        if store.is_complete(out / cell.directory):
            charging.check_charged(cell.loaded, out / cell.directory)
        elif (found := _planned(cell, cell.directory)) is not None:
            charged.append(found)
    if charged:
        charging.reserve(path, out, charged, use_open=True, what=what)


def reserve_best(path: Path, out: Path, cells: Sequence[Cell], select: RandomStopping, name: str) -> None:
    """Charge the book for publishing the best of a random number of runs of `cells`, all cells of the file.

    `name` stands in the book for whatever is published.
    """
    found = [one for one in (_planned(cell, name) for cell in cells) if one is not None]
    plans = [planning.shared_planner().plan(cell).plan for cell in cells]
    runs = [unscaled(plan.priced_releases) for plan in plans if plan is not None]
    profile = BestOfTrials(select.priced).of_any(runs)[1]
    for loaded, _ in found:
        charging.check_covered(read(path), loaded)
    loaded, run = found[0]
    best = replace(run, name=name, spending=Spending(profiles=(profile,)), trials=1)
    charging.reserve(path, out, [(loaded, best)], use_open=True, what="sweep")


def _planned(cell: Cell, name: str) -> Charged | None:
    """Return a cell as it is charged; None if it cannot run."""
    plan = planning.shared_planner().plan(cell).plan
    if plan is None:
        return None
    loaded = cell.settled
    return loaded, charging.run_for(loaded, plan, name)
