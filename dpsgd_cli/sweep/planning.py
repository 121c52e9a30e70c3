"""The plan of every cell before anything runs, and how long the sweep will take.

Cells that differ in nothing a plan reads are planned once. Not here: plans themselves (`privacy/planning.py`).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dpsgd_cli import data, experiment, failures
from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.precision import of_parameters
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe import schema
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.grouping import CellPack
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
    _models: set[str] = field(default_factory=set)

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
        key = json.dumps([resolved(loaded.recipe)["model"], outline.input_shape, outline.outputs, str(loaded.base)])
        if key not in self._models and outline.input_shape is not None:
            make_pack(loaded, outline.input_shape, outline.outputs, [0], Place(torch.device("cpu")))
            self._models.add(key)


@functools.cache
def shared_planner() -> Planner:
    """One planner for everything that this process plans."""
    return Planner()


def _plan_key(loaded: LoadedRecipe) -> str:
    content = resolved(loaded.recipe)
    for key in _NOT_IN_PLAN:
        content.pop(key, None)
    if isinstance(loaded.recipe.method, schema.Gradient):
        content["method"] = {k: v for k, v in content["method"].items() if k not in _NOT_IN_PLAN_OF_GRADIENTS}
    if loaded.recipe.method.kind in ("dp-sgd", "sgd") and loaded.recipe.model.kind != "python":
        layers = loaded.recipe.model.hidden if loaded.recipe.model.kind == "mlp" else []
        content["model"] = [loaded.recipe.model.kind, len(layers)]
    return json.dumps([content, str(loaded.base)], sort_keys=True)


def steps_of(planned: Planned) -> int:
    """Gradient steps of one trial; 0 where only the run will tell."""
    recipe, plan = planned.cell.loaded.recipe, planned.plan
    if plan is not None:
        return len(plan.epochs) * plan.sampling.steps_per_epoch
    if planned.outline is None or not isinstance(recipe.epochs, int):
        return 0
    batch = recipe.method.batch_size or planned.outline.train_records
    return recipe.epochs * -(-planned.outline.train_records // batch)


def estimated_seconds(pack: CellPack, planned: Sequence[Planned]) -> float | None:
    """About how long a pack will train here, from timing one step on stand-in rows; None where nothing is known.

    Evaluation, reading data and noise are not in it, so it is a lower estimate.
    """
    first = planned[0]
    recipe, outline = first.cell.loaded.recipe, first.outline
    steps = max(steps_of(one) for one in planned)
    if outline is None or outline.input_shape is None or steps == 0:
        return None
    place = Place(torch.device("cpu"), of_parameters(recipe.runtime.dtype))
    outputs = 1 if isinstance(recipe.model, schema.ConvexModel) else outline.outputs
    model = make_pack(first.cell.loaded, outline.input_shape, outputs, list(range(pack.trials)), place)
    batch = recipe.method.batch_size or outline.train_records
    rows = min(batch, 512)
    return steps * batch / rows * _step_seconds(model, outline.input_shape, rows)


def _step_seconds(model: Pack, shape: tuple[int, ...], rows: int) -> float:
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del labels
        return outputs.square().sum(dim=-1)

    x = torch.zeros(rows, *shape, dtype=model.values.dtype)
    table = Table.load(x.numpy(), torch.zeros(rows, dtype=torch.int64).numpy(), False, x.device, x.dtype)
    clipping = Clipping(torch.ones(1, model.trials, dtype=x.dtype), flat=True)
    spent: list[float] = []
    for _ in range(3):
        begun = time.perf_counter()
        for chunk in table.chunks(_everything(), rows):
            add_clipped_sums(model, chunk, loss, clipping, Diagnostics(model.trials, x.device))
        spent.append(time.perf_counter() - begun)
    return min(spent)


def _everything() -> Any:
    from dpsgd_cli.core.sampling import Batch

    return Batch(rows=None)
