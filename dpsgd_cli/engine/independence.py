"""The test of a model before it trains: its gradients are those of the module as its author wrote it.

The code of a user's model runs on one example at a time (`apart.py`), so row b of every layer's input, output and
gradient belongs to example b, whatever the code does. Four things are left to test, on synthetic rows and no records:

- Gradients. For each row alone, autograd of the module as it was written gives the gradient of every parameter. The
  pack, on all rows at once, must give the same, and norms no smaller. So a rule or a `vmap` that is wrong is refused.
- Agreement. The module gives a row the same outputs alone and among others, and the same as the pack. A question about
  the input (`if mask.all()`) was answered with no in the pack; the answer must have been yes for some row, with the
  same result.
- A pass leaves nothing behind: no buffer or parameter changes, and no tensor that it computed is kept, be it in an
  attribute, a global or a closure (`Kept`). No number of an example can be kept otherwise: `vmap` gives none to Python.
- No trained parameter is used behind the pack's back.

The module runs on the CPU in float64, with `float32` in its code read as float64, so that a millionth of a batch's mean
is told from rounding. A module that cannot, or that is too large, runs in float32. A pack in float32 that gives other
numbers is tried again in float64, as rounding may be all; a norm below what is summed is refused at once. Rows of
tokens are drawn from the whole vocabulary and contain every padding token: what a module looks up tells both.

Not found: what code keeps after more passes than these, in files or in threads. To run a recipe's Python file is to
trust it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from dpsgd_cli.engine.apart import DoesNotRunError, Kept, refuse_hook, where_in
from dpsgd_cli.engine.dropout import NOISE, still
from dpsgd_cli.engine.layers import Described, UsedByItselfError
from dpsgd_cli.engine.named_inputs import NamedInputs
from dpsgd_cli.engine.packing import Pack, Placement, Wrapper
from dpsgd_cli.engine.weights import held, seeded
from dpsgd_cli.errors import ModelError

_ROWS = 4
_MOST_FLOAT64 = 1 << 28
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError)


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


def check_outputs(pack: Pack, x: Tensor, wanted: tuple[int | None, ...]) -> None:
    """Raise ModelError unless the model maps rows `x` (B, ...) to (B, *wanted); None stands for any size."""
    with _explained(pack.template, x), torch.no_grad(), pack.session.passes.masks.off():
        shape = tuple(pack(x[None]).shape[2:])
    if len(shape) != len(wanted) or any(size not in (own, None) for own, size in zip(shape, wanted, strict=True)):
        told = ", ".join("..." if size is None else str(size) for size in wanted) + "," * (len(wanted) == 1)
        raise ModelError(f"the model gives outputs of shape {shape} for one example; the data needs ({told})")


def check_model(pack: Pack, input_shape: tuple[int, ...], like: Tensor) -> None:
    """Compare a model's outputs and gradients with autograd of the module as it was written.

    All weights are random during the test, because a layer that starts at zero hides the layers before it.

    Args:
        input_shape: shape of one input, of the dtype and on the device of `like`.

    Raises:
        ModelError: a gradient differs, the model mixes examples, asks for numbers of its input, or keeps something.
    """
    with _random_weights(pack):
        module = Written(pack)
        x = module.rows(input_shape, like)
        alone = [module.gradients(row) for row in x.split(1)]
        if _differ(module(x).detach(), torch.cat([y for y, _ in alone]), module.rounding):
            raise _mixes("an example's outputs change with the batch around it")
        if module.reaches_others(x):
            raise _mixes("the loss of one example has a gradient in the rows of others")
        try:
            _require_same(pack, module, x, like, alone)
        except ShortNormError:
            raise
        except ModelError:
            if pack.values.dtype == torch.float64 or module.dtype != torch.float64:
                raise
            exact = Pack(pack.build, pack.seeds[:1], Placement(pack.values.device, torch.float64), pack.trusted)
            exact.values.copy_(pack.values[:1])
            _require_same(exact, module, x, like.double() if like.is_floating_point() else like, alone)


class ShortNormError(ModelError):
    """A norm is below that of what is summed, which no rounding excuses."""


def _require_same(
    pack: Pack, module: Written, x: Tensor, like: Tensor, alone: list[tuple[Tensor, dict[str, Tensor]]]
) -> None:
    """Raise ModelError unless the pack gives rows `x` the outputs and gradients that the module gives each `alone`."""
    found, gradients, norms = _recorded(pack, x.to(like))
    _require_norms(gradients, norms)
    if pack.session.passes.masks.drew:
        pack.template.eval()  # noise that acts in training alone has no counterpart in the module
        found, gradients, norms = _recorded(pack, x.to(like))
        _require_norms(gradients, norms)
    _require_agreement(pack, torch.cat([y for y, _ in alone]), found)
    for row, (_, true) in enumerate(alone):
        _require_equal(true, gradients[row])
    _check_questions(pack, module, x, like)


class Written:
    """The module as it was written, in eval mode on the CPU, with the weights of a pack's first trial.

    `rounding`: by which share two of its outputs may differ that are equal but for rounding.
    """

    def __init__(self, pack: Pack) -> None:
        module = seeded(pack.build, pack.seeds[0]).cpu().eval()
        self.module, self._prefix = (module.model, "model.") if isinstance(module, Wrapper) else (module, "")
        self._pack, self._mode = pack, _Doubled()
        small = sum(x.numel() for x in held(self.module).values()) <= _MOST_FLOAT64
        self._use(torch.float64 if small else torch.float32)

    def _use(self, dtype: torch.dtype) -> None:
        self.dtype, self.rounding = dtype, 1e-9 if dtype == torch.float64 else 1e-3
        self.module.to(dtype)
        own = self._pack.values[0].detach().to("cpu", dtype)
        self.weights = {
            name.removeprefix(self._prefix): own[at : at + shape.numel()].view(shape).requires_grad_()
            for name, (at, shape) in self._pack.spans.items()
        }

    def __call__(self, x: Tensor) -> Tensor:
        """Return outputs (B, ...) of rows `x` (B, ...). Raises ModelError if the pass changes the module's state."""
        usual = torch.get_default_dtype()
        with _explained(self.module, x), torch.enable_grad(), self._mode as mode:
            try:
                torch.set_default_dtype(self.dtype)
                mode.doubles = self.dtype == torch.float64
                y = functional_call(self.module, self.weights, (x.to(self.dtype) if x.is_floating_point() else x,))
            finally:
                torch.set_default_dtype(usual)
        found: Tensor = getattr(y, "logits", y)
        return found

    def reaches_others(self, x: Tensor) -> bool:
        """Return True if the first of real rows `x` (B, ...) has a loss with a gradient in another row: exact, so that
        rows with outputs alike hide nothing."""
        given = x.to(self.dtype, copy=True).requires_grad_() if x.is_floating_point() else x
        y = self(given.clone())  # which the module may change in place
        if not (given.requires_grad and y.requires_grad):
            return False
        (d,) = torch.autograd.grad(_loss(y[:1]), given, allow_unused=True)
        return d is not None and bool((d[1:].isfinite() & (d[1:] != 0)).any())

    def gradients(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs (1, ...) of one row `x` (1, ...), and each parameter's gradient of their loss."""
        y = self(x)
        given: Sequence[Tensor | None] = [None] * len(self.weights)
        if y.requires_grad:
            try:
                given = torch.autograd.grad(_loss(y), list(self.weights.values()), allow_unused=True)
            except RuntimeError as error:
                raise ModelError(
                    "a tensor is changed in place after its numbers were used, and gradients need them as they were;"
                    " write h = h + 1 for h += 1, and h = torch.relu(h) for h.relu_()"
                    if "inplace" in str(error)
                    else f"the model runs, but has no gradient: {error}"
                ) from error
        pairs = zip(self._pack.spans, given, self.weights.values(), strict=True)
        return y.detach(), {name: torch.zeros_like(p) if d is None else d for name, d, p in pairs}

    def rows(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return rows (B, *shape) on the CPU: fractions, or tokens of the whole vocabulary where rows are looked up.

        Of all kinds of rows on which the module runs, those by which it looks up the most entries are taken, for each
        named array by itself.
        """
        real, size = like.is_floating_point(), math.prod(shape)
        rows, generator = 2 if size >= 4 * _ROWS else 2 * _ROWS, torch.Generator().manual_seed(2)
        x = stand_in_rows(shape, torch.empty(0, dtype=like.dtype)).roll(-1, 0).repeat(2, *[1] * len(shape))[:rows]
        try:
            self._looked_up(x)
        except DoesNotRunError:
            self._use(torch.float32)
            self._looked_up(x)
        heights, flat, start = dict(self._mode.heights), x.view(rows, size), 0
        sizes = [size]
        if isinstance(self.module, NamedInputs):
            real, sizes = False, [math.prod(own) for own in self.module.shapes.values()]
        for width in sizes:
            kinds = [torch.rand(rows, width, generator=generator)] if real else []
            kinds += [flat[:, start : start + width].clone()]
            kinds += [_tokens(rows, width, height, paddings, generator) for height, paddings in heights.items()]
            scores = []
            for kind in kinds:
                flat[:, start : start + width] = kind.to(x.dtype)
                scores.append(self._looked_up(x, must=False))
            flat[:, start : start + width] = kinds[scores.index(max(scores))].to(x.dtype)
            start += width
        return x

    def _looked_up(self, x: Tensor, must: bool = True) -> int:
        """Return how many different entries a pass looks up; -1 if the module does not run on `x` and need not."""
        self._mode.found = 0
        try:
            y = self(x)
        except ModelError:
            if must:
                raise
            return -1
        return self._mode.found if must or bool(y.isfinite().all()) else -1


class _Doubled(TorchFunctionMode):
    """Function mode that reads float32 as float64 if `doubles`, refuses hooks of gradients, and notes lookups.

    `heights`: padding tokens of all tables that were used, by number of entries. `found`: number of different entries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubles, self.found = True, 0
        self.heights: dict[int, set[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_hook(func)
        kwargs = kwargs or {}
        if self.doubles:
            func = Tensor.double if func is Tensor.float else func
            args, kwargs = tree_map(lambda part: torch.float64 if part is torch.float32 else part, (args, kwargs))
        if func in NOISE:
            return still(func, args, kwargs)
        if func is F.embedding:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **options: Any) -> None:
        self.found += len(input.unique())
        paddings = self.heights.setdefault(len(weight), set())
        paddings |= set() if padding_idx is None else {padding_idx % len(weight)}


def _tokens(rows: int, width: int, height: int, paddings: set[int], generator: torch.Generator) -> Tensor:
    """Return tokens (rows, width) below `height`, of which the first and the last are padding tokens, if there are any.

    A padding token in the first row alone would not show what another row does to it.
    """
    found = torch.randint(height, (rows * width,), generator=generator)
    for number, padding in enumerate(sorted(paddings)[: len(found) // 2]):
        found[number] = found[-1 - number] = padding
    return found.view(rows, width)


def _recorded(pack: Pack, x: Tensor) -> tuple[Tensor, list[dict[str, Tensor]], Tensor]:
    """Return the outputs (B, ...), each row's gradients, and norms (B,), of the pack's first trial."""
    passes = pack.session.passes
    passes.kept = Kept()
    try:
        with _explained(pack.template, x):
            found = _pass(pack, x)
        passes.kept.refuse_kept(pack.template)
        return found
    finally:
        passes.kept = None


def _pass(pack: Pack, x: Tensor) -> tuple[Tensor, list[dict[str, Tensor]], Tensor]:
    pack.session.begin()
    try:
        with torch.enable_grad(), pack.session.passes.masks.off():
            outputs = pack(x[None])
            if outputs.requires_grad:
                _loss(outputs.flatten(0, 1)).backward()
        if any(p.grad is not None for p in pack.raw):
            raise ModelError(
                "a trained parameter is used outside of the module that holds it (a closure, a list or a global keeps"
                " it), where nothing would clip its gradient; use it as an attribute of its module"
            )
        layers = [layer for layer in pack.layers if layer.used]
        squares = [layer.square_norms()[0].double() for layer in layers]
        gradients = []
        for row in range(len(x)):
            pack.sums.zero_()
            only = torch.arange(len(x), device=x.device).eq(row).to(pack.values).expand(pack.trials, -1)
            for layer in layers:
                layer.add_clipped_sums(only)
            own = pack.sums[0].to("cpu", copy=True)
            gradients.append(
                {name: own[at : at + shape.numel()].view(shape) for name, (at, shape) in pack.spans.items()}
            )
        norms = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(x))
        return outputs.detach()[0], gradients, norms
    finally:
        pack.session.recording = False
        pack.sums.zero_()
        for p in pack.raw:
            p.grad = None
        for layer in pack.members:
            layer.forget()


def _loss(outputs: Tensor) -> Tensor:
    """Return a loss of outputs (B, ...) that no symmetry of a layer hides."""
    own = outputs.flatten(1)
    weights = torch.arange(1, own.shape[1] + 1).to(own).cos()
    return (own * weights + F.softplus(own)).sum()


def _require_agreement(pack: Pack, outputs: Tensor, ours: Tensor) -> None:
    """Raise ModelError unless the pack's outputs (B, ...) are those of the module."""
    if _differ(ours, outputs, 1e-3):
        asked = sorted(pack.session.passes.asked)
        if asked:
            raise ModelError(
                f"{asked[0]}: the model asks for a number of its input (an `if`, float() or .item()), and what it"
                " computes depends on the answer, which may be due to any example; use torch.where, or operations"
                " on each example"
            )
        raise _mixes("the model gives other outputs for a row in training mode, one at a time, than in eval mode")


def _require_norms(gradients: list[dict[str, Tensor]], norms: Tensor) -> None:
    """Raise ShortNormError if a row's norm is below that of its gradients."""
    for own, norm in zip(gradients, norms.tolist(), strict=True):
        whole = _whole(own)
        if math.isfinite(whole) and not norm >= whole * (1 - 1e-3):
            raise ShortNormError(
                f"one example's gradient has norm {whole:.4g}, and clipping would take it for {norm:.4g}"
            )


def _whole(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([_norm(d) for d in gradients.values()]).norm())


def _require_equal(true: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Raise ModelError unless one row's gradients are those of autograd."""
    whole = _whole(true)
    for name, d in true.items():
        # a gradient that cancels, as that of a key's bias, is rounding of the terms that cancel
        gap = float(_norm(ours[name] - d)) / max(float(_norm(d)), 1e-3 * whole, 1e-30)
        if math.isfinite(whole) and not gap <= 1e-3:
            raise ModelError(
                f"{name}: one example's gradient is {gap:.1%} off that of the module as it was written. Some operation"
                " on it is computed otherwise for one example at a time; write it with other operations, and look first"
                " at functions with a gradient of their own"
            )


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.double())


def _check_questions(pack: Pack, module: Written, x: Tensor, like: Tensor) -> None:
    """Raise ModelError for a question about the input whose answer was no wherever it was tried, or matters.

    Among the rows tried are one of ones, in which every place of a mask counts, and all of `x` (B, ...), one by one.
    """
    passes = pack.session.passes
    if pack.trusted or not passes.asked:
        return
    passes.true = set()
    try:
        for row in (torch.ones_like(x[:1]), *x.split(1)):
            _require_agreement(pack, module(row).detach(), _recorded(pack, row.to(like))[0])
        unknown = sorted(passes.asked - passes.true)
    finally:
        passes.true = None
    if unknown:
        raise ModelError(
            f"{unknown[0]}: the model asks for a number of its input (an `if`, float() or .item()), and nobody knows"
            " whether the answer matters, since it was no for all rows that were tried; use torch.where, or operations"
            " on each example. Leave out a check for NaN: examples that are not finite add nothing to a step"
        )


@contextmanager
def _random_weights(pack: Pack) -> Iterator[None]:
    """Add normal numbers of the usual initial size to all weights while the context lasts; put back modes, too."""
    kept, modes = pack.values.clone(), [(part, part.training) for part in pack.template.modules()]
    generator = torch.Generator().manual_seed(0)
    for offset, shape in pack.spans.values():
        added = torch.randn(shape.numel(), generator=generator) / max(1, shape[1:].numel()) ** 0.5
        pack.values[:, offset : offset + shape.numel()] += added.to(pack.values)
    try:
        yield
    finally:
        pack.values.copy_(kept)
        for part, mode in modes:
            part.training = mode


@contextmanager
def _explained(module: nn.Module, x: Tensor) -> Iterator[None]:
    """Turn failures of a pass over rows `x` into ModelErrors, and refuse a pass that changes the module's state."""
    before = {name: value.detach().clone() for name, value in _tensors(module).items()}
    try:
        yield
    except ModelError:
        raise
    except FAILURES as error:
        where = where_in(error, module)
        if isinstance(error, UsedByItselfError):
            raise DoesNotRunError(f"{where}{error}") from error
        said = f"{where}the model does not run on {len(x)} inputs of shape {tuple(x.shape[1:])}: {error}"
        raise DoesNotRunError(said) from error
    after = _tensors(module)
    for name in before | after:
        if not (name in before and name in after and _same(before[name], after[name])):
            raise _mixes(f"{name} changed in a pass, which nothing clips and no noise hides")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all buffers, parameters and training modes by name.

    A packed module has descriptions of its trained parameters instead, which are left out.
    """
    modes = {f"{name}.training".strip("."): torch.tensor(part.training) for name, part in module.named_modules()}
    return modes | {name: value for name, value in held(module).items() if not isinstance(value, Described)}


def _same(one: Tensor, other: Tensor) -> bool:
    try:
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    except RuntimeError:  # a tensor of a pass that has ended
        return False


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if rows (B, ...) differ by more than a share `tolerance` of the largest number of a row."""
    if one.shape != other.shape:
        return True
    one, other = one.double().cpu().flatten(1), other.double().cpu().flatten(1)
    sizes = other.nan_to_num(0.0, 0.0, 0.0).abs().amax(1, keepdim=True) if other.numel() else other
    same = (one == other) | (one.isnan() & other.isnan())
    return not bool((same | ((one - other).abs() <= tolerance * sizes)).all())


def _mixes(how: str) -> ModelError:
    return ModelError(
        f"{how}: the model mixes examples (or keeps something of them, or draws random numbers), so no record's"
        " influence can be bounded; look for operations over the batch axis"
    )
