"""Passes in which a model's code sees one example at a time, while tensors hold all of them (`torch.func.vmap`).

A user's model is written for a batch. It may index, reshape, compare and add along any axis, and nobody can read off
its code whether row b of a tensor still belongs to example b. So its code runs on a batch of one: inside a pass, each
tensor that was computed from the input stands for N tensors, one for each of the N = R B examples, and an operation on
it is done N times at once.

Guarantee: an operation under `vmap` maps the tensors of example n, and constants, to tensors of example n. So outputs,
layer inputs and gradients of an example are a function of that example, of weights and of constants, whatever the
code does along whatever axis. Nothing is left to tests but the correctness of `vmap` and what a pass leaves behind in
Python (`independence.py`). What depends on several examples, or cannot be done for each alone, fails: reading a number
into Python, tensors whose shape depends on the input, random numbers, writing into a tensor that all examples share.

Layers leave the pass (`Passes.outside`), work on all examples at once with their own rules, and return to it.
Constants that enter a layer (positions) are repeated for each example.

Random numbers come only from dropout and named functions (`dropout.py`). A question about the input (`if mask.all():`)
is always answered with no; `independence.py` refuses a model for which that differs from the true answer.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpsgd_cli.engine.dropout import CHANNELS, NOISE, PLAIN, Masks, still
from dpsgd_cli.errors import ModelError

if TYPE_CHECKING:
    from dpsgd_cli.engine.layers.base import Layer
    from dpsgd_cli.engine.layers.own import Own

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders whose code a model's author did not write."""


