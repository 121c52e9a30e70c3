"""Metrics of the trials' current output weights, on public or private records, and the results made of them.

Every evaluation measures means over records. The final evaluation on the test records adds metrics that need a table of
all answers, and the majority-class (or mean) baseline of each metric. The baseline uses the test records, which are
declared public, and no training record. So it costs no privacy; it is the best that a model without features could do.

Not here: the metrics (`engine/metrics.py`), passing rows through models (`engine/evaluate.py`), the rows of a result
(`training/assemble.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.data.discover import found_by_trial
from dpsgd_cli.data.table import predicted, target_scale
from dpsgd_cli.data.users import members_of, shares_of_rows
from dpsgd_cli.engine import metrics
from dpsgd_cli.engine.evaluate import evaluate, outputs_on, passes
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.settings import ConvexModel, OneLayer
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.evaluation.estimates import Estimate, Measured
from dpsgd_cli.evaluation.groups import HeldOut
from dpsgd_cli.evaluation.run import ClassCounts, measure_counts, measure_numbers
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.results import provenance
from dpsgd_cli.results.result import Released, ResultContent, Unreleased
from dpsgd_cli.training import assemble
from dpsgd_cli.training.build_models import loss_of
from dpsgd_cli.training.start import Member, Trials
from dpsgd_cli.users.run import UnitTable

LEAST_CLIPPED = 0.375
"""Threshold below the automatic clip of residuals for tables, and above that for directions of images."""
MOST_OUTPUTS = 1 << 28
"""Most outputs of all models on all test records; beyond it, only means over records are measured."""

Columns = dict[str, list[float]]


@dataclass(frozen=True)
class Models:
    """The weights `values` (R, P) of a pack's trials, all of one task, with the recipe of each trial.

    `labels` are the classes as the recipe writes them; None for targets. At most `most_rows` rows pass through the
    models at once.
    """

    pack: Pack
    values: Tensor
    recipes: Sequence[Experiment]
    labels: Sequence[object] | None
    most_rows: int

    @property
    def classes(self) -> int | None:
        """Number of classes; None for targets."""
        return None if self.labels is None else len(self.labels)

    @property
    def names(self) -> Sequence[object] | None:
        """Names of the classes, or of a record's several labels; None for a target."""
        data = self.recipes[0].data
        return self.labels if data.task == "classification" else data.names_of_several


def models_of(trials: Trials) -> Models:
    """Return the models that the trials would publish now."""
    context = trials.context
    return Models(context.pack, trials.method.output, context.recipes, trials.dataset.classes, context.most_rows)


