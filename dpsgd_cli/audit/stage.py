"""Preparation of an audit: the recipe on random synthetic rows, with canaries that are in by a fair coin.

The audit trains the recipe's own planner, ledger, sampler, clipping, noise, normaliser, schedule and update. Random
rows and canaries replace the records. If that would take long, there are fewer of both and batches shrink in
proportion. Sampling rates and batches per epoch, and therefore the plan, stay the same up to rounding.
`StagedTrials.changed` lists what an audit of this size changes of a recipe.

Each trial tosses its own coins. A canary that is out leaves an empty place that adds nothing, so the public number of
records does not depend on the coins. Under replace-one, another canary with the opposite gradient takes the place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit import canaries as canary_inputs
from dpsgd_cli.audit.findings import AuditSize
from dpsgd_cli.common.plugins import named
from dpsgd_cli.data.users import as_users
from dpsgd_cli.engine.context import AuditHook
from dpsgd_cli.engine.settings import ConvexModel, LinearModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.dp_gd import FullBatchMethod
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import DataOverride, Member, Trials, start

_FEW_RECORDS = 64
_CONVEX_RECORDS = 5000
_FIXED_RECORDS = 500
_UNKNOWN_LENGTH = 1000
_SAME_RATE = 0.01
_TEST_RECORDS = 8
_STEADY = 0.1
_FEATURES = 200
"""Largest number of features behind a preconditioner, where every trial releases second moments of its own."""


@dataclass(frozen=True)
class StagedTrials:
    """An audit that is ready to train.

    - `inside` (R, k): which canaries are in.
    - `places` (k,): rows of the canaries.
    - `columns`: canary coordinates among the parameters, one array (k,) for each layer or output that has them.
    - `signs`: sign of a canary's gradient on its coordinate.
    - `changed`: what the audit changes of the recipe.
    - `vectors`: gradients of canaries whose gradients differ in length; else None.
    """

    trials: Trials
    plan: Plan
    inside: np.ndarray
    places: np.ndarray
    columns: list[np.ndarray]
    signs: float
    changed: dict[str, Any]
    vectors: canary_inputs.VectorCanaries | None = None


def fast_path(loaded: SettledRecipe) -> bool:
    """Return whether the method computes a convex model's gradients without layers."""
    recipe = loaded.recipe
    by_record = isinstance(recipe.method, Gradient) and recipe.method.one_by_one
    kinds = recipe.method.batching == "full" or by_record
    plain = recipe.method.conditioned is None and recipe.data.unit is None
    return isinstance(recipe.model, ConvexModel) and kinds and plain


def uses_vector_canaries(loaded: SettledRecipe) -> bool:
    """Return whether canaries' gradients differ in length: with a preconditioner, or on a dense layer's fast path."""
    recipe = loaded.recipe
    runs = named(recipe.method.described.runs)
    dense = isinstance(recipe.model, LinearModel) and isinstance(runs, type) and issubclass(runs, FullBatchMethod)
    return (dense and recipe.data.unit is None) or recipe.method.conditioned is not None


