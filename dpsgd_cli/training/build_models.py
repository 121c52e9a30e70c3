"""The model of a recipe, once for each trial: on which device, with which loss, and what is refused of it.

Not here: building one model (`engine/models.py`), how examples are kept apart (`engine/independence.py`), trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.clipping.run import Clipping, add_clipped_sums
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
from dpsgd_cli.methods.creation import own_factory
from dpsgd_cli.methods.risks.problem import output_loss
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, own_weights
from dpsgd_cli.recipe.schema import Recipe

_MOST_SPREAD = 64
"""Rows of a batch in which a user's model is tried on unusual numbers."""


def placement(recipe: Recipe, team: Team) -> Placement:
    """Where the tensors of a recipe live in this process, and how precise they are; its CPU threads are taken, too."""
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    device = _device(recipe.runtime.device, team)
    return Placement(device, precision.PARAMETERS.get(recipe.runtime.dtype, torch.float32))


def _device(name: str, team: Team) -> torch.device:
    """The device of this process, usable and, where it is a GPU, the current one."""
    try:
        asked = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        # each process takes its own before anything is put on any
        device = team.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"runtime.device {name!r} is not usable here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is not None:
        # streams and events are the current device's, wherever tensors lie
        torch.cuda.set_device(device)
    return device


def loss_of(recipe: Recipe, raw: bool = False) -> Loss:
    """One example's loss as a function of the model's outputs; `raw`: of targets as they are, as of held-out rows."""
    if isinstance(recipe.model, ConvexModel):
        return output_loss(recipe.model, raw)
    return LOSSES[recipe.data.task] if raw or recipe.data.target_bounds is None else bounded_squared_error


def outputs_of(recipe: Recipe, name: str, classes: int | None) -> int:
    """How many numbers the model gives for one example: a convex model tells two classes apart by one."""
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
    """The recipe's model, which an audit may `instrument`, once for each seed.

    Raises ModelError for what cannot be trained privately.
    """
    if shape is None:
        raise ModelError(f"{loaded.source}: the shape of one input is not known")
    build = models.builder(loaded.recipe.model, shape, outputs, loaded.base)
    if instrument is not None:
        build = instrument(build)
    return Pack(build, seeds, place, shares_input=loaded.recipe.model.kind in models.BUILT_IN)


def checked(pack: Pack, loaded: LoadedRecipe, train: Table, outputs: int, seeds: Sequence[int]) -> int:
    """How many rows a model may be given at once, of one that is not refused; it then works as the recipe asks.

    That examples stay apart in many batches, and where its numbers come from, is tried out on a user's own model only;
    the built-in ones are known to be right. Each has taken one clipped step on rows that are no records.
    """
    recipe = loaded.recipe
    rows = _check_model(pack, train, outputs, recipe.runtime.micro_batch)
    if recipe.model.kind == "python":
        # what the model is given in training is the rows of all trials, one below the other
        check_batches(pack, stand_in_rows(train.input_shape, train.x), _rows_at_once(recipe, len(train), rows))
        _check_further(loaded, train, outputs, seeds, rows)
        assert isinstance(recipe.model, PythonModel)
        build = models.builder(recipe.model, train.input_shape, outputs, loaded.base)
        check_declared(build, recipe.model.weights, models.loaded_names(recipe.model, loaded.base))
    pack.work_in(precision.PASSES.get(recipe.runtime.dtype), recipe.runtime.dtype == "tf32")
    _check_step(pack, recipe, stand_in_rows(train.input_shape, train.x), outputs)
    return rows


def _check_step(pack: Pack, recipe: Recipe, rows: Tensor, outputs: int) -> None:
    """Refuse a model that cannot take a clipped step on `rows` (B, ...), with random labels; its sums are dropped."""
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
    """A line that names the tensors which `model.weights.file` loads; none without one."""
    names, files = models.loaded_names(loaded.recipe.model, loaded.base), own_weights(loaded.recipe)
    return [f"  loaded from {files[0]}: {', '.join(names)}"] if files else []


def check_without_data(loaded: LoadedRecipe, outline: data.Outline) -> None:
    """Refuse what starting trials refuses of a model whose shape of an input is known, or of a user's method; no data.

    On the device of the training, where that is one process.
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
    """See that the model fits the data and keeps examples apart; returns how many rows a trial may hold at once."""
    rows = stand_in_rows(train.input_shape, train.x)
    check_outputs(pack, rows, outputs)
    check_examples_stay_apart(pack, rows)
    return min(asked or rows_that_fit(pack, rows), MOST_ROWS)


def _check_further(loaded: LoadedRecipe, train: Table, outputs: int, seeds: Sequence[int], fit: int) -> None:
    """See that a user's model asks for no number of its input, and keeps examples of many sizes apart.

    In batches up to those of training, where `fit` rows are held at once, and as far as it takes them. On the CPU: what
    a model refuses there, a number beyond a table's end for one, stops a GPU for good.
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
    """Rows of a trial in one pass of training: the batch, or what fits; what fits where neither is known."""
    batch = getattr(recipe.method, "batch_size", None) or records or fit
    beside = 1 if recipe.data.unit is None else recipe.data.unit.most_rows
    return max(2, min(batch * beside, fit))
