"""What trials are worth: metrics of the weights that would be published now, on records that are public or are not.

At every look the means over records; at the end, on the test records alone, also what takes a table of answers, and
beside each metric what a constant gets. The constant knows the test records, which are declared public, and no training
record: what it gets costs nothing, and is the best that a model without features could do on them.

Not here: the metrics (`metrics.py`), passing rows through models (`core/losses.py`), naming columns (`results/`).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dpsgd_cli.core.losses import Loss, evaluate, outputs_on
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.data.targets import target_scale
from dpsgd_cli.metrics import METRICS, Answers, answers_of_classes, constant_answers, of_table
from dpsgd_cli.recipe.schema.model import ConvexModel
from dpsgd_cli.trials import Trials

MOST_OUTPUTS = 1 << 28
"""Numbers that all models give for all test records; of more, only means over records are measured."""

Columns = dict[str, list[float]]


def measure(trials: Trials, table: Table, loss: Loss) -> Columns:
    """Means over the records of `table`, by metric; not a number for a trial whose weights are not finite."""
    context, output, data = trials.context, trials.method.output, trials.recipe.data
    diverged = ~torch.isfinite(output).all(dim=1)
    found = evaluate(context.pack, output, table, data.task, context.most_rows, loss)
    units = {name: target_scale(data).unit if METRICS[name].in_units else 1.0 for name in found}
    return {name: (values * units[name]).masked_fill(diverged, torch.nan).tolist() for name, values in found.items()}


def measure_test(trials: Trials) -> Columns:
    """What `measure` does not on the test records, under `test_`, and what a constant gets, under `constant_`."""
    context, task = trials.context, trials.recipe.data.task
    classes = None if trials.dataset.classes is None else len(trials.dataset.classes)
    if trials.test.rows == 0 or trials.test.rows * context.trials * (classes or 1) > MOST_OUTPUTS:
        return {}
    outputs, labels, mask = outputs_on(context.pack, trials.method.output, trials.test, context.most_rows)
    found: list[dict[str, float]] = []
    constants: list[dict[str, float]] = []
    for trial in range(context.trials):
        own = slice(None) if mask is None else mask[trial]
        told = _answers(trials, labels[own], outputs[trial][own])
        found.append(of_table(task, told))
        if trial and mask is None:
            constants.append(constants[0])
        else:
            constants.append(of_table(task, constant_answers(told.truth, classes)))
    defined = [name for name in METRICS if all(name in one for one in (*found, *constants))]
    measured = {f"test_{name}": [one[name] for one in found] for name in defined if not METRICS[name].at_every_look}
    return measured | {f"constant_{name}": [one[name] for one in constants] for name in defined}


def _answers(trials: Trials, labels: np.ndarray, outputs: np.ndarray) -> Answers:
    """Of one trial, for records with these labels (N,) and outputs (N, K)."""
    recipe = trials.recipe
    if recipe.data.task == "regression":
        scale = target_scale(recipe.data)
        truth, told = (scale.outward(part.astype(np.float64)) for part in (labels, outputs[:, 0]))
        return Answers(truth, told)
    logistic = not isinstance(recipe.model, ConvexModel) or recipe.model.loss == "logistic"
    if not np.isfinite(outputs).all():
        outputs = np.full_like(outputs, math.nan)
    return answers_of_classes(labels, outputs, logistic)
