"""The model and the tables of a recipe on its device: the model is built once per trial, and checked.

`engine/models.py` builds one model; `engine/independence.py` compares its gradients with those of the module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.common import interrupts
from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.splits import SECOND_FILE, Keys, places_of_a_fold
from dpsgd_cli.data.users import members_of
from dpsgd_cli.engine import huggingface, losses, models, precision
from dpsgd_cli.engine.coded_rows import CodedRows
from dpsgd_cli.engine.coded_table import CodedTable
from dpsgd_cli.engine.independence import FAILURES, check_model, check_outputs, stand_in_rows
from dpsgd_cli.engine.losses import LOSSES, Loss, LossOf, LossOptions, squared_error, weighted
from dpsgd_cli.engine.packing import Pack, Placement, elements_by_layer, layer_reports
from dpsgd_cli.engine.precision import MOST_ROWS
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.settings import (
    ConvexModel,
    HuggingFaceModel,
    NamedLoss,
    OwnModel,
    PythonLoss,
    PythonModel,
)
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.engine.weights import check_declared, seeded
from dpsgd_cli.errors import DataError, ModelError, UsageError
from dpsgd_cli.methods.base import own_factory
from dpsgd_cli.methods.risks.problem import output_loss
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.preconditioning.price import Marginals
from dpsgd_cli.recipe.loading import LoadedRecipe, own_weights
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.users.run import UnitTable
from dpsgd_cli.users.settings import Unit


def placement(recipe: Recipe, team: Team) -> Placement:
    """Return the device and the precision of a recipe's tensors in this process. Also set torch's CPU threads."""
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    device = _device(recipe.runtime.device, team)
    return Placement(device, precision.PARAMETERS.get(recipe.runtime.dtype, torch.float32))


def _device(name: str, team: Team) -> torch.device:
    """Return the device of this process; make it current if it is a GPU. Raise UsageError if it is not usable."""
    try:
        asked = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        # each process selects its own GPU before anything is allocated on one
        device = team.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"runtime.device {name!r} is not usable here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is not None:
        # streams and events belong to the current device, wherever tensors are
        torch.cuda.set_device(device)
    return device


def loss_of(recipe: Recipe, base: Path, raw: bool = False) -> Loss:
    """Return the per-example loss of the model's outputs; `raw`: for unscaled targets, as those of held-out rows.

    `base` is the folder that a loss of the user's own is relative to.
    """
    data, model = recipe.data, recipe.model
    several = data.labels_are_arrays
    if isinstance(model, ConvexModel):
        loss = output_loss(model, raw)
    elif model.loss is None and not several:
        bounded = not raw and data.target_bounds is not None
        loss = LossOf(squared_error, of_arrays=False, clamps=True) if bounded else LOSSES[data.task]
    else:
        named = model.loss if isinstance(model.loss, NamedLoss) else NamedLoss(kind="squared")
        low, high = data.target_bounds or (-1.0, 1.0)
        weights = data.weights if several else None
        options = LossOptions(named.smoothing, named.ignore_index, named.width, weights, low, high)
        loss = losses.made(model.loss, data.task, options, several, not raw and data.target_bounds is not None, base)
    return loss if data.weights is None or several else weighted(loss, data.weights)


def outputs_of(recipe: Recipe, name: str, classes: int | None) -> int:
    """Return the number of outputs per example; a convex model has one for two classes. No `classes`: regression."""
    data = recipe.data
    if data.weights is not None and len(data.weights) != classes:
        told = count(len(data.weights), "class", "classes")
        raise DataError(f"data.class_weights: is for {told}, and {name} has {classes}")
    if data.costs is not None and classes != 2:
        raise DataError(f"data.costs: are of two classes, and {name} has {classes}; use data.class_weights")
    if not isinstance(recipe.model, ConvexModel):
        return classes or 1
    if classes is not None and classes != 2:
        raise ModelError(f"model.kind: convex tells two classes apart, and {name} has {classes}; use linear")
    return 1


def make_pack(
    loaded: LoadedRecipe,
    shape: tuple[int, ...],
    outputs: int,
    seeds: Sequence[int],
    place: Placement,
    instrument: Callable[[models.Builder], models.Builder] | None = None,
) -> Pack:
    """Return the recipe's model, built once per seed; an audit may `instrument` it.

    Raises ModelError if it cannot be trained privately.
    """
    build = models.builder(loaded.recipe.model, shape, outputs, loaded.base, loaded.recipe.data.inputs)
    if instrument is not None:
        build = instrument(build)
    return Pack(build, seeds, place, trusted=loaded.recipe.model.kind in models.BUILT_IN)


def checked(pack: Pack, loaded: LoadedRecipe, train: Table, outputs: int, seeds: Sequence[int]) -> int:
    """Check the model, set it to the recipe's precision, and return the number of rows that it may be given at once.

    Every model's gradients are compared with autograd of the module (`engine/independence.py`), and it must take one
    clipped step on random rows. Numbers of a user's own model must be declared. Raises ModelError if it fails.
    """
    recipe = loaded.recipe
    rows = stand_in_rows(train.input_shape, train.x.new_empty(0))
    check_outputs(pack, rows, answer_shape(recipe, outputs, tuple(train.y.shape[1:])))
    _check_loss(pack, loaded, outputs, tuple(train.y.shape[1:]), rows)
    fit = min(recipe.runtime.micro_batch or rows_that_fit(pack, rows), MOST_ROWS)
    check_model(pack, train.input_shape, train.x.new_empty(0))
    if isinstance(recipe.model, PythonModel):
        build = models.builder(recipe.model, train.input_shape, outputs, loaded.base, recipe.data.inputs)
        names = models.loaded_names(recipe.model, loaded.base)
        prefix = "model." if recipe.data.inputs else ""
        check_declared(build, recipe.model.weights, [prefix + name for name in names])
    own = recipe.model.dtype if isinstance(recipe.model, HuggingFaceModel) else None
    dtype = own or recipe.runtime.dtype
    pack.work_in(precision.PASSES.get(dtype), dtype == "tf32")
    _check_step(pack, loaded, rows, tuple(train.y.shape[1:]))
    return fit


def answer_shape(recipe: Recipe, outputs: int, label: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the shape of a model's outputs for one example, with None for any size, given the shape of its label."""
    if recipe.data.task == "token-classification":
        return (*label, outputs)
    return (*label, None) if recipe.data.task == "next-token" else (outputs,)


