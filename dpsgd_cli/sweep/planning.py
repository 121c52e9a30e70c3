"""The plan of every cell before anything runs.

Cells that differ in nothing a plan reads are planned once. Not here: plans themselves (`privacy/plan.py`), how long
the cells will take (`rehearsal.py`).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

import torch

from dpsgd_cli import data, experiment, failures
from dpsgd_cli.core.independence import stand_in_rows
from dpsgd_cli.core.memory import trials_that_fit
from dpsgd_cli.core.models import BUILT_IN
from dpsgd_cli.core.packing import Placement, elements_per_row
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.recipe.schema.method import Gradient
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.trials import make_pack

_NOT_IN_PLAN = ("name", "description", "seed", "repeats", "save_model", "runtime")
_NOT_IN_PLAN_OF_GRADIENTS = ("learning_rate", "weight_decay", "optimizer", "averaging")


@dataclass(frozen=True)
class Planned:
    """A cell with its plan (None without privacy) and the public facts of its data, or with why it cannot run."""

    cell: Cell
    plan: Plan | None = None
    outline: data.Outline | None = None
    error: DpsgdError | None = None


@dataclass
class Planner:
    """Plans cells and remembers plans and models that were seen before."""

    _plans: dict[str, Planned] = field(default_factory=dict)
    _models: dict[str, tuple[int, int]] = field(default_factory=dict)

    def plan(self, cell: Cell) -> Planned:
        """The plan of `cell`; an error of `dpsgd_cli.errors` is kept, not raised."""
        key = _plan_key(cell.loaded)
        if key not in self._plans:
            try:
                self._plans[key] = Planned(cell, *experiment.plan_recipe(cell.loaded))
            except DpsgdError as error:
                if failures.stops_everything(error):
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
        """See that the model can be built for the data, once for each model."""
        key = _model_key(loaded, outline)
        if key not in self._models and outline.input_shape is not None:
            model = make_pack(loaded, outline.input_shape, outline.outputs, [0], Placement(torch.device("cpu")))
            row = 0
            if loaded.recipe.model.kind in BUILT_IN:
                row = elements_per_row(model, stand_in_rows(outline.input_shape, torch.empty(0)))
            self._models[key] = (model.size, row)

    def trials_that_fit(self, cell: Cell) -> int:
        """How many trials like those of `cell` may train together where it would train here."""
        planned = self.plan(cell)
        known = None if planned.outline is None else self._models.get(_model_key(cell.loaded, planned.outline))
        parameters, row = known or (1, 1)
        asked = cell.loaded.recipe.runtime.device
        gpu = int(asked.partition(":")[2] or 0) if asked != "cpu" and torch.cuda.is_available() else None
        return trials_that_fit(parameters, row, gpu)


@functools.cache
def shared_planner() -> Planner:
    """One planner for everything that this process plans."""
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
    """Gradient steps of one trial; 0 where only the run will tell."""
    recipe, plan = planned.cell.loaded.recipe, planned.plan
    if plan is not None:
        return len(plan.epochs) * plan.sampling.steps_per_epoch
    if planned.outline is None or not isinstance(recipe.epochs, int):
        return 0
    batch = recipe.method.batch_size or planned.outline.train_records
    return recipe.epochs * -(-planned.outline.train_records // batch)
