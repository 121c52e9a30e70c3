"""Tests for per-example independence: a model must treat each example of a batch as if it were alone.

The tests use synthetic rows, no records. Clipping bounds what one example adds to a sum only if row b of every layer's
input, output and gradient belongs to example b alone. A model can break that between its layers: by statistics of the
batch or of groups of its rows, by a recurrence over the wrong axis, or by reordering rows around a layer (sorting by
length). It may also use a row's position or the number of rows, keep state between calls, or have an `if` on a number
of the batch. Modules that mix examples by design are refused by name in `packing.py`.

The layers of built-in models keep examples apart. For a user's model nothing is proved; it passes if the following
holds. The batches have the sizes of `sizes_tried`, that of training among them. The rows hold zeros and ones, fractions
and numbers of several magnitudes.

- Each row has the outputs, layer inputs and gradients that it has alone, to a thousandth, at every position.
- They stay the same when other rows are replaced, to a ten-thousandth, in batches of at most 64.
- The loss of some rows has a gradient of exactly zero in all other rows.
- No buffer, attribute or global generator changes (`state.py` lists what is covered), and Python reads no number of
  the input.

The second and third tests separate every two positions of a batch of at most 64 rows, in both directions; in larger
batches they separate random halves. So a model that passes may still mix examples below these tolerances, at other
sizes, for other rows only, or by hiding it. To run a recipe's Python file is to trust it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsgd_cli.engine import state
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.errors import ModelError

_ROWS = 4
_SMALL = 64
_ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default)
_ARRAYS = (Tensor.numpy, Tensor.__array__)
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)


@dataclass(frozen=True)
class _Run:
    """Model outputs (R, B, ...), and inputs (R or 1, B, ...) and output gradients (R, B, ...) of all layer calls."""

    outputs: Tensor
    inputs: list[Tensor]
    gradients: list[Tensor]

    def rows(self, chosen: list[int]) -> _Run:
        """Return the run restricted to the rows `chosen`."""
        return _Run(
            self.outputs[:, chosen], [a[:, chosen] for a in self.inputs], [d[:, chosen] for d in self.gradients]
        )


def stand_in_rows(input_shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return four rows (4, *input_shape) of zeros and ones, which are valid pixels, scaled numbers and token ids.

    Each row has more ones than the one before, at random positions, so rows and their sums differ.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.empty(input_shape).numel()
    rows = []
    for row in range(_ROWS):
        places = torch.randperm(numbers, generator=generator)
        rows.append(places < round((row + 0.5) / _ROWS * numbers))
    return torch.stack(rows).reshape(_ROWS, *input_shape).to(like)


def spread_rows(input_shape: tuple[int, ...], like: Tensor) -> list[Tensor]:
    """Return batches of four rows (4, *input_shape) of fractions; none if inputs are integers.

    Rows of zeros and ones alone share their minimum and maximum, so they hide some kinds of mixing. The batches are, in
    order: fractions of 1, like pixels, with a different range in each row; numbers of several magnitudes; numbers of
    both signs; fractions of both signs with one outlying row; and fractions with one row that has NaN entries. A model
    may fail on some of them (`runs_on`): they need not be valid inputs.
    """
    if not like.is_floating_point():
        return []
    generator = torch.Generator().manual_seed(1)
    column = (_ROWS, *[1] * len(input_shape))
    even = torch.rand(2, _ROWS, *input_shape, generator=generator)
    both = torch.randn(_ROWS, *input_shape, generator=generator)
    sizes = torch.tensor([[0.2, 0.5, 0.3, 0.6], [0.2, 1.0, 3.0, 300.0], [0.1, 0.7, 3.0, 300.0]]).view(3, *column)
    shifts = torch.tensor([[0.0, 0.1, 0.6, 0.3], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 2.0, 0.0]]).view(3, *column)
    spread = [rows * size + shift for rows, size, shift in zip([*even, both], sizes, shifts, strict=True)]
    outlying, missing = 2 * even[0] - 1, even[1].clone()
    outlying[2] = 5000 * both[3]
    missing[2][even[0, 2] >= even[0, 2].mean()] = torch.nan
    return [rows.to(like) for rows in (*spread, outlying, missing)]


def runs_on(pack: Pack, x: Tensor) -> bool:
    """Return True if the model runs on rows `x` (B, ...)."""
    try:
        _run(pack, x)
    except _DoesNotRunError:
        return False
    return True


def check_outputs(pack: Pack, x: Tensor, outputs: int) -> None:
    """Raise ModelError unless the model maps rows `x` (B, ...) to (B, `outputs`)."""
    shape = tuple(_run(pack, x).outputs.shape[2:])
    if shape != (outputs,):
        raise ModelError(f"the model gives outputs of shape {shape} for one example; the data needs ({outputs},)")


def check_nothing_is_asked(pack: Pack, x: Tensor) -> None:
    """Raise ModelError if the model reads a number computed from its input, rows `x` (B, ...), into Python."""
    rows = x[None]
    unasked = _Unasked(rows)
    with torch.no_grad(), _Calls(unasked), unasked:
        pack(rows)


def check_examples_stay_apart(pack: Pack, x: Tensor) -> None:
    """Raise ModelError if one example can influence another's output, layer inputs or gradient.

    `x` is (B, ...): B >= 2 different rows of plausible, public input. Each example in turn is tested three ways. Alone,
    it must have the output that it has in the batch. Replacing it must change no other row of any layer, forwards or
    backwards. The gradient of its loss must be zero in all other rows of every layer. Two equal runs must agree, and no
    run may change the model's state (`state.py`). All weights are random during the tests, because a layer that starts
    at zero hides the layers before it.
    """
    with _random_weights(pack):
        for rows in (x, x.flip(0)):
            everybody = list(range(len(rows)))
            first = _run(pack, rows, everybody)
            for row in everybody:
                _check_row(pack, rows, row, first)
            _require_equal(first, _run(pack, rows, everybody))


def sizes_tried(most: int) -> list[int]:
    """Return the batch sizes at which a user's model is tested; `most` is the rows per trial of a training pass.

    Groups of rows usually have round sizes, or sizes that divide the batch; 61 is prime and fits neither.

    >>> sizes_tried(600)
    [2, 3, 4, 8, 16, 32, 61, 64, 128, 256, 512, 599, 600]
    """
    powers = [1 << power for power in range(1, most.bit_length())]
    return sorted({size for size in (*powers, 3, 61, most - 1, most) if 2 <= size <= max(2, most)})


def check_batches(pack: Pack, x: Tensor, most: int) -> None:
    """Raise ModelError if a row of `x` (B, ...) gives other results in a batch of up to `most` rows than alone.

    The rows of a batch are drawn from `x` with replacement. In each further run some rows are replaced and left out of
    the loss. Every two positions of a small batch are separated by one of these runs, in both directions.
    """
    with _random_weights(pack):
        alone = _stacked([_run(pack, row[None], [0]) for row in x])
        generator = torch.Generator().manual_seed(most)
        for size in sizes_tried(most):
            places = torch.randint(len(x), (size,), generator=generator)
            everybody = _compared(pack, x, places, torch.ones(size, dtype=torch.bool), alone)
            for kept in _parts(size, generator):
                found = _compared(pack, x, (places + (~kept).long()) % len(x), kept, alone)
                if size <= _SMALL:
                    rows = kept.nonzero().squeeze(1).tolist()
                    _require_equal(everybody.rows(rows), found.rows(rows))


def _parts(size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield masks (size,) bool of the rows that keep their example and their loss: both sides of one or more cuts."""
    if size > _SMALL:
        cuts = [torch.rand(size, generator=generator) < 0.5]
    else:
        cuts = [torch.arange(size) >> bit & 1 == 1 for bit in range((size - 1).bit_length())]
    for cut in cuts:
        yield from (cut, ~cut)