class Passes:
    """The pass that is running, if any: `level` of vmap (None outside of it), `rows` = N examples.

    `lent` are the rules of parameters that a module uses in code of its own, and `matrices` the lent copies of matrices
    and the rules of products with them, by id of the copy and function (`MATRICES`). `parts` takes a lent copy apart
    along its first axis, once: each `w[i]` by itself would have a gradient as large as all of w. `asked`
    lists the lines of code whose question about the input was answered with no; tests also collect those for which some
    row's own answer was yes, in `true`, and what the code sees, in `kept`.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        self.rows = 0
        self.lent: list[Own] = []
        self.matrices: dict[tuple[int, Any], tuple[Tensor, Layer]] = {}
        self.parts: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
        self.asked: set[str] = set()
        self.true: set[str] | None = None
        self.masks = Masks()
        self.mode = _Operations(self)
        self.kept: Kept | None = None

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the outputs (N, ...) of `module` for the rows of `x` (N, ...), each of which it sees as (1, ...).

        Raises ModelError, with module and line, for code that cannot be run for each example alone.
        """

        def one(row: Tensor) -> Tensor:
            self.level, self.rows = _functorch.maybe_get_level(row), len(x)
            for own in self.lent:
                own.lend()
            y = module(row.unsqueeze(0))
            y = getattr(y, "logits", y)
            if not isinstance(y, Tensor) or y.shape[:1] != (1,):
                told = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"type {type(y).__name__}"
                raise ModelError(
                    f"for a batch of one example, the model gives outputs of {told}; give one row for it"
                    " (`y.squeeze(-1)`, not `y.squeeze()`)"
                )
            return y.squeeze(0)

        try:
            with warnings.catch_warnings(), self.mode, self.kept or contextlib.nullcontext():
                warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet")
                found: Tensor = torch.func.vmap(one, randomness="error")(x)
            return found
        except (RuntimeError, ValueError, NotImplementedError, IndexError, TypeError) as error:
            raise explained(error, module, x.shape[1:]) from error
        finally:
            self.level = None
            self.matrices.clear()
            self.parts.clear()
            for own in self.lent:
                own.take_back()

    def outside(self) -> _Outside:
        """Leave the pass while the context lasts: tensors of `fold` are ordinary ones."""
        return _Outside(self)

    def fold(self, x: Tensor) -> Tensor:
        """Return the tensors (N, *shape) that `x` of one example's `shape` stands for; constants are repeated."""
        if self.kept is not None:
            self.kept.note(x)
        if not _functorch.is_batchedtensor(x):
            return x.expand(self.rows, *x.shape)
        if _functorch.maybe_get_level(x) != self.level:
            raise ModelError("a layer is called inside of a vmap of the model's own; call it on the whole tensor")
        found: Tensor = _functorch._remove_batch_dim(x, self.level, self.rows, 0)
        return found

    @contextlib.contextmanager
    def watched(self, x: Tensor) -> Iterator[Tensor]:
        """Give a test the numbers (N, ...) that `x` stands for."""
        folded = self.fold(x)
        with self.outside():
            yield folded

    def unfold(self, x: Tensor) -> Tensor:
        """Return one example's tensor of `shape` that stands for `x` (N, *shape)."""
        assert self.level is not None
        found: Tensor = _functorch._add_batch_dim(x, 0, self.level)
        if self.kept is not None:
            self.kept.note(found)
        return found

    def apply(self, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Return `function` of all examples' tensors at once, each (N, ...), as one example's tensor."""
        if self.level is None:
            return function(*given)
        folded = [self.fold(x) for x in given]
        with self.outside():
            found = function(*folded)
        return self.unfold(found)


class Kept(TorchFunctionMode):
    """Function mode that finds out whether code keeps a tensor of each example's own beyond a pass, wherever it may.

    In a later pass, such a tensor would stand for the examples of that pass: one example's number beside another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[weakref.ref[Tensor]] = []

    def note(self, *values: Any) -> None:
        """Remember the tensors of each example's own among `values`, without keeping them."""
        own = (x for x in tree_leaves(values) if isinstance(x, Tensor) and _functorch.is_batchedtensor(x))
        self._seen += map(weakref.ref, own)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.note(args, kwargs, found)
        return found

    def refuse_kept(self, module: nn.Module | None = None) -> None:
        """Raise ModelError if a tensor that was noted still exists; name the attribute of `module` that holds it."""
        self._seen = [one for one in self._seen if one() is not None]
        if self._seen:
            gc.collect()  # takes .4 s, and only cycles need it
        if any(one() is not None for one in self._seen):
            held = [
                f"{name}.{own}".strip(".")
                for name, part in (module or nn.Module()).named_modules()
                for own, value in vars(part).items()
                if any(leaf is one() for leaf in tree_leaves(value) for one in self._seen if leaf is not None)
            ]
            where = ", ".join(held) or "a list, a global, a closure"
            raise ModelError(
                f"a tensor is kept after the pass that computed it (in {where}), so a later example's"
                " gradient may depend on this one; keep nothing of what a function is called with, and return what a"
                " loss needs as an output"
            )


class _Outside:
    """Context outside of a pass. Each call of a layer enters one; a generator would take three times as long."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.level = passes, passes.level
        self.quiet = torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        self.passes.level = None
        self.saved = _functorch.pop_dynamic_layer_stack()
        self.quiet.__enter__()

    def __exit__(self, *error: object) -> None:
        self.quiet.__exit__(None, None, None)
        _functorch.push_dynamic_layer_stack(self.saved)
        self.passes.level = self.level


def _is_constant(x: Any) -> bool:
    """Return True for None, and for a tensor of all examples alike that is not trained (and no description)."""
    plain = type(x) in (Tensor, nn.Parameter) and not x.requires_grad and not _functorch.is_batchedtensor(x)
    return x is None or plain


QUESTIONS = (Tensor.__bool__, Tensor.__contains__)
MATRICES: dict[Any, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    F.linear: lambda input, weight, bias=None: (input, weight, bias),
    torch.addmm: lambda input, mat1, mat2, **scales: (mat1, mat2, input) if not scales else None,  # type: ignore[dict-item]
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), lambda x, y: (x, y, None)),
}
"""Products with a module's own matrix that have a closed form: rows, matrix and what is added, from the arguments."""
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.grad_fn.__get__)  # type: ignore[union-attr]
_WRONG = {
    torch.select_scatter: "torch.where or torch.cat",
    Tensor.select_scatter: "torch.where or torch.cat",
    getattr(F, "linear_cross_entropy", None): "F.cross_entropy(F.linear(x, weight), target)",
}
"""Functions with a wrong gradient under `vmap` (`tests/engine/test_operations.py`), and what to write instead."""