def _labels(recipe: Recipe, outputs: Tensor, label: tuple[int, ...]) -> Tensor:
    """Return random labels (B, ...) for outputs (B, ...), on their device."""
    generator = torch.Generator().manual_seed(0)
    if recipe.data.task == "regression":
        return torch.rand(len(outputs), *label, generator=generator).to(outputs)
    most = 2 if recipe.data.task == "multi-label" else max(2, outputs.shape[-1])
    return torch.randint(most, (len(outputs), *label), generator=generator).to(outputs.device)


def _check_loss(pack: Pack, loaded: LoadedRecipe, outputs: int, label: tuple[int, ...], rows: Tensor) -> None:
    """Try a loss of the user's own for mixing, on random outputs."""
    if not isinstance(getattr(loaded.recipe.model, "loss", None), PythonLoss):
        return
    generator = torch.Generator().manual_seed(1)
    shape = answer_shape(loaded.recipe, outputs, label)
    told = torch.randn(4, *[one or 4 for one in shape], generator=generator).to(pack.values)
    labels = _labels(loaded.recipe, told, label)
    losses.check_apart(loss_of(loaded.recipe, loaded.base), told[None], labels[None])


def _check_step(pack: Pack, loaded: LoadedRecipe, rows: Tensor, label: tuple[int, ...]) -> None:
    """Refuse a model that cannot take a clipped step on `rows` (B, ...) with random labels. The sums are dropped."""
    with torch.no_grad(), pack.session.passes.masks.off():
        y = _labels(loaded.recipe, pack(rows[None])[0], label)
    clipping = Clipping(torch.ones(1, pack.trials).to(pack.values))
    try:
        with pack.session.passes.masks.off():
            add_clipped_sums(
                pack,
                (rows[None], y[None], None),
                loss_of(loaded.recipe, loaded.base),
                clipping,
                Diagnostics(pack.trials, pack.values.device),
            )
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise ModelError(f"the model runs, but no clipped step can be taken with it: {error}") from error
    finally:
        pack.sums.zero_()
        for layer in pack.layers:
            layer.forget()