def _compared(pack: Pack, x: Tensor, places: Tensor, counted: Tensor, alone: _Run) -> _Run:
    """Run rows x[places], with a loss for the rows `counted`, and require that each row agrees with `alone`."""
    chosen, others = (which.nonzero().squeeze(1).tolist() for which in (counted, ~counted))
    found = _run(pack, x[places.to(x.device)], chosen)
    theirs = alone.rows(places.tolist())
    _require_equal(_Run(theirs.outputs, theirs.inputs, []), _Run(found.outputs, found.inputs, []), 1e-3)
    none = found.outputs[:, :0]
    ours, theirs = found.rows(chosen), theirs.rows(chosen)
    _require_equal(_Run(none, [], theirs.gradients), _Run(none, [], ours.gradients), 1e-3)
    _require_no_gradient(found.rows(others))
    return found


def _stacked(runs: Sequence[_Run]) -> _Run:
    """Concatenate runs of single examples along the batch axis."""
    if len({(len(run.inputs), len(run.gradients)) for run in runs}) > 1:
        raise _mixes("layers are called differently from batch to batch")
    inputs = [torch.cat(parts, dim=1) for parts in zip(*(run.inputs for run in runs), strict=True)]
    gradients = [torch.cat(parts, dim=1) for parts in zip(*(run.gradients for run in runs), strict=True)]
    return _Run(torch.cat([run.outputs for run in runs], dim=1), inputs, gradients)