def refuse_hook(function: Any) -> None:
    """Raise ModelError if a model's code calls `function` to change gradients on their way."""
    if function in _HOOKS:
        raise ModelError(
            f"{place_of(sys._getframe(2))}: {HOOKED}; for another gradient of h, write it into the loss's graph:"
            " c * h + (h - c * h).detach() has the outputs of h and c times its gradient"
        )


HOOKED = "a hook changes gradients after they were computed, where each example's own is not known"
"""Why hooks of gradients are refused."""


class _Operations(TorchFunctionMode):
    """Function mode that replaces dropout, answers questions, and runs attention on all examples at once."""

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self.passes = passes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.passes.level is None:
            return func(*args, **kwargs)
        refuse_hook(func)
        if func in _WRONG:
            raise ModelError(
                f"{place_of(sys._getframe(1))}: {func.__name__} has no gradient of one example; write {_WRONG[func]}"
            )
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is Tensor.__getitem__ and type(args[1]) is int and id(args[0]) in self.passes.parts:
            return self.passes.parts[id(args[0])]()[args[1]]
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        if func is F.embedding:
            return self._embedding(*args, **kwargs)
        if func in PLAIN or func in CHANNELS:
            return self._dropout(func in CHANNELS, *args, **kwargs)
        if func in NOISE:
            return self._noise(func, args, kwargs)
        asks = func in QUESTIONS or (func is Tensor.item and args[0].dtype == torch.bool)
        if asks and _functorch.is_batchedtensor(args[0]):
            place = place_of(sys._getframe(1))
            self.passes.asked.add(place)
            if self.passes.true is not None and func is not Tensor.__contains__:
                with self.passes.watched(args[0]) as answers:
                    self.passes.true.update([place] * bool(answers.any()))
            return False
        fixed = func is F.linear and all(map(_is_constant, (*args[1:], *kwargs.values())))
        if fixed and args and self._is_own(args[0]):
            # on all examples at once, as each row's product is its own: vmap would take the sum with the bias apart
            return self.passes.apply(lambda x: F.linear(x, *args[1:], **kwargs), args[0])
        matrix = func in MATRICES and MATRICES[func](*args, **kwargs)
        if matrix:
            known = self.passes.matrices.get((id(matrix[1]), func if func is F.linear else torch.matmul))
            if known is not None:
                y = known[1](matrix[0])
                return y if matrix[2] is None else y + matrix[2]
        return func(*args, **kwargs)

    def _is_own(self, x: Any) -> bool:
        """Return True for a tensor of each example's own numbers, outside of a vmap of the model's own."""
        batched = isinstance(x, Tensor) and _functorch.is_batchedtensor(x)
        return batched and _functorch.maybe_get_level(x) == self.passes.level

    def _dropout(
        self, channels: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        del inplace
        if not training or p == 0 or not self.passes.masks.active:
            return input
        axes = 2 if channels else input.dim()
        return self.passes.apply(lambda x: self.passes.masks.dropped(x, p, 1 + axes), input)

    def _noise(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        like, masks = still(func, args, kwargs), self.passes.masks
        masks.drew = True
        if not like.dim():
            return like  # a coin for a whole batch (LayerDrop), which no example has
        count, drawn = like.numel(), self.passes.fold(like).clone()
        with self.passes.outside():
            if masks.active:
                drawn = masks.noise(NOISE[func][1], count).to(drawn.dtype).view(drawn.shape)
        return self.passes.unfold(drawn)

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        """Look tokens up; `vmap`'s own gradient leaves padding out for the first example only."""
        del norm_type, sparse
        if max_norm is not None or scale_grad_by_freq:
            where = place_of(sys._getframe(2))
            raise ModelError(f"{where}: max_norm and scale_grad_by_freq have no private rule; leave both off")
        known = self.passes.matrices.get((id(weight), F.embedding))
        y = F.embedding(input, weight) if known is None else known[1](input)
        return y if padding_idx is None else without_gradient(y, input == padding_idx % len(weight))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        masks = self.passes.masks
        dropout = dropout_p if dropout_p and masks.active else 0.0
        return self.passes.apply(lambda q, k, v, m=None: attention(q, k, v, m, dropout, masks, **how), *given)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / |v|, with norms over all axes but `dim` (-1: over all); vmap would run torch's own by example."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=dim != -1))


def without_gradient(y: Tensor, where: Tensor) -> Tensor:
    """Return vectors `y` (..., E), without a gradient `where` (...) is True."""
    return torch.where(where.unsqueeze(-1), y.detach(), y)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, masks: Masks,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return scaled dot-product attention of q (N, ..., T, D), k and v (N, ..., S, D); mask (N, ..., T, S).

    Like `torch.nn.functional.scaled_dot_product_attention`, with dropout by `masks`.
    """
    if mask is not None and mask.dim() < q.dim():
        mask = mask.view(len(mask), *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
    if dropout == 0 and q.dim() >= 4:
        # in four dimensions: others are computed step by step
        q4, k4, v4 = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        if mask is not None:
            mask = mask.expand(*q.shape[:-3], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
        found = F.scaled_dot_product_attention(
            q4, k4, v4, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found.view(*q.shape[:-1], v.shape[-1])
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    return (masks.dropped(weights, dropout, weights.dim()) if dropout else weights) @ v


def place_of(frame: FrameType | None) -> str:
    """Return `line 12 of net.py (`code`)` for the innermost frame of a model's author; torch's and ours are left out.

    Args:
        frame: where to look from, outwards.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame = frame.f_back
    return "an unknown line" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _line(file: str, number: int) -> str:
    code = linecache.getline(file, number).strip()
    return f"line {number} of {Path(file).name}" + (f" (`{code}`)" if code else "")


_REASONS = (
    (("data-dependent control flow", ".item()", "local_scalar", "aten::equal", "accessing `data`", "data pointer",
      "allclose", "numpy", "one_hot"), (
        "the model asks for a number of its input (an `if`, float() or .item()): it may be of any example, and what"
        " is done by it is done to all, so no record's influence can be bounded; use torch.where, or operations on"
        " each example"
    )),
    (("dynamic shape", "nonzero", "boolean mask", "aten::unique", "masked_select"), (
        "the shape of a tensor depends on the input (`x[mask]`, nonzero, unique), so examples have no common shape;"
        " compute on all places and multiply with the mask, or use torch.where"
    )),
    (("must have the same dtype, but got Long", "same dtype, but got: long", "not implemented for 'Long'"), (
        "the records are integers (tokens), and this takes other numbers; look them up in an nn.Embedding, or write"
        " x.float()"
    )),
    (("index out of range in self",), (
        "a token is beyond the rows of the nn.Embedding; give it one for each token, from 0 to the largest"
    )),
    (("randomness",), (
        "random numbers are drawn from a stream that no seed of a trial controls; use nn.Dropout, torch.rand or"
        " torch.randn (also _like), which are each example's own"
    )),
    (("inplace arithmetic", "in-place", "inplace", "In-place", "match the broadcast shape"), (
        "numbers of one example are written into a tensor that all examples share; make it of the input"
        " (`x.new_zeros(...)`, torch.zeros_like(x)), or use torch.cat or torch.stack"
    )),
)  # fmt: skip
"""Parts of an error's text, and what it means to a model's author."""


class DoesNotRunError(ModelError):
    """A pass through the model failed for no reason that `explained` knows."""


def where_in(error: Exception, model: nn.Module) -> str:
    """Return `line 12 of net.py (`code`), in module 'head': ` for the last line of a model's code in the trace of
    `error`; empty if there is none."""
    named = {id(module): name for name, module in model.named_modules()}
    where = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_HIDDEN):
            own = named.get(id(frame.f_locals.get("self")))
            where = f"{_line(file, number)}{f', in module {own!r}' if own else ''}: "
    return where


def explained(error: Exception, model: nn.Module, shape: torch.Size) -> ModelError:
    """Return an error that names module and line in a model's code where `error` came up, and what to write instead."""
    where, text = where_in(error, model), str(error)
    reason = next((reason for parts, reason in _REASONS if any(part in text for part in parts)), None)
    if reason is None:
        said = text.strip().splitlines()[0] if text else repr(error)
        return DoesNotRunError(
            f"{where}the model does not run on inputs of shape {tuple(shape)}, one at a time: {said}"
        )
    return ModelError(where + reason)