def canaries_of(plan: Plan, size: AuditSize) -> int:
    """Return the number of canaries: `size.canaries`, but at most a third of the records, and at least 1."""
    return max(1, min(size.canaries, plan.sampling.records // 3))


def sized(plan: Plan, size: AuditSize, convex: bool) -> tuple[int, int]:
    """Return the records and expected batch size of the audit: the recipe's own, or fewer if those take too long."""
    sampling, canaries = plan.sampling, canaries_of(plan, size)
    records, batch = sampling.records, sampling.batch_size
    steps = (plan.most_epochs or _UNKNOWN_LENGTH) * sampling.steps_per_epoch
    if size.trials * steps * batch <= size.rows:
        return records, batch
    least = max(3 * canaries, _FEW_RECORDS, min(records, _CONVEX_RECORDS) if convex else 0)
    if batch == records:
        return (least, least) if least < records else (records, batch)
    if sampling.batching == "fixed" and batch == 1:
        return min(records, max(least, _FIXED_RECORDS)), batch
    if sampling.kind.by_epoch:
        small = -(-least // sampling.steps_per_epoch)
        return (small * sampling.steps_per_epoch, small) if small < batch else (records, batch)
    # share of all records, also if groups of them take turns
    rate = sampling.rate / sampling.groups
    # a fixed batch of one record would be another method
    small = max(2 if sampling.batching == "fixed" else 1, math.ceil(least * rate))
    while small < batch and abs(small / round(small / rate) / rate - 1) > _SAME_RATE:
        small += 1
    return (round(small / rate), small) if small < batch else (records, batch)


def _at_audit_size(
    loaded: SettledRecipe, outline: data.Outline, whole: Plan, size: AuditSize
) -> tuple[SettledRecipe, data.Outline, Plan, dict[str, Any]]:
    """Return the recipe, whose plan is `whole`, at the `size` of its audit, its data and plan, and what changes."""
    records, batch = sized(whole, size, fast_path(loaded))
    small, changed = smaller(loaded, size.trials, batch)
    plan: Plan | None = whole
    if loaded.recipe.method.conditioned is not None and math.prod(outline.input_shape) > _FEATURES:
        changed["features"] = _FEATURES
        outline = dataclasses.replace(outline, input_shape=(_FEATURES,))
    if (records, batch) != (whole.sampling.records, whole.sampling.batch_size):
        changed["records"] = records
        if uses_vector_canaries(loaded):
            small = _as_steady(small, records / whole.sampling.records, changed)
        plan = plan_of(small, dataclasses.replace(outline, train_records=records, files=(records,)))
    assert plan is not None
    return small, outline, plan, changed


def _as_steady(loaded: SettledRecipe, share: float, changed: dict[str, Any]) -> SettledRecipe:
    """Return the recipe with a smaller learning rate, so that noise does not decide whether a canary is learned.

    A canary that has been learned has no gradient left to find. The new rate is noted in `changed`.
    """
    rate = getattr(loaded.recipe.method, "learning_rate", None)
    if not isinstance(rate, int | float):
        return loaded
    changed["learning_rate"] = rate * share * _STEADY
    method = loaded.recipe.method.changed(learning_rate=rate * share * _STEADY)
    return dataclasses.replace(loaded, recipe=loaded.recipe.changed(method=method))


def build_canaries(
    loaded: SettledRecipe, outline: data.Outline, whole: Plan, size: AuditSize, watcher: AuditHook
) -> StagedTrials:
    """Return the trials of a recipe, whose plan is `whole`, at the `size` of its audit, ready for their first epoch."""
    small, outline, plan, changed = _at_audit_size(loaded, outline, whole, size)
    recipe, canaries = small.recipe, canaries_of(plan, size)
    replaced, by_vectors = plan.sampling.adjacency == "replace-one", uses_vector_canaries(small)
    convex = fast_path(small) or by_vectors
    random = np.random.default_rng([0 if recipe.seed is None else recipe.seed, 17])
    inside = random.random((recipe.trials, canaries)) < 0.5
    clipping = recipe.required_privacy.clipping
    if convex:
        clip = getattr(recipe.method, "gradient_clip", clipping.norm_bound(1))
        rows = canary_inputs.columns(math.prod(outline.input_shape), canaries, clip, replaced)
    else:
        rows = canary_inputs.marked_rows(outline.input_shape, canaries * (2 if replaced else 1))
        rows = rows.astype(np.int64) if outline.integers else rows
    others = plan.sampling.records - canaries
    # label 1 of a convex model's canaries makes their gradient negative
    label = int(isinstance(recipe.model, ConvexModel) and convex)
    on = DataOverride(
        as_users(_dataset(outline, rows, others, convex, recipe.method.conditioned is not None, label), recipe.data),
        share=lambda table: _shared(table, inside, replaced),
        instrument=(lambda build: build) if convex else canary_inputs.instrument(canaries, clipping.by_layer),
        watcher=watcher,
    )
    trials = start([Member(small, plan)], override=on)
    places = np.arange(others, plan.sampling.records)
    columns = _last_features(trials, canaries) if convex else _canary_columns(trials)
    instead = places + canaries if replaced else None
    vectors = canary_inputs.VectorCanaries(trials, places, instead, columns) if by_vectors else None
    return StagedTrials(trials, plan, inside, places, columns, -1.0 if convex else 1.0, changed, vectors)


def without_folds(loaded: SettledRecipe) -> SettledRecipe:
    """Return the recipe without folds: it trains on its whole training part."""
    return dataclasses.replace(loaded, recipe=loaded.recipe.changed(folds=None))


def smaller(loaded: SettledRecipe, trials: int, batch: int) -> tuple[SettledRecipe, dict[str, Any]]:
    """Return the recipe for an audit of `trials` trials and batches of `batch`, and the settings that this changes."""
    recipe = loaded.recipe
    changed: dict[str, Any] = {}
    method, runtime = recipe.method, recipe.runtime
    if method.batch is not None and method.batch != batch:
        changed["batch_size"] = batch
        method = method.changed(batch_size=batch)
    dtype = "float64" if runtime.dtype == "float64" else "float32"
    for name, value in (("compile", False), ("dtype", dtype)):
        if getattr(runtime, name) not in (value, "auto"):
            changed[name] = value
    runtime = runtime.changed(compile=False, dtype=dtype)
    update = {"repeats": trials, "folds": None, "method": method, "runtime": runtime, "save_model": False}
    return dataclasses.replace(loaded, recipe=recipe.changed(**update)), changed


def _dataset(
    outline: data.Outline, rows: np.ndarray, others: int, flat: bool, silent: bool, label: int
) -> data.Dataset:
    """Return as many `others`, followed by the canaries' `rows` with their `label`.

    Other rows are random, or 0 if `silent`. `flat` means that rows are vectors of features.
    """
    random = np.random.default_rng(0)
    shape, outputs = outline.input_shape, outline.outputs

    def chance(count: int) -> np.ndarray:
        if not flat:
            return random_inputs(random, count, outline)
        real = random.random((count, math.prod(shape)), dtype=np.float32) * np.float32(not silent)
        return np.concatenate([real, np.zeros((count, rows.shape[1] - real.shape[1]), np.float32)], axis=1)

    labels = partial(random_labels, random, outline=outline)
    x = np.concatenate([chance(others), rows])
    own = np.full((len(rows), *outline.label_shape), label)
    y = np.concatenate([labels(others), own.astype(np.int64 if outputs > 1 else np.float32)])
    test, validation = chance(_TEST_RECORDS), chance(_TEST_RECORDS)
    truth = labels(_TEST_RECORDS)
    return synthetic(outline, (x, y), (test, truth), validation_x=validation, validation_y=labels(_TEST_RECORDS))


def synthetic(
    outline: data.Outline, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], **more: Any
) -> data.Dataset:
    """Return a data set of synthetic rows: features and labels for training and for tests."""
    classes = tuple(range(outline.outputs)) if outline.outputs > 1 else None
    return data.Dataset(outline.name, *train, *test, False, classes, (), (), {}, norm_bound=outline.norm_bound, **more)


def random_inputs(random: np.random.Generator, count: int, outline: data.Outline) -> np.ndarray:
    """Return random inputs (count, ...): numbers in [0, 1), or integers 0 and 1, which are tokens and masks."""
    if outline.integers:
        return random.integers(2, size=(count, *outline.input_shape))
    return random.random((count, *outline.input_shape), dtype=np.float32)


def random_labels(random: np.random.Generator, count: int, outline: data.Outline) -> np.ndarray:
    """Return random classes, or random targets in [0, 1) for one output; (count, ...) where labels are arrays."""
    shape = (count, *outline.label_shape)
    return (
        random.integers(outline.outputs, size=shape) if outline.outputs > 1 else random.random(shape, dtype=np.float32)
    )


def run_epochs(trials: Trials) -> None:
    """Train to the end."""
    while trials.done < trials.method.epochs and not trials.method.finished:
        trials.method.run_epoch(trials.done)
        trials.done += 1


def without(place: int, trials: int = 1) -> Callable[[Table], Table]:
    """Return a function that leaves the place of one record of a table empty, in every trial."""

    def share(table: Table) -> Table:
        own = torch.arange(table.rows, device=table.y.device)
        own[place] = -1
        held = (own < 0)[:, None].repeat(1, trials)
        return dataclasses.replace(table, own=own.repeat(trials, 1), held_out=held, filled=False)

    return share


def _shared(table: Table, inside: np.ndarray, replaced: bool) -> Table:
    """Return the table with each trial's own rows: the place of a canary that is out is empty, or its replacement's."""
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
    rows, absent = (torch.from_numpy(one).to(table.y.device) for one in (own, held))
    return dataclasses.replace(table, own=rows, held_out=absent, filled=replaced)


def _canary_columns(trials: Trials) -> list[np.ndarray]:
    """Return the canary coordinates among all parameters, an array (k,) for each layer that has them."""
    spans = trials.context.pack.spans
    found = [span for name, span in spans.items() if name.rpartition(".")[2] == "canary_coordinates"]
    return [np.arange(offset, offset + shape.numel()) for offset, shape in found]


def _last_features(trials: Trials, canaries: int) -> list[np.ndarray]:
    """Return the weights of a dense layer's last features, an array (k,) for each output.

    In the vector of parameters, the constant (if the layer has one) follows the weights.
    """
    offset, shape = next(span for name, span in trials.context.pack.spans.items() if name.endswith("weight"))
    width = shape[-1]
    ends = range(offset + width, offset + shape.numel() + 1, width)
    return [np.arange(end - canaries, end) for end in ends]