def measure(models: Models, table: Table, loss: Loss) -> Columns:
    """Return each trial's mean of each metric over the records of `table`; NaN if its weights are not finite."""
    data = models.recipes[0].data

    def units(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        told = predicted(data, outputs.double().cpu().numpy())
        truth = target_scale(data).outward(labels.double().cpu().numpy())
        return torch.from_numpy(told).to(outputs.device), torch.from_numpy(truth).to(outputs.device)

    def deciding(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        told = outputs.double().cpu().numpy()
        own = [one.decisive(each) for one, each in zip(readings, told, strict=True)]
        return torch.from_numpy(np.stack(own)).to(outputs.device), labels

    diverged = ~torch.isfinite(models.values).all(dim=1)
    readings = [] if models.classes is None else [reading_of(recipe, models.classes) for recipe in models.recipes]
    own = units if data.target_bounds is not None else deciding if any(not one.plain for one in readings) else None
    found = evaluate(models.pack, models.values, table, data.task, models.most_rows, loss, own)
    return {name: values.masked_fill(diverged, torch.nan).tolist() for name, values in found.items()}


def measure_once(models: Models, table: Table) -> tuple[Columns, Columns]:
    """Return the metrics that need all answers, and the baseline of every defined metric, on the records of `table`.

    Both are empty for a table without rows or with more than MOST_OUTPUTS outputs.
    """
    task, classes, trials = models.recipes[0].data.task, models.classes, models.pack.trials
    if table.rows and task in ("token-classification", "next-token"):
        labels = np.asarray(table.labels[:]) if isinstance(table, StreamedTable) else table.y.cpu().numpy()
        names = models.names
        constants_of_places = metrics.of_constant_places(task, labels, names)
        measured_places = {} if names is None else _of_places(models, table, names)
        return measured_places, {name: [value] * trials for name, value in constants_of_places.items()}
    if table.rows == 0 or table.rows * trials * (classes or 1) > MOST_OUTPUTS:
        return {}, {}
    outputs, labels, mask = outputs_on(models.pack, models.values, table, models.most_rows)
    found: list[dict[str, float]] = []
    constants: list[dict[str, float]] = []
    for trial in range(trials):
        own = slice(None) if mask is None else mask[trial]
        told = _answers(models.recipes[trial], labels[own], outputs[trial][own])
        found.append(metrics.of_table(task, told, models.names))
        if trial and mask is None:
            constants.append(constants[0])
        else:
            constants.append(metrics.of_constants(task, told.truth, classes, models.names))
    known = [*metrics.METRICS, *(name for name in found[0] if name not in metrics.METRICS)]
    defined = [name for name in known if all(name in one for one in (*found, *constants))]
    once = [name for name in defined if name not in metrics.METRICS or not metrics.METRICS[name].at_every_look]
    measured = {name: [one[name] for one in found] for name in once}
    return measured, {name: [one[name] for one in constants] for name in defined}


def _of_places(models: Models, table: Table, names: Sequence[object]) -> Columns:
    """Return each trial's F1 score of each class of places, and their mean. Outputs are not kept."""
    counts = np.zeros((models.pack.trials, 3, len(names)))
    for outputs, y, mask in passes(models.pack, models.values, table, models.most_rows):
        for trial, own in enumerate(outputs):
            rows = slice(None) if mask is None else mask[trial]
            counts[trial] += metrics.counts_of_places(own[rows], y[0][rows])
    found = [metrics.of_counts(own[0], own[1], own[2], names) for own in counts]
    return {name: [one[name] for one in found] for name in found[0]}


def _answers(recipe: Experiment, labels: np.ndarray, outputs: np.ndarray) -> metrics.Answers:
    """Return one trial's answers for records with these labels (N,) and outputs (N, K)."""
    if recipe.data.task == "regression":
        truth = target_scale(recipe.data).outward(labels.astype(np.float64))
        own = outputs if truth.ndim == 2 else outputs[:, 0]
        return metrics.Answers(truth, predicted(recipe.data, own.astype(np.float64)))
    if recipe.data.task == "multi-label":
        return metrics.Answers(labels, (outputs > 0).astype(np.int64))
    if not np.isfinite(outputs).all():
        outputs = np.full_like(outputs, math.nan)
    return metrics.answers_of_classes(labels, outputs, reading_of(recipe, max(2, outputs.shape[1])))


def reading_of(recipe: Experiment, classes: int) -> metrics.Reading:
    """Return how outputs of a model that a settled recipe trained are read."""
    data = recipe.data
    costs = None if data.costs is None else data.costs.of_classes
    return metrics.Reading(residual_clip(recipe, classes), data.weights, costs)


def residual_clip(recipe: Experiment, classes: int) -> float | None:
    """Return the bound at which training by a settled recipe clips residuals, for `metrics.probabilities_by`.

    The bound is known if all rows have one norm, as second moments ensure; counts make it 1 in root mean square, and
    the bound that of a typical row. It is the clip norm divided by the norm of a row with the model's own bias, and by
    the norm of the outputs' residuals. It is infinite in all other cases, and None for a loss without probabilities. A
    bound below `LEAST_CLIPPED` also becomes infinite: the loss is flat where p and 1 - p are above it, so noise and few
    steps decide most margins.
    """
    model = recipe.model
    if isinstance(model, ConvexModel) and not model.known.probabilities:
        return None
    clipping = None if recipe.privacy is None else recipe.privacy.clipping
    alike = recipe.method.conditioned is not None and recipe.data.unit is None
    if not (alike and isinstance(clipping, FlatClipping) and isinstance(model, OneLayer)):
        return math.inf
    outputs = 1 if isinstance(model, ConvexModel) else classes
    clipped = clipping.norm_bound(None) / (math.hypot(1.0, float(model.has_bias)) * model.by_residual(outputs))
    return clipped if clipped >= LEAST_CLIPPED else math.inf


def record(trials: Trials, epoch: int, seen: Diagnostics, wanted: bool) -> assemble.EpochRecord:
    """Return the record of a finished epoch. If `wanted`, it includes metrics on test and public validation records."""
    named = (_on_public_rows(trials) if wanted else {}) | trials.method.published()
    return assemble.EpochRecord(epoch, named, seen.sums())


def evaluate_last(trials: Trials) -> None:
    """Put metrics on test and public validation records into the last epoch's record, for a run that ends there."""
    if trials.history:
        last = trials.history[-1]
        trials.history[-1] = replace(last, metrics=_on_public_rows(trials) | last.metrics)


def _on_public_rows(trials: Trials) -> Columns:
    """Return metrics of the published weights on test records that are public, and on public validation records."""
    loss, models = loss_of(trials.recipe, trials.context.base, raw=True), models_of(trials)
    public = not trials.recipe.data.measured_privately
    found = measure(models, trials.method.rows_for_output(trials.test), loss) if public else {}
    named = {f"test_{k}": v for k, v in found.items()}
    cut, rows = trials.recipe.data.validation, trials.context.validation
    if rows is not None and cut is not None and cut.public:
        rows = trials.method.rows_for_output(rows)
        named.update({f"validation_{k}": v for k, v in measure(models, rows, loss).items()})
    return named


@dataclass(frozen=True)
class Final:
    """Final metrics of each trial of a pack: on public rows, and (non-private) on training rows."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    on_train: dict[str, list[float]] = field(default_factory=dict)
    findings: Findings | None = None
    measured: tuple[Measured, ...] = ()


def _measure_privately(trials: Trials, models: Models) -> tuple[Measured, ...]:
    """Charge and release one measurement of the held-out records for each trial (`evaluation/price.py`)."""
    table, context, data = trials.method.rows_for_output(trials.test), trials.context, trials.recipe.data
    counts: list[ClassCounts] = []
    outputs, labels = np.zeros((context.trials, 0, models.classes or 1)), np.zeros(0, dtype=np.int64)
    if data.task == "classification" and data.unit is None:
        # rows add up, so pieces need not be kept
        held = HeldOut(None, trials.dataset.groupings)
        counts = _counted(models, table, held)
    else:
        if table.rows:
            outputs, labels, _ = outputs_on(models.pack, models.values, table, models.most_rows)
        used, held = _held_out(trials, len(labels))
        outputs, labels = outputs[:, used], labels[used]
    found = []
    for trial, (recipe, plan) in enumerate(zip(context.recipes, context.plans, strict=True)):
        assert plan is not None and recipe.data.split is not None
        (release,) = plan.held_out
        context.ledgers[trial].spend(release, phase="held-out")
        split, stream = recipe.data.split.test, context.streams[trial]
        # all records: the training part has places for its share of them, or exactly its own
        places = plan.sampling.records + split if isinstance(split, int) else plan.sampling.records / (1 - split)
        places = math.ceil(places) * (1 if data.unit is None else data.unit.most_rows)
        if recipe.data.task == "regression":
            answers, bounds = _answers(recipe, labels, outputs[trial]), recipe.data.target_bounds
            assert bounds is not None
            low, high = sorted(bounds)
            measured = measure_numbers(answers.truth, answers.told, (low, high), release, stream, places, held)
        else:
            own = counts[trial] if counts else ClassCounts.of(labels, scores(recipe, outputs[trial]), held)
            measured = measure_counts(own, release, stream, places, held)
            measured = replace(measured, classes=tuple(map(str, trials.dataset.classes or ())))
            reading = reading_of(recipe, models.classes or 2)
            if reading.clipped is None or not reading.plain:
                measured = measured.without_probabilities()
            if not reading.plain:  # mistakes have costs, so that the accuracy is not what is wanted
                measured = replace(measured, gain=None)
        found.append(measured)
    return tuple(found)


def _counted(models: Models, table: Table, held: HeldOut) -> list[ClassCounts]:
    """Return the exact counts of each trial on all rows of `table`, a piece at a time. Private."""
    none = np.zeros((0, models.classes or 1), np.float32)
    empty = held.part(slice(0))
    found = [ClassCounts.of(np.zeros(0, np.int64), scores(recipe, none), empty) for recipe in models.recipes]
    done = 0
    for outputs, y, _ in passes(models.pack, models.values, table, models.most_rows) if table.rows else ():
        labels, part = y[0].cpu().numpy(), held.part(slice(done, done + y.shape[1]))
        for trial, (recipe, own) in enumerate(zip(models.recipes, outputs.float().cpu().numpy(), strict=True)):
            found[trial] += ClassCounts.of(labels, scores(recipe, own), part)
        done += y.shape[1]
    return found


def _held_out(trials: Trials, rows: int) -> tuple[np.ndarray, HeldOut]:
    """Return the held-out rows that are used (n,), of `rows`, and how they count: all, or at most m of each user."""
    dataset, unit = trials.dataset, trials.recipe.data.unit
    used, weights = np.arange(rows), None
    if unit is not None:
        assert dataset.keys is not None
        members = members_of(dataset.keys.values[len(dataset.train_y) :], unit.most_rows)[1]
        used = members[members >= 0]
        weights = shares_of_rows(members)[members >= 0]
    groupings = tuple(replace(one, codes=one.codes[used]) for one in dataset.groupings)
    return used, HeldOut(weights, groupings, unit is not None)


def scores(recipe: Experiment, outputs: np.ndarray) -> np.ndarray:
    """Return numbers (N, K) whose softmax is the model's probabilities; for two classes the log odds (N, 1).

    With costs or class weights they are moved, so that the largest decides. Outputs of a loss without probabilities are
    returned as they are.
    """
    reading = reading_of(recipe, max(2, outputs.shape[1]))
    if reading.clipped is None:
        return outputs.astype(np.float64)
    if not reading.plain:
        found = reading.decisive(outputs)
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(reading.probabilities(outputs))
    return np.diff(found, axis=1) if found.shape[1] == 2 else found


def _final(trials: Trials) -> Final:
    """Measure the published weights of all trials."""
    models = models_of(trials)
    rows_of = trials.method.rows_for_output
    table = trials.context.table
    inference = table.row_by_row() if isinstance(table, UnitTable) else table
    on_train = measure(models, rows_of(inference), trials.context.loss)
    last = trials.history[-1].metrics if trials.history else {}
    # findings exist only for a complete training
    findings = trials.method.findings() if trials.stopped is None else None
    privately: tuple[Measured, ...] = ()
    if trials.recipe.data.measured_privately:
        privately = _measure_privately(trials, models)
        last = last | {f"test_{k}": v for k, v in _points([one.metrics | one.f1_by_name for one in privately]).items()}
        last = last | {f"constant_{k}": v for k, v in _points([one.constants for one in privately]).items()}
    else:
        measured, constants = measure_once(models, rows_of(trials.test))
        last = last | {f"test_{k}": v for k, v in measured.items()}
        last = last | {f"constant_{k}": v for k, v in constants.items()}
    if isinstance(trials.recipe.model, ConvexModel):
        squares = trials.method.output.double().square().sum(dim=1).tolist()
        l2 = [recipe.model.l2 for recipe in trials.context.recipes if isinstance(recipe.model, ConvexModel)]
        pairs = zip(on_train["loss"], l2, squares, strict=True)
        on_train["objective"] = [loss + c / 2 * square for loss, c, square in pairs]
    return Final(last, {f"train_{name}": values for name, values in on_train.items()}, findings, privately)


def _points(held: Sequence[Mapping[str, Estimate]]) -> Columns:
    """Return the estimates of `METRICS`, and F1 scores of classes, that have a point in every trial."""
    names = [name for name in (*metrics.METRICS, *(one for one in held[0] if one.startswith("f1_"))) if name in held[0]]
    found = {name: [own[name].value for own in held if name in own] for name in names}
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    return {name: values for name, values in known.items() if len(values) == len(held)}


def finished(trials: Trials, member: Member, span: slice, final: Final) -> tuple[Released, Unreleased]:
    """Return the released and the unreleased (non-private) results of one member, separately."""
    context, dataset, findings = trials.context, trials.dataset, final.findings
    wanted = member.loaded.recipe.epochs
    length = wanted if member.plan is None and isinstance(wanted, int) else len(trials.history)
    history = [record.of(span) for record in trials.history[:length]]
    fetched, own = provenance.hashes(member.loaded, dataset.sha256)
    counted, measured = _timing(trials, span.stop - span.start, length)
    discovered = found_by_trial(member.loaded.recipe.data, dataset.released, range(span.start, span.stop))
    told = dict.fromkeys(warning for found in discovered for warning in found.warnings)
    released = Released(
        loaded=member.loaded,
        plan=member.plan,
        ledgers=context.ledgers[span],
        declarations=[*dataset.declarations, *(() if trials.start is None else trials.start.declarations)],
        uncovered_steps=dataset.nonprivate,
        warnings=(*dataset.warnings, *told, *(() if findings is None else findings.warnings)),
        data_sha256=fetched,
        device=str(context.pack.values.device),
        epochs=[record.metrics for record in history],
        metrics={name: values[span] for name, values in final.metrics.items()},
        finite=torch.isfinite(trials.method.output[span]).all(dim=1).tolist(),
        timing=counted,
        findings=None if findings is None else findings.claimed[span],
        stopped=trials.stopped,
        discovered=[found.lines for found in discovered],
        measured=final.measured[span],
        start=None if trials.start is None else trials.start.record,
    )
    unreleased = Unreleased(
        epochs=[record.counts for record in history],
        metrics={name: values[span] for name, values in final.on_train.items()},
        data_sha256=own,
        timing=measured,
        findings=None if findings is None else findings.measured[span],
    )
    return released, unreleased


def _timing(trials: Trials, own: int, epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return planned counts, and measured times of `own` trials over `epochs` epochs.

    The pack's time is divided equally among its trials. Examples are counted by expected batch sizes, because the
    realised sizes are private.
    """
    settings = trials.recipe.method
    per_epoch = len(trials.context.table)
    if BATCHINGS[settings.batching].sampled and settings.batch is not None:
        per_epoch = trials.method.steps * settings.batch
    examples = per_epoch * trials.done * trials.context.trials
    rate = examples / trials.train_seconds if trials.train_seconds > 0 else 0.0
    counted = {
        "steps": epochs * trials.method.steps,
        "pack_trials": trials.context.trials,
        "processes": trials.context.team.size,
    }
    measured = {"train_seconds": trials.train_seconds * own / trials.context.trials, "examples_per_second": rate}
    return counted, measured


def results_of(trials: Trials) -> list[ResultContent]:
    """Return the result of each member of a pack, over the finished epochs, after its last releases."""
    trials.method.after_training()
    final = _final(trials)
    return [assemble.result(*finished(trials, member, span, final)) for member, span in trials.spans()]