def _require_no_gradient(run: _Run) -> None:
    if any(bool((torch.isfinite(d) & (d != 0)).any()) for d in run.gradients):
        raise _mixes("the loss of one example has a gradient in the rows of others")


def _check_row(pack: Pack, x: Tensor, row: int, first: _Run) -> None:
    """Test row `row` of `x`, whose ordinary run was `first`: alone, replaced, and alone in the loss."""
    alone = _run(pack, x[row : row + 1])
    _require_equal(_Run(first.outputs[:, [row]], [], []), _Run(alone.outputs, [], []), 1e-3)
    changed = x.clone()
    changed[row] = x[(row + 1) % len(x)]
    others = [other for other in range(len(x)) if other != row]
    _require_equal(first.rows(others), _run(pack, changed, list(range(len(x)))).rows(others))
    own = _run(pack, changed, [row])
    _require_no_gradient(own.rows(others))


@contextmanager
def _random_weights(pack: Pack) -> Iterator[None]:
    """Add normal numbers of the usual initial size to all weights while the context lasts."""
    kept = pack.values.clone()
    generator = torch.Generator().manual_seed(0)
    for offset, shape in pack.spans.values():
        added = torch.randn(shape.numel(), generator=generator) / max(1, shape[1:].numel()) ** 0.5
        pack.values[:, offset : offset + shape.numel()] += added.to(pack.values)
    try:
        yield
    finally:
        pack.values.copy_(kept)


def _run(pack: Pack, x: Tensor, losses: Sequence[int] = ()) -> _Run:
    """Run a recorded pass over rows `x` (B, ...) and, if `losses` lists rows, a backward pass from their outputs.

    Raises ModelError if the pass changes the model's state.
    """
    before = state.held(pack.template)
    found = _recorded(pack, x, losses)
    own = state.changed(before, state.held(pack.template))
    if own is not None:
        raise _mixes(f"{own} changed in a pass, which nothing clips and no noise hides")
    return found


def _recorded(pack: Pack, x: Tensor, losses: Sequence[int]) -> _Run:
    pack.session.begin()
    try:
        with torch.enable_grad():
            outputs = pack(x[None])
            if losses:
                own = outputs[:, list(losses)].flatten(2)
                weights = torch.arange(1, own.shape[2] + 1).to(own).cos()
                # with gradients that differ from row to row
                (own * weights + torch.nn.functional.softplus(own)).sum().backward()
        inputs = [a for layer in pack.layers for a in layer.inputs]
        gradients = [d for layer in pack.layers for _, d in layer.recorded()]
        return _Run(outputs.detach(), inputs, gradients)
    except FAILURES as error:
        said = f"the model does not run on {len(x)} inputs of shape {tuple(x.shape[1:])}: {error}"
        raise _DoesNotRunError(said) from error
    finally:
        pack.session.recording = False
        for layer in pack.layers:
            layer.forget()


