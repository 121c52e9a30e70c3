"""The model and the tables of a recipe on its device: the model is built once per trial, and checked.

`engine/models.py` builds one model; `engine/independence.py` tests that examples do not affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from dpsgd_cli.engine import models, precision
from dpsgd_cli.engine.independence import (
    FAILURES,
    check_batches,
    check_examples_stay_apart,
    check_nothing_is_asked,
    check_outputs,
    runs_on,
    spread_rows,
    stand_in_rows,
)
from dpsgd_cli.engine.losses import LOSSES, Loss, bounded_squared_error, weighted
from dpsgd_cli.engine.packing import Pack, Placement, elements_by_layer, layer_reports
from dpsgd_cli.engine.precision import MOST_ROWS
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.settings import ConvexModel, PythonModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.engine.weights import check_declared, seeded
from dpsgd_cli.errors import DataError, ModelError, UsageError
from dpsgd_cli.methods.base import own_factory
from dpsgd_cli.methods.risks.problem import output_loss
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, own_weights
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.users.run import UnitTable
from dpsgd_cli.users.settings import Unit

_MOST_SPREAD = 64
"""Most rows of a batch in which a user's own model is tested on numbers of unusual size."""


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


def loss_of(recipe: Recipe, raw: bool = False) -> Loss:
    """Return the per-example loss of the model's outputs; `raw`: for unscaled targets, as those of held-out rows."""
    data = recipe.data
    if isinstance(recipe.model, ConvexModel):
        loss = output_loss(recipe.model, raw)
    else:
        loss = LOSSES[data.task] if raw or data.target_bounds is None else bounded_squared_error
    return loss if data.weights is None else weighted(loss, data.weights)


def outputs_of(recipe: Recipe, name: str, classes: int | None) -> int:
    """Return the number of outputs per example; a convex model has one for two classes. No `classes`: regression."""
    data = recipe.data
    if data.weights is not None and len(data.weights) != classes:
        key = "balanced" if data.balanced is not None else "class_weights"
        raise DataError(f"data.{key}: is for {count(len(data.weights), 'class', 'classes')}, and {name} has {classes}")
    if data.costs is not None and classes != 2:
        raise DataError(f"data.costs: are of two classes, and {name} has {classes}; use data.class_weights")
    if not isinstance(recipe.model, ConvexModel):
        return classes or 1
    if classes is not None and classes != 2:
        raise ModelError(f"model.kind: convex tells two classes apart, and {name} has {classes}; use linear")
    return 1


def make_pack(
    loaded: LoadedRecipe,
    shape: tuple[int, ...] | None,
    outputs: int,
    seeds: Sequence[int],
    place: Placement,
    instrument: Callable[[models.Builder], models.Builder] | None = None,
) -> Pack:
    """Return the recipe's model, built once per seed; an audit may `instrument` it.

    Raises ModelError if it cannot be trained privately.
    """
    if shape is None:
        raise ModelError(f"{loaded.source}: the shape of one input is not known")
    build = models.builder(loaded.recipe.model, shape, outputs, loaded.base)
    if instrument is not None:
        build = instrument(build)
    return Pack(build, seeds, place, shares_input=loaded.recipe.model.kind in models.BUILT_IN)


def checked(pack: Pack, loaded: LoadedRecipe, train: Table, outputs: int, seeds: Sequence[int]) -> int:
    """Check the model, set it to the recipe's precision, and return the number of rows that it may be given at once.

    Every model must take one clipped step on random rows. Only a user's own model is tested for independence of
    examples in many batches and for the origin of its numbers; built-in models are known to be correct. Raises
    ModelError for a model that fails.
    """
    recipe = loaded.recipe
    rows = _check_model(pack, train, outputs, recipe.runtime.micro_batch)
    if recipe.model.kind == "python":
        # in training the model gets the rows of all trials, one below the other
        check_batches(pack, stand_in_rows(train.input_shape, train.x), _rows_at_once(recipe, len(train), rows))
        _check_further(loaded, train, outputs, seeds, rows)
        assert isinstance(recipe.model, PythonModel)
        build = models.builder(recipe.model, train.input_shape, outputs, loaded.base)
        check_declared(build, recipe.model.weights, models.loaded_names(recipe.model, loaded.base))
    pack.work_in(precision.PASSES.get(recipe.runtime.dtype), recipe.runtime.dtype == "tf32")
    _check_step(pack, recipe, stand_in_rows(train.input_shape, train.x), outputs)
    return rows


