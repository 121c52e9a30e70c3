"""Estimates of a pack's running time on this machine: its own method, noise and evaluation, timed on random rows.

No data set is read, so no measured time depends on records. The estimate leaves out starting, reading data, accounting,
and writing results.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.data.users import as_users
from dpsgd_cli.engine.evaluate import evaluate
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.sweep import planning
from dpsgd_cli.sweep.planning import Planned, steps_of
from dpsgd_cli.training.start import DataOverride, Member, Trials, start

# Noise is drawn for up to 64 steps at once, so fewer would not show what it costs.
_STEPS, _SECONDS, _PATIENCE = 64, 0.3, 2.0
_FEW, _MANY = 2, 16
_EPOCHS = 100_000
_NUMBERS = 1 << 26


@dataclass(frozen=True)
class Pace:
    """Seconds for one step of all trials, and for the evaluation of one row in all of them."""

    step: float
    row: float


@dataclass
class Rehearsals:
    """Estimates of running times. Packs that differ only in settings that take no time are timed once."""

    _known: dict[tuple[str, int], Pace] = field(default_factory=dict)

    def seconds(self, planned: Sequence[Planned]) -> float | None:
        """Return about how many seconds these cells, one pack, train and are evaluated here; None if it is unknown.

        The time is unknown for methods that do not go step by step, and where only a run gives the number of steps.
        Raises what the first step of such a pack raises.
        """
        first, trials = planned[0], sum(one.cell.trials for one in planned)
        recipe, outline = first.cell.loaded.recipe, first.outline
        steps = max(steps_of(one) for one in planned)
        if outline is None or outline.input_shape is None or steps == 0:
            return None
        if not isinstance(recipe.method, Gradient) or recipe.method.kind == "private-selection":
            return None
        key = (planning.shared(first.cell.loaded), trials)
        if key not in self._known:
            self._known[key] = _pace(first, outline, trials)
        pace = self._known[key]
        epochs = -(-steps // max(1, recipe.method.steps_per_epoch(outline.train_records)))
        looks = -(-epochs // recipe.runtime.evaluate_every)
        rows = looks * outline.test_records + outline.train_records
        return steps * pace.step + rows * pace.row


def _pace(planned: Planned, outline: data.Outline, trials: int) -> Pace:
    """Time a few steps of `trials` trials, and more steps if they are quick."""
    batch = planned.cell.loaded.recipe.method.batch
    records = outline.train_records
    if planned.cell.loaded.recipe.folds is not None:
        records += outline.test_records
    if batch is None:
        rows = min(records, _most_rows(outline))
        pace = _timed(_started(planned, outline, trials, rows))
        return Pace(pace.step * records / rows, pace.row)
    groups = 1 if planned.plan is None else planned.plan.sampling.groups
    few = _started(planned, outline, trials, min(records, max(_FEW, groups) * batch))
    if _seconds(lambda: few.method.run_epoch(0)) < _SECONDS and records > _FEW * batch:
        return _timed(_started(planned, outline, trials, min(records, max(_MANY, groups) * batch)))
    return _timed(few, 1)


def _started(planned: Planned, outline: data.Outline, trials: int, records: int) -> Trials:
    """Return `trials` trials with the first cell's settings, ready to train on `records` random rows."""
    loaded, plan = planned.cell.settled, planned.plan
    changes = {"repeats": trials, "folds": None, "epochs": _EPOCHS if plan is None else loaded.recipe.epochs}
    recipe = loaded.recipe.changed(**changes)
    if plan is not None:
        plan = _endless(plan, records)
    member = Member(dataclasses.replace(loaded, recipe=recipe), plan)
    return start([member], override=DataOverride(_rows_of_chance(planned, outline, trials, records)))


def _most_rows(outline: data.Outline) -> int:
    """Return a number of rows that is enough to time one, however large the data set is."""
    return max(1, _NUMBERS // math.prod(outline.input_shape or ()))


def _endless(plan: Plan, records: int) -> Plan:
    """Return the plan for `records` records, with far more epochs than are timed and without a budget."""
    size = records if plan.sampling.batching == "full" else min(plan.sampling.batch_size, records)
    sampling = dataclasses.replace(plan.sampling, records=records, batch_size=size)
    return dataclasses.replace(
        plan,
        sampling=sampling,
        noise_multipliers=plan.noise_multipliers[:1] * _EPOCHS,
        epochs=plan.epochs[:1] * _EPOCHS,
        budget=None,
    )


def _rows_of_chance(planned: Planned, outline: data.Outline, trials: int, records: int) -> data.Dataset:
    """Return random inputs in [0, 1). Each trial has its own if private preprocessing would give it its own."""
    random = np.random.default_rng(0)
    loaded = planned.cell.loaded
    adjacency = loaded.recipe.adjacency
    per_trial = planned.plan is not None and bool(data.private_releases(loaded.recipe.data, adjacency, loaded.base))
    assert outline.input_shape is not None
    lead = (trials,) if per_trial else ()
    sizes = (records, min(outline.test_records, _most_rows(outline)))
    shape, outputs = outline.input_shape, outline.outputs
    x = [random.random((*lead, rows, *shape), dtype=np.float32) for rows in sizes]
    y = [random.integers(outputs, size=n) if outputs > 1 else random.random(n, dtype=np.float32) for n in sizes]
    classes = tuple(range(outputs)) if outputs > 1 else None
    made = data.Dataset(
        outline.name, x[0], y[0], x[1], y[1], per_trial, classes, (), (), {}, norm_bound=outline.norm_bound,
        columns=outline.columns,
    )  # fmt: skip
    return as_users(made, loaded.recipe.data)


def _timed(trials: Trials, done: int = 0) -> Pace:
    """Time epochs after the first `done` and one more, which warms up memory and caches."""
    method, context = trials.method, trials.context
    method.run_epoch(done)
    spent, steps, epoch = 0.0, 0, done + 1
    while spent < _SECONDS or (steps < _STEPS and spent < _PATIENCE):
        spent += _seconds(lambda epoch=epoch: method.run_epoch(epoch))  # type: ignore[misc]
        steps, epoch = steps + method.steps, epoch + 1

    def look() -> None:
        evaluate(context.pack, method.output, trials.test, trials.recipe.data.task, context.most_rows, context.loss)

    look()
    return Pace(spent / steps, _seconds(look) / max(1, trials.test.rows))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun
