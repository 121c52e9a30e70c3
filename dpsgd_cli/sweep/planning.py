"""Planning of a sweep before anything runs: the plan of every cell, and the packs of cells that train together.

Cells that differ only in keys that no plan reads are planned once. Cells of a pack may differ only in the keys that the
method lists as read trial by trial (`Descriptor.per_trial_keys`). Everything else must be equal, so cells that differ
in a new recipe key are not packed together until a method lists it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.batching.memory import trials_that_fit
from dpsgd_cli.common import interrupts
from dpsgd_cli.engine.independence import stand_in_rows
from dpsgd_cli.engine.models import BUILT_IN
from dpsgd_cli.engine.packing import Placement, elements_per_row
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.results.evaluated import run_of
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.pricing import Spent
from dpsgd_cli.training import loop
from dpsgd_cli.training.build_models import make_pack

ALWAYS_MAY_DIFFER = ("name", "description", "seed", "repeats", "save_model")
LONGER = 1.5
_NOT_IN_PLAN = ("name", "description", "seed", "repeats", "save_model", "runtime")
_NOT_IN_PLAN_OF_GRADIENTS = ("learning_rate", "weight_decay", "optimizer", "averaging", "groups")


@dataclass(frozen=True)
class Planned:
    """A cell with its plan (None without privacy) and the public facts of its data, or with the error that stops it."""

    cell: Cell
    plan: Plan | None = None
    outline: data.Outline | None = None
    error: DpsgdError | None = None


@dataclass
class Planner:
    """Planner of cells, which remembers the plans and models that it has seen."""

    _plans: dict[str, Planned] = field(default_factory=dict)
    _models: dict[str, tuple[int, int]] = field(default_factory=dict)

    def plan(self, cell: Cell) -> Planned:
        """Return the plan of `cell`. Errors of `dpsgd_cli.errors` are kept, unless they would stop every cell."""
        key = _plan_key(cell.loaded)
        if key not in self._plans:
            try:
                self._plans[key] = Planned(cell, *loop.plan_recipe(cell.settled))
            except DpsgdError as error:
                if interrupts.stops_everything(error):
                    raise
                self._plans[key] = Planned(cell, error=error)
        known = self._plans[key]
        found = Planned(cell, known.plan, known.outline, known.error)
        if found.error is None and found.outline is not None:
            try:
                self._check_model(cell.loaded, found.outline)
            except DpsgdError as error:
                return Planned(cell, error=error)
        return found

    def _check_model(self, loaded: LoadedRecipe, outline: data.Outline) -> None:
        """Check that the model can be built for the data, once for each model."""
        key = _model_key(loaded, outline)
        if key not in self._models:
            model = make_pack(loaded, outline.input_shape, outline.outputs, [0], Placement(torch.device("cpu")))
            row = 0
            if loaded.recipe.model.kind in BUILT_IN:
                row = elements_per_row(model, stand_in_rows(outline.input_shape, torch.empty(0)))
            self._models[key] = (model.size, row)

    def trials_that_fit(self, cell: Cell) -> int:
        """Return how many trials like those of `cell` fit together on the device that it would use here."""
        planned = self.plan(cell)
        known = None if planned.outline is None else self._models.get(_model_key(cell.loaded, planned.outline))
        parameters, row = known or (1, 1)
        asked = cell.loaded.recipe.runtime.device
        gpu = int(asked.partition(":")[2] or 0) if asked != "cpu" and torch.cuda.is_available() else None
        return trials_that_fit(parameters, row, gpu)


@functools.cache
def shared_planner() -> Planner:
    """Return the one planner of this process."""
    return Planner()


def _plan_key(loaded: LoadedRecipe) -> str:
    content = resolved(loaded.recipe)
    for key in _NOT_IN_PLAN:
        content.pop(key, None)
    if isinstance(loaded.recipe.method, Gradient):
        content["method"] = {k: v for k, v in content["method"].items() if k not in _NOT_IN_PLAN_OF_GRADIENTS}
    if loaded.recipe.method.kind in ("dp-sgd", "sgd") and loaded.recipe.model.kind in ("linear", "mlp"):
        layers = loaded.recipe.model.hidden if loaded.recipe.model.kind == "mlp" else []
        content["model"] = [loaded.recipe.model.kind, len(layers)]
    return json.dumps([content, str(loaded.base)], sort_keys=True)


def _model_key(loaded: LoadedRecipe, outline: data.Outline) -> str:
    return json.dumps([resolved(loaded.recipe)["model"], outline.input_shape, outline.outputs, str(loaded.base)])


def steps_of(planned: Planned) -> int:
    """Return the number of gradient steps of one trial; 0 if it is unknown before the run."""
    recipe, plan = planned.cell.loaded.recipe, planned.plan
    if plan is not None:
        return len(plan.epochs) * plan.sampling.steps_per_epoch
    if planned.outline is None or not isinstance(recipe.epochs, int):
        return 0
    records = planned.outline.train_records
    per_epoch = recipe.method.steps_per_epoch(records) if isinstance(recipe.method, Gradient) else 1
    return recipe.epochs * per_epoch


def planned_spending(cells: Sequence[Cell]) -> list[Spent | None]:
    """Return planned bounds on the trials of each cell; None without privacy. Cells that cannot run are left out."""
    found: list[Spent | None] = []
    for cell in cells:
        planned = shared_planner().plan(cell)
        plan = planned.plan
        if plan is None:
            found += [None] if planned.error is None else []
            continue
        told = plan.guarantee()
        of_training, run = tuple(plan.priced_releases), run_of(cell.loaded)
        found.append(Spent(of_training, run, plan.delta, told.epsilon, told.bound, plan.held_out))
    return found


def shared(loaded: LoadedRecipe) -> str:
    """Return a key (text) of everything that cells of one pack must have in common. Equal keys may share a pack."""
    recipe = loaded.recipe
    content = resolved(recipe)
    per_trial_keys = (*ALWAYS_MAY_DIFFER, *recipe.method.described.per_trial_keys)
    if not isinstance(getattr(recipe.method, "learning_rate", None), float):
        # rates that change by epoch, or that a theorem derives from the problem's constants, hold for the whole pack
        per_trial_keys = tuple(key for key in per_trial_keys if key.partition(".")[0] not in ("method", "model"))
    if recipe.runtime.evaluate_every > 1 and "epochs" in per_trial_keys:
        # the last epoch is always evaluated, so all must end at once
        known = isinstance(recipe.epochs, int)
        per_trial_keys = tuple(key for key in per_trial_keys if key != "epochs") if known else ALWAYS_MAY_DIFFER
    if recipe.data.private_columns:
        # their noise is a share of the budget, and a pack reads its data once
        per_trial_keys = tuple(key for key in per_trial_keys if key.partition(".")[0] != "privacy")
    for key in per_trial_keys:
        _remove(content, key.split("."))
    return json.dumps([content, str(loaded.base.resolve()), recipe.seed is None], sort_keys=True)


def packs(cells: Sequence[Cell], most_trials: int | Literal["auto"] = "auto") -> list[tuple[Cell, ...]]:
    """Return the cells in packs of at most `most_trials` trials (auto: what memory holds). No cell is divided.

    A pack takes as long as its longest cell, so a cell of over `LONGER` times the steps of the shortest starts a new
    pack.
    """
    planner = shared_planner()

    def steps(cell: Cell) -> int:
        return steps_of(planner.plan(cell))

    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        alike.setdefault(shared(cell.loaded), []).append(cell)
    found = []
    for group in alike.values():
        pack: list[Cell] = []
        most = planner.trials_that_fit(group[0]) if most_trials == "auto" else most_trials
        for cell in sorted(group, key=steps):
            full = sum(one.trials for one in pack) + cell.trials > most
            if pack and (full or steps(cell) > LONGER * steps(pack[0])):
                found.append(tuple(pack))
                pack = []
            pack.append(cell)
        found.append(tuple(pack))
    return found


def _remove(content: dict[str, Any], path: Sequence[str]) -> None:
    here: Any = content
    for key in path[:-1]:
        here = here.get(key) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(path[-1], None)
