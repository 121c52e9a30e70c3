"""The stage of an audit: a recipe as it is shipped, rows that are no records, and canaries that are in by a fair coin.

What is trained is the recipe's own: planner, ledger, sampler, clipping, noise, normaliser, schedule, update. In the
place of its records stand rows of chance and canaries. Where that would take long there are fewer of both, with batches
as much smaller: sampling rates, batches in an epoch, and so the plan, stay as they are to rounding. `Cut.changed` says
what an audit of this size changes of a recipe.

Each trial flips its own coins. A canary that is out leaves a place for a record that adds nothing, so that the number
of records, which is public, tells nobody; under replace-one another canary of the opposite gradient is in its place.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.audit import lanes
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.data.units import as_users
from dpsgd_cli.joint import plan_of
from dpsgd_cli.methods.base import Watcher
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.recipe.schema.model import ConvexModel
from dpsgd_cli.trials import Member, Stage, Trials, start

_FEW_RECORDS = 64
_CONVEX_RECORDS = 5000
_FIXED_RECORDS = 500
_UNKNOWN_LENGTH = 1000
_SAME_RATE = 0.01
_TEST_RECORDS = 8


@dataclass(frozen=True)
class Size:
    """How much is trained: trials, canaries a trial, and about how many rows all trials may see in all steps."""

    trials: int
    canaries: int
    rows: float


@dataclass(frozen=True)
class Staged:
    """An audit that is ready to train. `inside` (R, k): which canaries are in; `places` (k,): their rows' numbers."""

    trials: Trials
    plan: Plan
    inside: np.ndarray
    places: np.ndarray
    columns: list[np.ndarray]
    signs: float
    changed: dict[str, Any]


def fast_path(loaded: LoadedRecipe) -> bool:
    """Whether the method takes a convex model's gradients without packed layers."""
    recipe = loaded.recipe
    kinds = recipe.method.batching in ("full", "fixed")
    return isinstance(recipe.model, ConvexModel) and kinds and recipe.data.unit is None


def canaries_of(plan: Plan, size: Size) -> int:
    """No more than a third of the records."""
    return max(1, min(size.canaries, plan.sampling.records // 3))


def sized(plan: Plan, size: Size, convex: bool) -> tuple[int, int]:
    """Records and expected batch of the audit: the recipe's own where those are not too many."""
    sampling, canaries = plan.sampling, canaries_of(plan, size)
    records, batch = sampling.records, sampling.batch_size
    steps = (plan.most_epochs or _UNKNOWN_LENGTH) * sampling.steps_per_epoch
    if size.trials * steps * batch <= size.rows:
        return records, batch
    least = max(3 * canaries, _FEW_RECORDS, min(records, _CONVEX_RECORDS) if convex else 0)
    if batch == records:
        return (least, least) if least < records else (records, batch)
    if sampling.batching == "fixed":
        return min(records, max(least, _FIXED_RECORDS)), batch
    if sampling.kind.by_epoch:
        small = -(-least // sampling.steps_per_epoch)
        return (small * sampling.steps_per_epoch, small) if small < batch else (records, batch)
    # of all records, whatever the number of groups that take turns
    rate = sampling.rate / sampling.groups
    small = max(1, math.ceil(least * rate))
    while small < batch and abs(small / round(small / rate) / rate - 1) > _SAME_RATE:
        small += 1
    return (round(small / rate), small) if small < batch else (records, batch)


@dataclass(frozen=True)
class Cut:
    """A recipe at the size of its audit, with its plan, and what that changes of it."""

    loaded: LoadedRecipe
    outline: data.Outline
    plan: Plan
    canaries: int
    changed: dict[str, Any]


def cut(loaded: LoadedRecipe, outline: data.Outline, whole: Plan, size: Size) -> Cut:
    """The recipe, whose plan is `whole`, for an audit of `size`."""
    records, batch = sized(whole, size, fast_path(loaded))
    small, changed = smaller(loaded, size.trials, batch)
    plan: Plan | None = whole
    if (records, batch) != (whole.sampling.records, whole.sampling.batch_size):
        changed["records"] = records
        plan = plan_of(small, dataclasses.replace(outline, train_records=records, files=(records,)))
    assert plan is not None
    return Cut(small, outline, plan, canaries_of(plan, size), changed)


def stage(made: Cut, watcher: Watcher, earlier: dict[str, Any] | None = None) -> Staged:
    """All trials of the audit, ready for their first epoch (or, with a checkpoint, for where it left off)."""
    recipe, plan, canaries, outline = made.loaded.recipe, made.plan, made.canaries, made.outline
    replaced, convex = plan.sampling.adjacency == "replace-one", fast_path(made.loaded)
    random = np.random.default_rng([0 if recipe.seed is None else recipe.seed, 17])
    inside = random.random((recipe.trials, canaries)) < 0.5
    assert outline.input_shape is not None and recipe.privacy is not None
    clipping = recipe.privacy.clipping
    if convex:
        clip = getattr(recipe.method, "gradient_clip", clipping.norm_bound(1))
        rows = lanes.columns(math.prod(outline.input_shape), canaries, clip, replaced)
    else:
        rows = lanes.marked_rows(outline.input_shape, canaries * (2 if replaced else 1))
    others = plan.sampling.records - canaries
    on = Stage(
        as_users(_dataset(outline, rows, others, convex), recipe.data.unit),
        share=lambda table: _shared(table, inside, replaced),
        instrument=(lambda build: build) if convex else lanes.instrument(canaries, clipping.by_layer),
        watcher=watcher,
    )
    trials = start([Member(made.loaded, plan)], earlier, stage=on)
    places = np.arange(others, plan.sampling.records)
    columns = _convex_columns(trials, canaries) if convex else _lane_columns(trials)
    return Staged(trials, plan, inside, places, columns, -1.0 if convex else 1.0, made.changed)


def without_folds(loaded: LoadedRecipe) -> LoadedRecipe:
    """The recipe as it trains on its whole training part."""
    return dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"folds": None}))


