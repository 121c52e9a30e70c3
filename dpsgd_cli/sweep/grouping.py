"""Which cells train together: those that share data, model and sampler, on one trials axis.

Only what a method says it reads trial by trial (`Descriptor.may_differ`) may differ within a pack; everything else must
be equal, so that a key that is added to a recipe keeps its cells apart until a method lists it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.sweep.expansion import Cell

ALWAYS_MAY_DIFFER = ("name", "description", "seed", "repeats", "save_model")
LONGER = 1.5


@dataclass(frozen=True)
class CellPack:
    """Cells that train together."""

    cells: tuple[Cell, ...]

    @property
    def trials(self) -> int:
        return sum(cell.trials for cell in self.cells)


def shared(loaded: LoadedRecipe) -> str:
    """What cells of one pack have in common: equal text, same pack."""
    recipe = loaded.recipe
    content = resolved(recipe)
    may_differ = (*ALWAYS_MAY_DIFFER, *recipe.method.described.may_differ)
    if not isinstance(getattr(recipe.method, "learning_rate", None), float):
        # rates that change by epoch, or that a theorem gives from the problem's constants, are of the whole pack
        may_differ = tuple(key for key in may_differ if key.partition(".")[0] not in ("method", "model"))
    if recipe.runtime.evaluate_every > 1 and "epochs" in may_differ:
        # the last epoch is always evaluated, so all must end at once
        known = isinstance(recipe.epochs, int)
        may_differ = tuple(key for key in may_differ if key != "epochs") if known else ALWAYS_MAY_DIFFER
    for key in may_differ:
        _remove(content, key.split("."))
    return json.dumps([content, str(loaded.base.resolve()), recipe.seed is None], sort_keys=True)


def packs(cells: Sequence[Cell], most_trials: Callable[[Cell], int], steps: Callable[[Cell], int]) -> list[CellPack]:
    """The cells in packs of at most `most_trials` trials like the first of them; a cell is never divided.

    `steps` says how long a cell trains: a pack takes as long as its longest cell, so cells much shorter go elsewhere.
    """
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(shared(cell.loaded), []).append(cell)
    found = []
    for group in alike.values():
        pack: list[Cell] = []
        most = most_trials(group[0])
        for cell in sorted(group, key=steps):
            full = sum(one.trials for one in pack) + cell.trials > most
            if pack and (full or steps(cell) > LONGER * steps(pack[0])):
                found.append(CellPack(tuple(pack)))
                pack = []
            pack.append(cell)
        found.append(CellPack(tuple(pack)))
    return found


def _remove(content: dict[str, Any], path: Sequence[str]) -> None:
    here: Any = content
    for key in path[:-1]:
        here = here.get(key) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(path[-1], None)
