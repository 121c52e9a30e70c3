"""The model of a recipe, built once per trial, with its device, its loss, and the checks that may refuse it.

`engine/models.py` builds one model; `engine/independence.py` tests that examples do not affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
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
from dpsgd_cli.engine.losses import LOSSES, Loss, bounded_squared_error
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.precision import MOST_ROWS
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.settings import ConvexModel, PythonModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.engine.weights import check_declared
from dpsgd_cli.errors import ModelError, UsageError
from dpsgd_cli.methods.base import own_factory
from dpsgd_cli.methods.risks.problem import output_loss
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, own_weights
from dpsgd_cli.recipe.schema import Recipe

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
    if isinstance(recipe.model, ConvexModel):
        return output_loss(recipe.model, raw)
    return LOSSES[recipe.data.task] if raw or recipe.data.target_bounds is None else bounded_squared_error


def outputs_of(recipe: Recipe, name: str, classes: int | None) -> int:
    """Return the number of outputs per example; a convex model has one for two classes. No `classes`: regression."""
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