def _check_step(pack: Pack, recipe: Recipe, rows: Tensor, outputs: int) -> None:
    """Refuse a model that cannot take a clipped step on `rows` (B, ...) with random labels. The sums are dropped."""
    generator = torch.Generator().manual_seed(0)
    if recipe.data.task == "regression":
        y = torch.rand(len(rows), generator=generator).to(pack.values)
    else:
        y = torch.randint(max(2, outputs), (len(rows),), generator=generator).to(pack.values.device)
    clipping = Clipping(torch.ones(1, pack.trials).to(pack.values))
    try:
        add_clipped_sums(
            pack,
            (rows[None], y[None], None),
            loss_of(recipe),
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
    return [f"  loaded from {files[0]}: {', '.join(names)}"] if files else []


def check_without_data(loaded: LoadedRecipe, outline: data.Outline) -> None:
    """Make those checks of a model and of a user's own method that need no data.

    A model is checked if the shape of an input is known, on the device of the training with a single process.
    """
    recipe, shape = loaded.recipe, outline.input_shape
    if isinstance(recipe.method, PythonMethod):
        own_factory(recipe.method, loaded.base)
    if shape is None:
        return
    outputs = outputs_of(recipe, outline.name, outline.outputs if outline.outputs > 1 else None)
    place = placement(recipe, Team())
    none = torch.empty((0, *shape), device=place.device, dtype=place.dtype)
    checked(make_pack(loaded, shape, outputs, [0], place), loaded, Table(none, none, False), outputs, [0])


def model_report(loaded: LoadedRecipe) -> Iterator[str]:
    """Yield one line per layer, then the memory that a step needs per record and trial (`recipe check-model`).

    Raises ModelError with all reasons if a layer is refused.
    """
    outline = data.outline(loaded.recipe.data, loaded.base)
    recipe, shape = loaded.recipe, outline.input_shape
    if shape is None:
        raise ModelError(f"{loaded.source}: the shape of one input is not known")
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        outputs = outputs_of(recipe, outline.name, outline.outputs if outline.outputs > 1 else None)
        layers = layer_reports(seeded(models.builder(recipe.model, shape, outputs, loaded.base), 0))
        yield f"{recipe.name}: inputs {tuple(shape)}, {count(outputs, 'output')}"
        for layer in layers:
            how = layer.clipped if layer.refused is None else "REFUSED, see below"
            yield f"  {layer.name or '(the model)'}: {layer.kind}, {count(layer.parameters, 'parameter')}: {how}"
        yield from weights_told(loaded)
        if refused := [layer.refused for layer in layers if layer.refused is not None]:
            raise ModelError("\n".join(refused))
        check_without_data(loaded, outline)
        pack = make_pack(loaded, shape, outputs, [0], Placement(torch.device("cpu")))
        held = elements_by_layer(pack, stand_in_rows(shape, torch.empty(0)))
    most = max(held, key=lambda name: held[name])
    yield f"  no layer is refused; a step holds about {sum(held.values()):,} numbers per record and trial,"
    yield f"  most of them, {held[most]:,}, for {most or 'the model'}"


def _check_model(pack: Pack, train: Table, outputs: int, asked: int | None) -> int:
    """Check that the model fits the data and keeps examples independent. Return the rows per trial that fit at once."""
    rows = stand_in_rows(train.input_shape, train.x)
    check_outputs(pack, rows, outputs)
    check_examples_stay_apart(pack, rows)
    return min(asked or rows_that_fit(pack, rows), MOST_ROWS)


def _check_further(loaded: LoadedRecipe, train: Table, outputs: int, seeds: Sequence[int], fit: int) -> None:
    """Check that a user's model uses no Python number from its input, and keeps examples of all magnitudes independent.

    Batches are at most those of training, where `fit` rows are held at once, and only those that the model accepts. The
    check is on the CPU: an error such as an index beyond a table's end would make a GPU unusable.
    """
    place = Placement(torch.device("cpu"), train.x.dtype if train.x.is_floating_point() else torch.float32)
    pack = make_pack(loaded, train.input_shape, outputs, seeds, place)
    like = torch.empty(0, dtype=train.x.dtype)
    check_nothing_is_asked(pack, stand_in_rows(train.input_shape, like))
    most = _rows_at_once(loaded.recipe, len(train), fit)
    check_batches(pack, stand_in_rows(train.input_shape, like), most)
    for number, batch in enumerate(spread_rows(train.input_shape, like)):
        if runs_on(pack, batch):
            check_examples_stay_apart(pack, batch)
            check_batches(pack, batch, min(most, _MOST_SPREAD) if number else most)


def _rows_at_once(recipe: Recipe, records: int, fit: int) -> int:
    """Return the rows of a trial in one training pass: the batch, else all records, but at most `fit`."""
    batch = getattr(recipe.method, "batch_size", None) or records or fit
    beside = 1 if recipe.data.unit is None else recipe.data.unit.most_rows
    return max(2, min(batch * beside, fit))


def tables(recipes: Sequence[Recipe], dataset: data.Dataset, place: Placement) -> tuple[Table, Table]:
    """Return the training and the test table; with folds, both are parts of one table of all rows."""
    unit, keys = recipes[0].data.unit, dataset.keys
    if recipes[0].folds is None:
        own = ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y))
        train, test = (_table(x, y, dataset.per_trial, place) for x, y in own)
        if unit is not None:
            assert keys is not None
            train = _by_user(train, keys.values[: len(dataset.train_y)], unit)
        return train if dataset.train_records is None else train.with_places(dataset.train_records), test
    x, y = _all_rows(dataset)
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
    """Return features and labels of all rows, training rows first. Raises UsageError for rows on disk."""
    held = (dataset.train_x, dataset.test_x, dataset.train_y, dataset.test_y)
    arrays = [rows for rows in held if isinstance(rows, np.ndarray)]
    if len(arrays) < len(held):
        raise UsageError("folds hold all rows in memory; save features and labels as one npz file, or leave folds out")
    return np.concatenate(arrays[:2]), np.concatenate(arrays[2:])


def _table(x: data.Rows, y: data.Rows, per_trial: bool, place: Placement) -> Table:
    """Return a table of rows, in memory on the training device or left on disk."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return Table.load(np.asarray(x), np.asarray(y), per_trial, place.device, place.dtype)
    return StreamedTable.open(x, y, per_trial, place.device, place.dtype)


def held_out(x: Any, y: Any, per_trial: bool, place: Placement) -> Table | None:
    """Return the table of validation or public rows, or None."""
    return None if x is None or y is None else _table(x, y, per_trial, place)
