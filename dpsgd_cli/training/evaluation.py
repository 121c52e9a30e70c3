"""Metrics of the trials' current output weights, on public or private records.

Every evaluation measures means over records. The final evaluation on the test records adds metrics that need a table of
all answers, and the majority-class (or mean) baseline of each metric. The baseline uses the test records, which are
declared public, and no training record. So it costs no privacy; it is the best that a model without features could do.

Not here: the metrics (`engine/metrics.py`), passing rows through models (`engine/losses.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.data.table import predicted, target_scale
from dpsgd_cli.engine.losses import Loss, evaluate, outputs_on
from dpsgd_cli.engine.metrics import METRICS, Answers, answers_of_classes, constant_answers, of_table
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.settings import ConvexModel, OneLayer
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.training.start import Trials

LEAST_CLIPPED = 0.375
"""Threshold below the automatic clip of residuals for tables, and above that for directions of images."""
MOST_OUTPUTS = 1 << 28
"""Most outputs of all models on all test records; beyond it, only means over records are measured."""

Columns = dict[str, list[float]]


@dataclass(frozen=True)
class Models:
    """The weights `values` (R, P) of a pack's trials, all of one task, with the recipe of each trial.

    `classes` is None for targets. At most `most_rows` rows pass through the models at once.
    """

    pack: Pack
    values: Tensor
    recipes: Sequence[Recipe]
    classes: int | None
    most_rows: int


def models_of(trials: Trials) -> Models:
    """Return the models that the trials would publish now."""
    context, classes = trials.context, trials.dataset.classes
    values, count = trials.method.output, None if classes is None else len(classes)
    return Models(context.pack, values, context.recipes, count, context.most_rows)


def measure(models: Models, table: Table, loss: Loss) -> Columns:
    """Return each trial's mean of each metric over the records of `table`; NaN if its weights are not finite."""
    data = models.recipes[0].data

    def units(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        told = predicted(data, outputs.double().cpu().numpy())
        truth = target_scale(data).outward(labels.double().cpu().numpy())
        return torch.from_numpy(told).to(outputs.device), torch.from_numpy(truth).to(outputs.device)

    diverged = ~torch.isfinite(models.values).all(dim=1)
    own = None if data.target_bounds is None else units
    found = evaluate(models.pack, models.values, table, data.task, models.most_rows, loss, own)
    return {name: values.masked_fill(diverged, torch.nan).tolist() for name, values in found.items()}


def measure_once(models: Models, table: Table) -> tuple[Columns, Columns]:
    """Return the metrics that need all answers, and the baseline of every defined metric, on the records of `table`.

    Both are empty for a table without rows or with more than MOST_OUTPUTS outputs.
    """
    task, classes, trials = models.recipes[0].data.task, models.classes, models.pack.trials
    if table.rows == 0 or table.rows * trials * (classes or 1) > MOST_OUTPUTS:
        return {}, {}
    outputs, labels, mask = outputs_on(models.pack, models.values, table, models.most_rows)
    found: list[dict[str, float]] = []
    constants: list[dict[str, float]] = []
    for trial in range(trials):
        own = slice(None) if mask is None else mask[trial]
        told = _answers(models.recipes[trial], labels[own], outputs[trial][own])
        found.append(of_table(task, told))
        if trial and mask is None:
            constants.append(constants[0])
        else:
            constants.append(of_table(task, constant_answers(told.truth, classes)))
    defined = [name for name in METRICS if all(name in one for one in (*found, *constants))]
    measured = {name: [one[name] for one in found] for name in defined if not METRICS[name].at_every_look}
    return measured, {name: [one[name] for one in constants] for name in defined}


def _answers(recipe: Recipe, labels: np.ndarray, outputs: np.ndarray) -> Answers:
    """Return one trial's answers for records with these labels (N,) and outputs (N, K)."""
    if recipe.data.task == "regression":
        truth = target_scale(recipe.data).outward(labels.astype(np.float64))
        return Answers(truth, predicted(recipe.data, outputs[:, 0].astype(np.float64)))
    if not np.isfinite(outputs).all():
        outputs = np.full_like(outputs, math.nan)
    return answers_of_classes(labels, outputs, residual_clip(recipe, max(2, outputs.shape[1])))


def residual_clip(recipe: Recipe, classes: int) -> float | None:
    """Return the bound at which training by a settled recipe clips residuals, for `metrics.probabilities_by`.

    The bound is known for two classes if all rows have one norm, as second moments ensure; counts make it 1 in root
    mean square, and the bound that of a typical row. It is the clip norm divided by the norm of a row with the model's
    own bias, and by the norm of the outputs' residuals. It is infinite in all other cases, and None for a loss without
    probabilities. A bound below `LEAST_CLIPPED` also becomes infinite: the loss is flat where p and 1 - p are above it,
    so noise and few steps decide most margins.
    """
    model = recipe.model
    if isinstance(model, ConvexModel) and not model.known.probabilities:
        return None
    clipping = None if recipe.privacy is None else recipe.privacy.clipping
    alike = recipe.preconditioner is not None and recipe.data.unit is None and classes == 2
    if not (alike and isinstance(clipping, FlatClipping) and isinstance(model, OneLayer)):
        return math.inf
    outputs = 1 if isinstance(model, ConvexModel) else classes
    clipped = clipping.norm_bound(None) / (math.hypot(1.0, float(model.has_bias)) * model.by_residual(outputs))
    return clipped if clipped >= LEAST_CLIPPED else math.inf