class _DoesNotRunError(ModelError):
    """A pass through the model failed."""


class _Unasked(TorchDispatchMode):
    """Dispatch mode that raises ModelError when Python reads a number that was computed from `x`, as an `if` does.

    The number may come from any example of the batch, and a decision based on it affects all of them.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        # the tensors are kept alive, so that no other tensor gets the same id
        self.from_x = {id(x): x}
        self.excused = False

    def touched(self, given: Any) -> bool:
        """Return True if any tensor in `given` was computed from the input."""
        return any(id(x) in self.from_x for x in tree_leaves(given))

    def follow(self, found: Any) -> None:
        """Mark the tensors in `found` as computed from the input."""
        self.from_x.update((id(x), x) for x in tree_leaves(found) if isinstance(x, Tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        touched = self.touched((args, kwargs))
        if touched and func in _ASKS and not self.excused:
            raise _asks()
        found = func(*args, **(kwargs or {}))
        if touched:
            self.follow(found)
        return found


class _Calls(TorchFunctionMode):
    """Function mode for calls that `_Unasked` does not see: conversion to arrays and `.data`.

    It also excuses `one_hot`, which reads a number only to check that there are enough classes.
    """

    def __init__(self, unasked: _Unasked) -> None:
        super().__init__()
        self.unasked = unasked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, touched = kwargs or {}, self.unasked.touched((args, kwargs))
        if touched and func in _ARRAYS:
            raise _asks()
        classes = (*args[1:2], kwargs.get("num_classes", -1))[0]
        self.unasked.excused = func is torch.nn.functional.one_hot and classes != -1
        try:
            found = func(*args, **kwargs)
        finally:
            self.unasked.excused = False
        if touched:
            self.unasked.follow(found)
        return found


def _asks() -> ModelError:
    return ModelError(
        "the model asks for a number of its input (an `if`, float() or .item()): it may be of any example, and what"
        " is done by it is done to all, so no record's influence can be bounded; use torch.where, or operations on"
        " each example"
    )


def _require_equal(before: _Run, after: _Run, tolerance: float = 1e-4) -> None:
    """Raise ModelError for a difference beyond rounding in outputs, layer inputs or gradients."""
    ours, theirs = [*before.inputs, *before.gradients], [*after.inputs, *after.gradients]
    pairs = [(before.outputs, after.outputs), *zip(ours, theirs, strict=False)]
    if len(ours) != len(theirs) or any(one.shape != other.shape for one, other in pairs):
        raise _mixes("layers are called differently from batch to batch")
    for one, other in pairs:
        gaps = (one.double() - other.double()).abs()
        same = (one == other) | (one.isnan() & other.isnan())
        if bool((~same & ~(gaps <= tolerance * (one.double().abs() + _sizes(one)))).any()):
            gap = float(gaps[~same].max())
            raise _mixes(f"an example's numbers changed by {gap:.3g} with the batch around it")


def _sizes(x: Tensor) -> Tensor:
    """Return the largest absolute value of each example of (R or 1, B, ...), to which rounding is proportional."""
    if not x.numel():
        return x.double()
    largest = x.double().nan_to_num(0.0, 0.0, 0.0).abs().reshape(*x.shape[:2], -1).amax(dim=(0, 2))
    largest = largest.clamp_min(1e-3 * float(largest.max()))
    return largest.view(1, -1, *[1] * (x.dim() - 2))


def _mixes(how: str) -> ModelError:
    return ModelError(
        f"{how}: the model mixes examples (or keeps something of them, or draws random numbers), so no record's"
        " influence can be bounded; look for operations over the batch axis"
    )