def smaller(loaded: LoadedRecipe, trials: int, batch: int) -> tuple[LoadedRecipe, dict[str, Any]]:
    """The recipe for an audit's trials, and what else it changes."""
    recipe = loaded.recipe
    changed: dict[str, Any] = {}
    method, runtime = recipe.method, recipe.runtime
    if method.batch is not None and method.batch != batch:
        changed["batch_size"] = batch
        method = method.model_copy(update={"batch_size": batch})
    for name, value in (("compile", False), ("dtype", "float32")):
        if getattr(runtime, name) != value:
            changed[name] = value
    runtime = runtime.model_copy(update={"compile": False, "dtype": "float32"})
    update = {"repeats": trials, "folds": None, "method": method, "runtime": runtime, "save_model": False}
    return dataclasses.replace(loaded, recipe=recipe.model_copy(update=update)), changed


def _dataset(outline: data.Outline, rows: np.ndarray, others: int, convex: bool) -> data.Dataset:
    """Rows of chance, and then the canaries, all of label 0 (of a convex model: 1, whose gradient is negative)."""
    random = np.random.default_rng(0)
    assert outline.input_shape is not None
    shape, outputs = outline.input_shape, outline.outputs

    def chance(count: int) -> np.ndarray:
        if not convex:
            return random.random((count, *shape), dtype=np.float32)
        real = random.random((count, math.prod(shape)), dtype=np.float32)
        return np.concatenate([real, np.zeros((count, rows.shape[1] - real.shape[1]), np.float32)], axis=1)

    def labels(count: int) -> np.ndarray:
        return random.integers(outputs, size=count) if outputs > 1 else random.random(count, dtype=np.float32)

    x = np.concatenate([chance(others), rows])
    own = np.full(len(rows), 1 if convex else 0)
    y = np.concatenate([labels(others), own.astype(np.int64 if outputs > 1 else np.float32)])
    test, validation = chance(_TEST_RECORDS), chance(_TEST_RECORDS)
    classes = tuple(range(outputs)) if outputs > 1 else None
    return data.Dataset(
        outline.name, x, y, test, labels(_TEST_RECORDS), False, classes, (), (), {}, norm_bound=outline.norm_bound,
        validation_x=validation, validation_y=labels(_TEST_RECORDS),
    )  # fmt: skip


def _shared(table: Table, inside: np.ndarray, replaced: bool) -> Table:
    """Trials' own parts of the table: a canary's place is empty where it is out, or its replacement's."""
    trials, canaries = inside.shape
    others = table.rows - canaries * (2 if replaced else 1)
    first = np.arange(others, others + canaries)
    out = first + canaries if replaced else np.full(canaries, -1)
    own = np.concatenate([np.tile(np.arange(others), (trials, 1)), np.where(inside, first, out)], axis=1)
    held = np.ones((table.rows, trials), dtype=bool)
    held[:others] = False
    held[first] = ~inside.T
    if replaced:
        held[first + canaries] = inside.T
    device = table.y.device
    return dataclasses.replace(
        table,
        own=torch.from_numpy(own).to(device),
        held_out=torch.from_numpy(held).to(device),
        filled=replaced,
    )


def _lane_columns(trials: Trials) -> list[np.ndarray]:
    """The places of lanes among a pack's parameters, one array (k,) for each layer that has some."""
    spans = trials.context.pack.spans
    found = [span for name, span in spans.items() if name.rpartition(".")[2] == "lanes"]
    return [np.arange(offset, offset + shape.numel()) for offset, shape in found]


def _convex_columns(trials: Trials, canaries: int) -> list[np.ndarray]:
    """The weights of the last features of a convex model; its constant, where it has one, comes after them."""
    offset, shape = next(span for name, span in trials.context.pack.spans.items() if name.endswith("weight"))
    return [np.arange(offset + shape.numel() - canaries, offset + shape.numel())]