def weights_told(loaded: LoadedRecipe) -> list[str]:
    """Return a line that names the tensors loaded from `model.weights.file`; empty without such a file."""
    names, files = models.loaded_names(loaded.recipe.model, loaded.base), own_weights(loaded.recipe)
    return [f"  loaded from {files[0]}{': ' if names else ''}{', '.join(names)}"] if files else []


def check_without_data(loaded: LoadedRecipe, outline: data.Outline) -> None:
    """Make those checks of a model and of a user's own method that need no data.

    A model is checked on the device of the training with a single process.
    """
    recipe, shape = loaded.recipe, outline.input_shape
    if isinstance(recipe.method, PythonMethod):
        own_factory(recipe.method, loaded.base)
    outputs = outputs_of(recipe, outline.name, outline.outputs if outline.outputs > 1 else None)
    place = placement(recipe, Team())
    none = torch.empty((0, *shape), device=place.device, dtype=dtype_of_inputs(recipe, outline, place.dtype))
    labels = torch.empty((0, *outline.label_shape), device=place.device)
    checked(make_pack(loaded, shape, outputs, [0], place), loaded, Table(none, labels, False), outputs, [0])


def model_report(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield one line per layer, then the memory that a step needs per record and trial (`recipe check-model`).

    Raises ModelError with all reasons if a layer is refused.
    """
    outline = data.outline(loaded.recipe.data, loaded.base)
    recipe, shape = loaded.recipe, outline.input_shape
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        outputs = outputs_of(recipe, outline.name, outline.outputs if outline.outputs > 1 else None)
        layers = layer_reports(seeded(models.builder(recipe.model, shape, outputs, loaded.base, recipe.data.inputs), 0))
        yield f"{recipe.name}: inputs {tuple(shape)}, {count(outputs, 'output')}"
        for layer in layers:
            how = layer.clipped if layer.refused is None else "REFUSED, see below"
            yield f"  {layer.name or '(the model)'}: {layer.kind}, {count(layer.parameters, 'parameter')}: {how}"
        yield from weights_told(loaded)
        if refused := [layer.refused for layer in layers if layer.refused is not None]:
            raise ModelError("\n".join(refused))
        check_without_data(loaded, outline)
        pack = make_pack(loaded, shape, outputs, [0], Placement(torch.device("cpu")))
        like = torch.empty(0, dtype=dtype_of_inputs(recipe, outline, torch.float32))
        held = elements_by_layer(pack, stand_in_rows(shape, like))
    most = max(held, key=lambda name: held[name])
    yield f"  no layer is refused; a step holds about {sum(held.values()):,} numbers per record and trial,"
    yield f"  most of them, {held[most]:,}, for {most or 'the model'}"


def tables(recipes: Sequence[Recipe], dataset: data.Dataset, place: Placement) -> tuple[Table, Table]:
    """Return the training and the test table; with folds, both are parts of one table of all rows."""
    unit, keys = recipes[0].data.unit, dataset.keys
    if recipes[0].folds is None:
        own = ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y))
        of_codes = _of_codes(recipes[0], place)
        train, test = (_table(in_numbers(recipes[0], x), y, dataset.per_trial, place, of_codes) for x, y in own)
        if unit is not None:
            assert keys is not None
            train = _by_user(train, keys.values[: len(dataset.train_y)], unit)
        return train if dataset.train_records is None else train.with_places(dataset.train_records), test
    x, y = _all_rows(dataset)
    x = in_numbers(recipes[0], x)
    assert keys is not None
    train = _table(x, y, dataset.per_trial, place)
    out = own_folds(recipes, keys)
    most = places_of_a_fold(_files(keys), recipes[0].folds, keys.by_place)
    if unit is None:
        return train.with_folds(out, most), train.with_folds(~out)
    # all rows of a user are in one fold
    users = replace(keys, values=np.unique(keys.values))
    return _by_user(train, keys.values, unit).with_folds(own_folds(recipes, users), most), train.with_folds(~out)


def _by_user(rows: Table, keys: np.ndarray, unit: Unit) -> Table:
    """Return the table of users, given the rows and the key of each row's user."""
    return UnitTable.of(rows, torch.from_numpy(members_of(keys, unit.most_rows)[1]))


def own_folds(recipes: Sequence[Recipe], keys: Keys) -> torch.Tensor:
    """Return the mask, bool (N, R), of the rows that each trial is tested on and does not train on."""
    held = [keys.folds(r.folds or 1, r.repeats, r.seed or 0) for r in recipes]
    return torch.from_numpy(np.concatenate(held, axis=1))


def _files(keys: Keys) -> tuple[int, ...]:
    """Return the number of records, or of users, in each file; one total if keys are not places."""
    if not keys.by_place:
        return (len(np.unique(keys.values)) if keys.of_users else len(keys),)
    return tuple(np.bincount(np.unique(keys.values) // SECOND_FILE).tolist())


def _all_rows(dataset: data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels of all rows, training rows first; not for rows on disk, which folds do not take."""
    held = (dataset.train_x, dataset.test_x, dataset.train_y, dataset.test_y)
    arrays = [rows for rows in held if isinstance(rows, np.ndarray)]
    assert len(arrays) == len(held)
    return np.concatenate(arrays[:2], axis=int(dataset.per_trial)), np.concatenate(arrays[2:])


def _of_codes(recipe: Recipe, place: Placement) -> bool:
    """Return True if a method may train on codes: it reads no features by itself."""
    made = recipe.method.kind == "dp-sgd" and place.device.type == "cpu" and recipe.data.augment is None
    read = recipe.method.conditioned is not None and not isinstance(recipe.method.conditioned, Marginals)
    return made and not read and recipe.method.inferred is None


def in_numbers(recipe: Recipe, x: Any) -> Any:
    """Return rows as floats if they are integers and the model takes floats: every model but a user's own."""
    if getattr(x, "dtype", None) != np.int64 or isinstance(recipe.model, OwnModel):
        return x
    return np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x.then(_floats)


def refuse_unknown_tokens(loaded: LoadedRecipe, rows: Any) -> None:
    """Raise DataError for a token in `rows` (N, ...) that the model of a local folder does not know.

    Rows on disk are not searched. With named inputs, they are those of `input_ids`.
    """
    model, inputs = loaded.recipe.model, loaded.recipe.data.inputs or {}
    if not isinstance(model, HuggingFaceModel) or not isinstance(rows, np.ndarray) or rows.dtype != np.int64:
        return
    first = 0
    for name, told in inputs.items():
        width = math.prod(told.shape)
        if name == "input_ids":
            rows = rows[:, first : first + width]
        first += width
    known = huggingface.vocabulary(loaded.base / model.folder)
    if known is not None and rows.max(initial=0) >= known:
        raise DataError(
            f"{loaded.recipe.name}: the records hold a token of {known} or more, and the model in {model.folder} knows"
            f" 0 to {known - 1}; use the tokenizer that belongs to it"
        )


def dtype_of_inputs(recipe: Recipe, outline: data.Outline, usual: torch.dtype) -> torch.dtype:
    """Return the dtype of a model's inputs: int64 for integers that reach it as they are, else the `usual` one."""
    return torch.int64 if outline.integers and isinstance(recipe.model, OwnModel) else usual


def _floats(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def _table(x: data.Rows, y: data.Rows, per_trial: bool, place: Placement, of_codes: bool = False) -> Table:
    """Return a table of rows: their codes if `of_codes`, features in memory on the training device, or left on disk."""
    if isinstance(x, CodedRows) and of_codes:
        return CodedTable.open(x, y, place.dtype)
    if isinstance(x, np.ndarray | CodedRows) and isinstance(y, np.ndarray):
        return Table.load(np.asarray(x), y, per_trial, place.device, place.dtype)
    assert not isinstance(x, np.ndarray) and not isinstance(y, np.ndarray)
    return StreamedTable.open(x, y, place.device, place.dtype)


def held_out(recipe: Recipe, x: Any, y: Any, per_trial: bool, place: Placement) -> Table | None:
    """Return the table of validation or public rows, or None."""
    return None if x is None or y is None else _table(in_numbers(recipe, x), y, per_trial, place)
