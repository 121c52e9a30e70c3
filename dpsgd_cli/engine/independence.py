"""Tests of a user's model before it is trained: each example is treated as if it were alone.

The code of a user's model runs on one example at a time (`apart.py`), so row b of every layer's input, output and
gradient belongs to example b, whatever the code does. Three things are left to test, on synthetic rows and no records:

- `vmap` is right: in the pack, an example has the outputs, layer inputs and gradients that it has alone.
- The model that is trained is the one that was written. A batch of the module itself has, row by row, the outputs and
  values that its rows have alone, to a thousandth, and those of the pack. They stay the same when other rows are
  replaced. The loss of some rows has a gradient of exactly zero in all other rows. So statistics of a batch, groups,
  sorting, recurrence over the wrong axis are refused: in predictions, such a model would mix what training kept apart.
  A question about the input (`if mask.all()`) was answered with no in the pack; the answer must have been yes for
  some row, with the same result.
- A pass leaves nothing behind: no buffer, attribute or global generator changes (`state.py` lists what is covered),
  and no trained parameter is used behind the pack's back.

The module is tested in batches of the sizes of `sizes_tried`, that of training among them, on rows of zeros and ones,
fractions and numbers of several magnitudes, as far as the time allows (`examine`). Every two positions of a batch of at
most 64 rows are separated, in both directions; in larger batches random halves are. To run a recipe's Python file is to
trust it: a model that passes may still hide something in files, threads or closures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsgd_cli.engine import state
from dpsgd_cli.engine.apart import DoesNotRunError, where_in
from dpsgd_cli.engine.layers import Embedding, Own, UsedByItselfError
from dpsgd_cli.engine.packing import Pack, Wrapper
from dpsgd_cli.errors import ModelError

_ROWS = 4
_SMALL = 64
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)


@dataclass(frozen=True)
class _Run:
    """Model outputs (R, B, ...), and inputs (R or 1, B, ...) and output gradients (R, B, ...) of all layer calls.

    Of a module itself: outputs of its parts instead of inputs, and R = 1.
    """

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
        for subject in subjects(pack):
            _run(subject, x)
    except DoesNotRunError:
        return False
    return True


def check_outputs(pack: Pack, x: Tensor, wanted: tuple[int | None, ...]) -> None:
    """Raise ModelError unless the model maps rows `x` (B, ...) to (B, *wanted); None stands for any size."""
    shape = tuple(_run(pack, x).outputs.shape[2:])
    if len(shape) != len(wanted) or any(size not in (own, None) for own, size in zip(shape, wanted, strict=True)):
        told = ", ".join("..." if size is None else str(size) for size in wanted) + "," * (len(wanted) == 1)
        raise ModelError(f"the model gives outputs of shape {shape} for one example; the data needs ({told})")


class Plain:
    """The model as it was written, on whole batches, in eval mode, with the weights of a pack's first trial.

    The outputs of its parts are compared where their first axis is the batch.
    """

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(pack.seeds[0])
            module = pack.build().to(pack.values).eval()
        self.module, self._prefix = (module.model, "model.") if isinstance(module, Wrapper) else (module, "")
        self._seen: list[Tensor] = []
        self._by_row: list[bool] | None = None
        for part in self.module.modules():
            if not any(True for _ in part.children()) or any(True for _ in part.parameters(recurse=False)):
                part.register_forward_hook(self._see)

    def _see(self, part: nn.Module, given: Any, found: Any) -> None:
        first = found[0] if isinstance(found, tuple) and found else found
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim():
            self._seen.append(first)

    def __call__(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (B, ...) and the outputs of parts, (B, ...) each, of rows `x` (B, ...)."""
        if self._by_row is None:
            one, other = ([len(seen) for seen in self._run(x[:1].expand(size, *x.shape[1:]))[1]] for size in (2, 3))
            self._by_row = [pair == (2, 3) for pair in zip(one, other, strict=False)]
        y, seen = self._run(x)
        if len(seen) != len(self._by_row):
            raise _mixes("layers are called differently from batch to batch")
        return y, [part for part, by_row in zip(seen, self._by_row, strict=True) if by_row]

    def _run(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self._seen = []
        weights = {
            name.removeprefix(self._prefix): self.pack.values[0, at : at + shape.numel()]
            .view(shape)
            .detach()
            .requires_grad_()
            for name, (at, shape) in self.pack.spans.items()
        }
        y = functional_call(self.module, weights, (x,))
        return getattr(y, "logits", y), self._seen


def subjects(pack: Pack) -> list[Pack | Plain]:
    """Return what is tested of a model: the pack, and before it the module itself if the pack runs it row by row."""
    return [pack] if pack.trusted else [Plain(pack), pack]


def check_first(pack: Pack, x: Tensor) -> None:
    """Make the least test: module and pack on two of the rows `x` (B, ...), and each row alone."""
    with _random_weights(pack):
        every = [
            (one, _run(one, x[:2], [0, 1]), [_run(one, x[[row]], [0]) for row in (0, 1)]) for one in subjects(pack)
        ]
        for subject, both, alone in every:
            _require_equal(_stacked(alone), both, 1e-3)
            if isinstance(subject, Plain):
                for row in (0, 1):
                    _require_no_gradient(_run(subject, x[:2], [row]).rows([1 - row]))
        _require_agreement(pack, [_stacked(alone).outputs for _, _, alone in every])


def _require_agreement(pack: Pack, outputs: list[Tensor]) -> None:
    """Raise ModelError unless the first trial of the last of `outputs` (R, B, ...) equals all others."""
    for one in outputs[:-1]:
        ours = outputs[-1][: len(one)]
        try:
            _require_equal(_Run(one, [], []), _Run(ours, [], []), 1e-3)
        except ModelError as error:
            asked = sorted(pack.session.passes.asked)
            if asked:
                raise ModelError(
                    f"{asked[0]}: the model asks for a number of its input (an `if`, float() or .item()), and what it"
                    " computes depends on the answer, which may be due to any example; use torch.where, or operations"
                    " on each example"
                ) from error
            raise _mixes(
                "the model gives other outputs for a row in training mode, one at a time, than in eval mode"
            ) from error


def check_questions(pack: Pack, x: Tensor) -> None:
    """Raise ModelError for a question about the input whose answer was no wherever it was tried, or matters.

    Among the rows tried are one of ones, in which every place of a mask counts, and all of `x` (B, ...), one by one.
    """
    passes = pack.session.passes
    if pack.trusted or not passes.asked:
        return
    plain, passes.true = Plain(pack), set()
    try:
        with _random_weights(pack):
            for row in (torch.ones_like(x[:1]), *x.split(1)):
                _require_agreement(pack, [_run(plain, row).outputs, _run(pack, row).outputs])
        unknown = sorted(passes.asked - passes.true)
    finally:
        passes.true = None
    if unknown:
        raise ModelError(
            f"{unknown[0]}: the model asks for a number of its input (an `if`, float() or .item()), and nobody knows"
            " whether the answer matters, since it was no for all rows that were tried; use torch.where, or operations"
            " on each example"
        )


def check_examples_stay_apart(pack: Pack, x: Tensor) -> None:
    """Raise ModelError if one example can influence another's output, layer inputs or gradient.

    `x` is (B, ...): B >= 2 different rows of plausible, public input. Each example in turn is tested three ways. Alone,
    it must have the output that it has in the batch. Replacing it must change no other row of any layer, forwards or
    backwards. The gradient of its loss must be zero in all other rows of every layer. Two equal runs must agree, and no
    run may change the model's state (`state.py`). All weights are random during the tests, because a layer that starts
    at zero hides the layers before it.
    """
    with _random_weights(pack):
        alone = []
        for subject in subjects(pack):
            for rows in (x, x.flip(0)):
                everybody = list(range(len(rows)))
                first = _run(subject, rows, everybody)
                for row in everybody:
                    _check_row(subject, rows, row, first)
                _require_equal(first, _run(subject, rows, everybody))
            alone.append(first.outputs)
        _require_agreement(pack, alone)
    check_questions(pack, x)


def sizes_tried(most: int) -> list[int]:
    """Return the batch sizes at which a user's model is tested; `most` is the rows per trial of a training pass.

    Groups of rows usually have round sizes, or sizes that divide the batch; 61 is prime and fits neither.

    >>> sizes_tried(600)
    [2, 3, 4, 8, 16, 32, 61, 64, 128, 256, 512, 599, 600]
    """
    powers = [1 << power for power in range(1, most.bit_length())]
    return sorted({size for size in (*powers, 3, 61, most - 1, most) if 2 <= size <= max(2, most)})


def check_batches(pack: Pack, x: Tensor, most: int) -> None:
    """Raise ModelError if a row of `x` (B, ...) gives other results in a batch of up to `most` rows than alone."""
    for size in sizes_tried(most):
        check_size(pack, x, size)


def check_size(pack: Pack, x: Tensor, size: int) -> None:
    """Raise ModelError if a row of `x` (B, ...) gives other results in a batch of `size` rows than alone.

    The rows of a batch are drawn from `x` with replacement. In each further run some rows are replaced and left out of
    the loss. Every two positions of a small batch are separated by one of these runs, in both directions.
    """
    with _random_weights(pack):
        generator = torch.Generator().manual_seed(size)
        # in a pack that runs rows one by one, no size is special; in the module, one may be
        subject = subjects(pack)[0]
        alone = _stacked([_run(subject, row[None], [0]) for row in x])
        places = torch.randint(len(x), (size,), generator=generator)
        everybody = _compared(subject, x, places, torch.ones(size, dtype=torch.bool), alone)
        for kept in _parts(size, generator):
            found = _compared(subject, x, (places + (~kept).long()) % len(x), kept, alone)
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


def _compared(subject: Pack | Plain, x: Tensor, places: Tensor, counted: Tensor, alone: _Run) -> _Run:
    """Run rows x[places], with a loss for the rows `counted`, and require that each row agrees with `alone`."""
    chosen, others = (which.nonzero().squeeze(1).tolist() for which in (counted, ~counted))
    found = _run(subject, x[places.to(x.device)], chosen)
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


def _check_row(subject: Pack | Plain, x: Tensor, row: int, first: _Run) -> None:
    """Test row `row` of `x`, whose ordinary run was `first`: alone, replaced, and alone in the loss."""
    alone = _run(subject, x[row : row + 1])
    _require_equal(_Run(first.outputs[:, [row]], [], []), _Run(alone.outputs, [], []), 1e-3)
    changed = x.clone()
    changed[row] = x[(row + 1) % len(x)]
    others = [other for other in range(len(x)) if other != row]
    _require_equal(first.rows(others), _run(subject, changed, list(range(len(x)))).rows(others))
    own = _run(subject, changed, [row])
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


def _run(subject: Pack | Plain, x: Tensor, losses: Sequence[int] = ()) -> _Run:
    """Run a pass over rows `x` (B, ...) and, if `losses` lists rows, a backward pass from their outputs.

    Raises ModelError if the pass changes the model's state.
    """
    module = subject.template if isinstance(subject, Pack) else subject.module
    before = state.held(module)
    try:
        found = _recorded(subject, x, losses) if isinstance(subject, Pack) else _plain(subject, x, losses)
    except ModelError:
        raise
    except FAILURES as error:
        where = where_in(error, module)
        if isinstance(error, UsedByItselfError):
            raise DoesNotRunError(f"{where}{error}") from error
        said = f"{where}the model does not run on {len(x)} inputs of shape {tuple(x.shape[1:])}: {error}"
        raise DoesNotRunError(said) from error
    own = state.changed(before, state.held(module))
    if own is not None:
        raise _mixes(f"{own} changed in a pass, which nothing clips and no noise hides")
    return found


def _loss(outputs: Tensor, losses: Sequence[int]) -> Tensor:
    """Return a loss of the outputs (R, B, ...) of the rows `losses`, with gradients that differ from row to row."""
    own = outputs[:, list(losses)].flatten(2)
    weights = torch.arange(1, own.shape[2] + 1).to(own).cos()
    return (own * weights + torch.nn.functional.softplus(own)).sum()


def _plain(plain: Plain, x: Tensor, losses: Sequence[int]) -> _Run:
    with torch.enable_grad():
        outputs, seen = plain(x)
        outputs = outputs[None]
        # integers and constants have no gradient
        parts = [part for part in seen if part.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if losses and parts and outputs.requires_grad:
            gradients = torch.autograd.grad(_loss(outputs, losses), parts, allow_unused=True)
    values = [part.detach()[None] for part in seen]
    return _Run(outputs.detach(), values, [d[None] for d in gradients if d is not None])


def _recorded(pack: Pack, x: Tensor, losses: Sequence[int]) -> _Run:
    pack.session.begin()
    try:
        with torch.enable_grad(), pack.session.passes.masks.off():
            outputs = pack(x[None])
            if losses:
                _loss(outputs, losses).backward()
        if any(p.grad is not None for p in pack.raw):
            raise ModelError(
                "a trained parameter is used outside of the module that holds it (a closure, a list or a global keeps"
                " it), where nothing would clip its gradient; use it as an attribute of its module"
            )
        inputs = [a for layer in pack.members if not isinstance(layer, Own) for a in layer.inputs]
        gradients = [d for layer in pack.members for _, d in layer.recorded()]
        return _Run(outputs.detach(), inputs, gradients)
    finally:
        pack.session.recording = False
        for p in pack.raw:
            p.grad = None
        for layer in pack.members:
            layer.forget()


@dataclass
class ModelTests:
    """Tests of a model that were made, and those left out because time was up, as descriptions.

    `seconds` is what the tests took, of at most `limit`; `remembered`: on an earlier run of the same code.
    """

    tried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    limit: float = 0.0
    remembered: bool = False


def examine(
    pack: Pack, input_shape: tuple[int, ...], like: Tensor, most: int, seconds: float, say: Callable[[str], None]
) -> ModelTests:
    """Test a user's model for `seconds`, at least by `check_first`, and say what was tried and what was not.

    Args:
        input_shape: shape of one input, of the dtype and on the device of `like`.
        most: rows per trial of a training pass.
        seconds: limit. A test starts if it should end before, judging by the time that a row took so far. On a CPU
            this is processor time of this thread, so that a busy machine tries as much as an idle one.
        say: receives a line before each test.

    Raises:
        ModelError: the model failed a test.
    """
    rows, found = stand_in_rows(input_shape, like), ModelTests(limit=seconds)
    # a thread that waits for a GPU takes no processor time
    clock = time.thread_time if like.device.type == "cpu" else time.perf_counter
    start = clock()
    say("two rows, alone and together")
    check_first(pack, rows)
    check_questions(pack, rows)
    found.tried.append("two rows, alone and together")
    # six passes over one row and six over two were made, at the least
    per_row = (clock() - start) / 18
    for name, passes, test in _tests(pack, rows, input_shape, like, most):
        if clock() - start + passes * per_row > seconds:
            found.left.append(name)
            continue
        say(name)
        began = clock()
        if test() is False:
            continue
        # rows of a larger batch take less time each
        per_row = min(per_row, (clock() - began) / passes)
        found.tried.append(name)
    found.seconds = round(clock() - start, 3)
    return found


def _tests(
    pack: Pack, rows: Tensor, shape: tuple[int, ...], like: Tensor, most: int
) -> Iterator[tuple[str, int, Callable[[], bool | None]]]:
    """Yield the tests in order of importance: a name, the number of rows in its passes, and the test.

    A test returns False if the model does not run on its rows.
    """
    apart = 2 * 2 * (2 * _ROWS + _ROWS * (1 + 2 * _ROWS))

    def other(batch: Tensor, test: Callable[[Pack, Tensor], None]) -> bool:
        runs = runs_on(pack, batch)
        if runs:
            test(pack, batch)
        return runs

    yield "every row replaced", apart, partial(check_examples_stay_apart, pack, rows)
    yield f"a batch of {most}", 4 * most, partial(check_size, pack, rows, most)
    kinds = ("fractions", "several magnitudes", "both signs", "an outlying row", "missing numbers")
    # an index beyond a table's end would make a GPU unusable
    tokens = any(isinstance(layer, Embedding | Own) for layer in pack.members) and like.device.type != "cpu"
    others = [] if tokens else spread_rows(shape, like)
    for kind, batch in zip(kinds, others, strict=False):
        yield f"rows of {kind}", apart, partial(other, batch, check_examples_stay_apart)
    for size in sizes_tried(most):
        cuts = 2 * max(1, (size - 1).bit_length()) if size <= _SMALL else 2
        yield f"batches of {size}", (1 + cuts) * size, partial(check_size, pack, rows, size)
    small = min(most, _SMALL)
    for kind, batch in zip(kinds, others, strict=False):
        yield f"a batch of {kind}", 13 * small, partial(other, batch, partial(check_size, size=small))


def _require_equal(before: _Run, after: _Run, tolerance: float = 1e-4) -> None:
    """Raise ModelError for a difference beyond rounding in outputs, layer inputs or gradients."""
    ours, theirs = [*before.inputs, *before.gradients], [*after.inputs, *after.gradients]
    pairs = [(before.outputs, after.outputs), *zip(ours, theirs, strict=False)]
    if len(ours) != len(theirs) or any(one.shape != other.shape for one, other in pairs):
        raise _mixes("layers are called differently from batch to batch")
    # a gradient that cancels, as that of a key's bias, is rounding of the terms that cancel
    steepest = max((_largest(d) for d in before.gradients), default=0.0)
    for number, (one, other) in enumerate(pairs):
        least = 1e-3 * steepest if number > len(before.inputs) else 0.0
        gaps = (one.double() - other.double()).abs()
        same = (one == other) | (one.isnan() & other.isnan())
        if bool((~same & ~(gaps <= tolerance * (one.double().abs() + _sizes(one).clamp_min(least)))).any()):
            gap = float(gaps[~same].max())
            raise _mixes(f"an example's numbers changed by {gap:.3g} with the batch around it")


def _largest(x: Tensor) -> float:
    """Return the largest finite absolute value of a tensor; 0 if there is none."""
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


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
