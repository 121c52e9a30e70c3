"""Base classes of layer rules: R copies of one layer that runs forward, records its passes and sums clipped gradients.

A recorded forward pass keeps the layer's input `a`. One backward pass through the whole model gives the gradient `d`
of the summed loss with respect to the layer's output. Each example's loss depends on that example alone, so row b of
`d` belongs to example b. From `a` and `d` a rule computes every example's squared gradient norm. Once the clip factors
are known, it computes the clipped sum: an ordinary weight-gradient product with rescaled rows. There is no second
backward pass.

Shapes: between layers, activations are folded as (R*B, ...), or stand for that while a user's code runs on one example
at a time (`apart.py`). A rule sees (R, B, ...). All trials may share an input that no parameter has touched yet: it is
passed as (B, ...) and a rule sees (1, B, ...).

Examples may come in K copies (augmentations): K B rows, all first copies first. The copies of an example have one
gradient and share its clip factor. A rule then sees K calls of B rows; it adds up several calls of a layer anyway.

The formulas are in the other files of this folder, one for each kind of layer; clipping is in `clipping/run.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpsgd_cli.engine.apart import Passes
from dpsgd_cli.engine.precision import LOST, PRECISION, product
from dpsgd_cli.errors import ModelError

STATEMENTS = ("kinds", "clipped", "holds_gradients", "rounds")
CLOSED_FORM = "by a closed form, from inputs and gradients by outputs; no example's own gradient is held"
OWN_GRADIENTS = "by each example's own gradient, which is held: its parameters times the rows of a batch"
EITHER = "by a closed form, or each example's own gradient, whichever takes fewer operations"
_PLAIN = (bool, int, float, str, tuple)


@torch.library.custom_op("dpsgd::stored", mutates_args=())
def stored(x: Tensor) -> Tensor:
    """Return a copy of `x`; a compiler knows nothing of it, so it must have the numbers of `x` in memory."""
    return x.clone()


stored.register_fake(torch.empty_like)


class Session:
    """State that all layers of a pack share during a pass.

    `rows`: batch rows per trial, `copies` of each example. `recording`: keep inputs and gradients. `rounds`: passes are
    rounded. `exact`: dtype in which recorded tensors are returned. `tracing`: a compiler traces the operations, so no
    code may read a number. `passes`: what runs a user's code on one example at a time.
    """

    def __init__(self, trials: int, anchor: Tensor) -> None:
        self.passes = Passes()
        self.trials = trials
        self.rows = 0
        self.copies = 1
        self.recording = False
        self.rounds = False
        self.exact = anchor.dtype
        self.tracing = False
        self.anchor = anchor

    def stored(self, x: Tensor) -> Tensor:
        """Return `x`; in a compiled program as numbers that are computed and rounded once, whoever reads them."""
        return stored(x) if self.tracing else x

    def begin(self) -> None:
        """Start recording.

        Autograd ends a pass on the stream where its leaf was first used, so each pass gets a new leaf. An old leaf may
        survive its pass until garbage collection, and a graph that torch captures must not wait for another stream.
        """
        self.recording = True
        self.anchor = self.anchor.detach().requires_grad_()


class Layer(nn.Module, ABC):
    """R copies of `source`; parameters live in the pack's flat tensor and are bound as views (R, *shape).

    Every rule sets these four attributes in its own body; none has a default. Defining a rule without one raises
    TypeError, unless the class is declared with `stated=False` because it is not a rule by itself.

    `parameters_of`: the source's trained parameters by the rule's own names. Several rules may share one (tied
    weights, `tied.py`).

    `kinds`: the exact module types that the rule covers. `clipped`: the method of clipping and its cost, in words.
    `holds_gradients`: a step may hold each example's own gradient, as large as the layer's parameters.
    `rounds`: the rule is exact for rounded passes: it computes norms and sums only from the output of `recorded`, or by
    `precision.product` from that of `stored`.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]]
    clipped: ClassVar[str]
    holds_gradients: ClassVar[bool]
    rounds: ClassVar[bool]

    def __init_subclass__(cls, stated: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        left_out = [name for name in STATEMENTS if name not in vars(cls)]
        if stated and left_out:
            raise TypeError(f"layer rule {cls.__name__} must state {', '.join(left_out)}: none has a default")

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__()
        self.session = session
        self.parameters_of = self.trained_of(source)
        self.names = list(self.parameters_of)
        self.values: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.bound: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.kind = type(source).__name__
        self._told: dict[str, Any] = {name: value for name, value in vars(source).items() if isinstance(value, _PLAIN)}
        described = {name: p for name, p in source._parameters.items() if p is not None}
        self._parameters = {name: Described.of(p, self.kind, name) for name, p in described.items()}  # type: ignore[misc]
        self._told |= {name: None for name, p in source._parameters.items() if p is None}
        self.training = source.training

    def __getattr__(self, name: str) -> Any:
        """Return a plain attribute of the source module, such as a size, or the description of a parameter."""
        if name in self.__dict__.get("_told", {}):
            return self._told[name]
        return super().__getattr__(name)

    @classmethod
    def trained_of(cls, source: nn.Module) -> dict[str, nn.Parameter]:
        """Return the trained parameters of `source` by the names that this rule gives them."""
        return {name: p for name, p in source.named_parameters(remove_duplicate=False) if p.requires_grad}

    @classmethod
    def accepts(cls, source: nn.Module) -> bool:
        """Return True if the rule covers `source`: exact type, no hooks, only parameters of its own, all trainable."""
        own = {name for name, _ in source.named_parameters(recurse=False)}
        every = dict(source.named_parameters())
        hooked = bool(source._forward_hooks or source._forward_pre_hooks or "forward" in vars(source))
        return (
            type(source) in cls.kinds
            and own == set(every)
            and all(p.requires_grad for p in every.values())
            and not hooked
        )

    def bind(self, values: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        """Attach the views that hold parameter values and receive clipped sums, both (R, *shape)."""
        self.bound = values, sums
        self.values, self.sums = self.turned(values), self.turned(sums)

    def turned(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return views of parameters as this rule computes with them."""
        return views

    def forget(self) -> None:
        """Drop everything recorded."""
        self.inputs.clear()
        self.gradients.clear()

    def item_axes(self, axes: int) -> tuple[int, bool]:
        """Return how many of the last axes of an input belong to one item, and whether a rule takes many items at once.

        Args:
            axes: number of axes of the input, the batch included.
        """
        return axes - 1, False

    def forward(self, x: Tensor) -> Tensor:
        """Map (R*B, ...), or (B, ...) that all trials share, to (R*B, ...)."""
        passes = self.session.passes
        return self._examples(x) if passes.level is None else passes.apply(self._of_one, x)

    def _of_one(self, x: Tensor) -> Tensor:
        """Map inputs (N, *shape), each of which a model's code saw as `shape`, with a batch axis of any length."""
        item, many = self.item_axes(x.dim() - 1)
        if x.dim() - 1 <= item:
            return self._examples(x)
        if x.shape[1] == 1:
            return self._examples(x.squeeze(1)).unsqueeze(1)
        return self._examples(x) if many else torch.stack([self._examples(part) for part in x.unbind(1)], 1)

    def _examples(self, x: Tensor) -> Tensor:
        x = self.prepare(x)
        if self.session.recording:
            return _Recorded.apply(x, self.session.anchor, self)
        return self.compute(self.unfold(x)).flatten(0, 1)

    def prepare(self, x: Tensor) -> Tensor:
        """Apply operations without parameters before the recorded part; autograd differentiates them."""
        return x

    def one_by_one(self, like: Tensor) -> bool:
        """Return True if operations that know no trials run for each trial alone, like on a CPU.

        On a GPU they run once for all trials: there, a step of small operations takes as long as it takes to start
        them. One trial alone needs no such detour.
        """
        return self.session.trials == 1 or not like.is_cuda

    def unfold(self, x: Tensor) -> Tensor:
        """Reshape (R*B, ...) to (R, B, ...), and (B, ...) that all trials share to (1, B, ...)."""
        trials, rows = self.session.trials, self.session.rows
        if x.shape[0] == rows:
            return x.unsqueeze(0)
        return x.reshape(trials, rows, *x.shape[1:])

    @abstractmethod
    def compute(self, a: Tensor) -> Tensor:
        """Return the output (R, B, ...) for input (R or 1, B, ...)."""

    @abstractmethod
    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        """Return the gradient with respect to the input, (R, B, ...), from the gradient `d` of the output."""

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return the squared L2 norm (R, B) of each example's gradient for this layer, over all recorded calls."""

    @abstractmethod
    def add_clipped_sums(self, factors: Tensor) -> None:
        """Add sum_b factors[r, b] * gradient[r, b] to `sums`; factors (R, B) are at least 0."""

    def contributions(self, name: str) -> list[Outer | Each]:
        """Return what the recorded calls add to one example's gradient for parameter `name`; their sum is the gradient.

        Only needed for a weight that several layers share (`tied.py`). Raises ModelError without a rule for that.
        """
        raise ModelError(f"the {name} of {self.kind} is shared with another layer, which has no rule; use one layer")

    @property
    def used(self) -> bool:
        """True if at least one recorded call took part in the loss."""
        return any(d is not None for d in self.gradients)

    def uses(self, name: str) -> bool:
        """Return True if a recorded call that took part in the loss used parameter `name`."""
        return self.used

    def recorded(self) -> list[tuple[Tensor, Tensor]]:
        """Return (a, d) of every call that took part in the loss: B rows each, one call per copy of the examples."""
        return [pair for call, d in enumerate(self.gradients) if d is not None for pair in self.of_call(call)]

    def stored(self) -> list[tuple[Tensor, Tensor]]:
        """Return `recorded`, for `precision.product`: what rounded passes have left stays as short as they left it."""
        if self.session.exact == PRECISION:
            return self.recorded()
        pairs = ((a, d) for a, d in zip(self.inputs, self.gradients, strict=True) if d is not None)
        return [pair for a, d in pairs for pair in zip(self.by_copy(a), self.by_copy(d), strict=True)]

    def of_call(self, call: int) -> list[tuple[Tensor, Tensor]]:
        """Return `recorded` of one call."""
        a, d = self.inputs[call], self.gradients[call]
        assert d is not None
        # in the dtype of products, since rounded passes are less precise; token ids keep their type
        a = a.to(self.session.exact) if a.is_floating_point() else a
        return list(zip(self.by_copy(a), self.by_copy(d.to(self.session.exact)), strict=True))

    def reduce(self, call: int) -> None:
        """Replace what a call has recorded, if all that is needed of it is smaller."""

    def by_copy(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split (R or 1, K B, ...), K copies of B examples in a row, into K tensors (R or 1, B, ...)."""
        return (x,) if x.shape[1] == self.session.rows else x.split(self.session.rows, dim=1)

    def add(self, name: str, factors: Tensor, gradients: Tensor) -> None:
        """Add sum_b factors[r, b] gradients[r, b] to the sums of one parameter: gradients (R, B, *shape)."""
        total = torch.bmm(factors.unsqueeze(1), gradients.reshape(*gradients.shape[:2], -1).to(factors.dtype))
        self.sums[name] += total.view(self.sums[name].shape)

    def zero_nonfinite(self, bad: Tensor) -> None:
        """Zero the recorded rows of examples whose gradient is not finite; `bad` is bool (R, B)."""
        for index, (a, d) in enumerate(zip(self.inputs, self.gradients, strict=True)):
            if d is None:
                continue
            every = bad if d.shape[1] == bad.shape[1] else bad.repeat(1, d.shape[1] // bad.shape[1])
            self.gradients[index] = d.masked_fill(aligned(every, d), 0.0)
            if a.is_floating_point():
                rows = every if a.shape[0] == every.shape[0] else every.any(dim=0, keepdim=True)
                # a shared row is bad in a trial if its own values or that trial's weights are:
                # zero it only if the row itself is not finite
                if a.shape[0] != every.shape[0]:
                    rows = rows & ~torch.isfinite(a.flatten(2)).all(dim=2)
                self.inputs[index] = a.masked_fill(aligned(rows, a), 0.0)


class UsedByItselfError(AttributeError):
    """A trained parameter of a layer is used outside of its layer's call, where no rule clips it."""


class Described(Tensor):
    """Facts that may be read of a trained parameter: shape, dtype, device.

    Any other use of it, within a pass, is of the example's own copy, which `lend` gives. Without it, and elsewhere, it
    is refused by name.
    """

    _said: str
    lend: Callable[[], Tensor | None] | None = None

    @staticmethod
    def of(parameter: Tensor, kind: str, name: str) -> Described:
        """Return the description of `parameter`, the attribute `name` of a module of class `kind`."""
        made = Described._made(parameter, parameter.dtype)
        made._said = (
            f"{kind} is clipped by what it is called with, and its {name} may not be used by itself; call it, or make"
            f" {name} a parameter of the module that uses it"
        )
        return made

    @staticmethod
    def _made(like: Tensor, dtype: torch.dtype) -> Described:
        made: Described = Tensor._make_wrapper_subclass(
            Described, like.shape, dtype=dtype, device=like.device, requires_grad=False
        )
        return made

    def of_dtype(self, dtype: torch.dtype) -> Described:
        """Return the description of the same parameter rounded to `dtype`."""
        made = Described._made(self, dtype)
        made._said, made.lend = self._said, self.lend
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TELLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        func = Tensor.detach if func == Tensor.data.__get__ else func  # type: ignore[attr-defined]
        return func(*tree_map(Described._copied, args), **tree_map(Described._copied, kwargs or {}))

    @staticmethod
    def _copied(one: Any) -> Any:
        if not isinstance(one, Described):
            return one
        copy = None if one.lend is None else one.lend()
        if copy is None:
            raise UsedByItselfError(one._said)
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UsedByItselfError("a trained parameter of a layer may not be used by itself; call the layer")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Described(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_TELLS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "is_meta",
      "requires_grad", "layout", "grad", "is_leaf", "is_sparse", "is_quantized")),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.get_device, Tensor.stride, Tensor.is_contiguous,
    Tensor.__hash__,
}  # fmt: skip
"""What a description tells; a list of what is allowed, so that whatever is not on it is refused."""


class Ruled(nn.Module):
    """A module with a rule of its own, used instead of `RULES`; an audit adds some."""

    rule: ClassVar[type[Layer]]


@dataclass(frozen=True)
class Outer:
    """A contribution to a matrix: sum_t rows_t columns_t^T, for rows (R or 1, B, T, O) and columns (R or 1, B, T, I).

    Integer rows (R or 1, B, T) stand for unit vectors of `height` numbers.
    """

    rows: Tensor
    columns: Tensor
    height: int

    def instantiated(self) -> Tensor:
        """Return the matrices (R, B, O, I)."""
        rows = self.rows
        if not rows.is_floating_point():
            rows = torch.nn.functional.one_hot(rows, self.height).to(self.columns.dtype)
        return product(rows.transpose(-1, -2), self.columns)


@dataclass(frozen=True)
class Each:
    """A contribution (R, B, *shape): each example's own gradient."""

    gradient: Tensor


class Instantiated(Layer, stated=False):
    """A rule that computes every example's gradient explicitly, once: clipped sums are of the tensors in the norms."""

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        self._kept: dict[str, Tensor] | None = None

    @abstractmethod
    def per_example(self) -> dict[str, Tensor]:
        """Return each example's gradient (R, B, *shape) for every parameter, over all recorded calls."""

    @property
    def kept(self) -> dict[str, Tensor]:
        """Each example's gradient of the recorded pass."""
        if self._kept is None:
            self._kept = self.per_example()
        return self._kept

    def forget(self) -> None:
        super().forget()
        self._kept = None

    def zero_nonfinite(self, bad: Tensor) -> None:
        super().zero_nonfinite(bad)
        if self._kept is not None:
            self._kept = {name: g.masked_fill(aligned(bad, g), 0.0) for name, g in self._kept.items()}

    def contributions(self, name: str) -> list[Outer | Each]:
        return [Each(self.kept[name])] if name in self.kept else []

    def square_norms(self) -> Tensor:
        self._kept = {name: self.session.stored(g) for name, g in self.kept.items()}
        # reshaped, not flattened: a parameter may have no dimension
        return added(g.reshape(*g.shape[:2], -1).square().sum(dim=2) for g in self.kept.values())

    def add_clipped_sums(self, factors: Tensor) -> None:
        for name, g in self.kept.items():
            self.add(name, factors, g)


def added(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, of which there is at least one."""
    first, *others = parts
    for other in others:
        first = first + other
    return first


def gram(x: Tensor) -> Tensor:
    """Return the products (..., T, T) of all pairs of rows of `x` (..., T, n)."""
    return product(x, x.transpose(-1, -2))


def gram_is_cheaper(positions: int, inputs: int, outputs: int) -> bool:
    """Return True if a norm takes fewer operations from Gram matrices of positions than from the gradient itself.

    Both are exact. Per example, the Gram form takes T^2 (I + O) operations and the gradient T I O.

    >>> gram_is_cheaper(5, 10, 10), gram_is_cheaper(6, 10, 10)
    (True, False)
    """
    return positions * (inputs + outputs) <= inputs * outputs


def instantiated_squares(squares: Tensor, inputs: Tensor, outputs: Tensor, short_terms: int = 0) -> Tensor:
    """Return the squared norm of an instantiated gradient sum_t d_t a_t^T with a margin for rounding.

    `inputs` is sum_t |a_t|^2 and `outputs` is sum_t |d_t|^2. The clipped sum and the norm come from different matrix
    products. Where terms cancel, the two differ by rounding errors of a few machine epsilons of sum_t |a_t| |d_t|,
    whose square is at most `inputs` times `outputs`. The margin is 8 epsilons of that product, as in `gram_squares`;
    where nothing cancels it is far below one part in 1000. `short_terms`: the number of terms t, if they are short.
    """
    squares = squares + inputs * outputs * (8 * torch.finfo(inputs.dtype).eps)
    return raised(squares, inputs.sqrt() * outputs.sqrt(), short_terms) if short_terms else squares


def raised(squares: Tensor, most: Tensor, terms: int = 0) -> Tensor:
    """Return squared norms of gradients by short factors, raised by what `precision.product` may lose.

    `most` is sum_t |a_t| |d_t|. `terms`: how many terms a tensor core adds up for each entry of the gradient.
    """
    return (squares.sqrt() + (LOST + terms / 8 * torch.finfo(squares.dtype).eps) * most).square()


def gram_squares(inputs: Tensor, outputs: Tensor, width: int, short: bool = False) -> Tensor:
    """Return squared norms (...) of sum_t d_t a_t^T from the Gram matrices (..., T, T) of the a_t and of the d_t.

    `width` is the larger of the dimensions of a_t and d_t. `short`: the matrices are of short numbers; each may be off
    by width / 8 epsilons of |a_t| |a_s|, or of |d_t| |d_s|.

    Guarantee: no less than the true squared norm. Terms of the sum may cancel and leave rounding errors larger than
    the result, even below zero. The rounding errors of the matrix products and of the sum were measured to stay within
    3 machine epsilons of (sum_t |a_t| |d_t|)^2; 8 are added. Where nothing cancels, this is far below one part in 1000.
    Squares that underflow hide at most `width` times the smallest normal number in an entry of either matrix; that is
    added too.
    """
    ours, theirs = inputs.diagonal(dim1=-2, dim2=-1).sqrt(), outputs.diagonal(dim1=-2, dim2=-1).sqrt()
    numbers = torch.finfo(inputs.dtype)
    most = (ours * theirs).sum(dim=-1)
    margin = most.square() * ((8 + short * width / 4) * numbers.eps)
    hidden = (ours.sum(dim=-1).square() + theirs.sum(dim=-1).square()) * (width * numbers.tiny)
    squares = (inputs * outputs).sum(dim=(-1, -2)).clamp_min_(0.0) + margin + hidden
    return raised(squares, most) if short else squares


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape along a new first axis; a single one without a copy."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def aligned(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per example, (R, B), so that it broadcasts over `like` (R, B, ...)."""
    return numbers.reshape(*numbers.shape, *[1] * (like.dim() - 2))


class _Recorded(torch.autograd.Function):
    """Autograd function that runs a layer and passes it the gradient of its output.

    The anchor makes autograd visit even the first layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Layer) -> Tensor:
        del anchor
        a = layer.session.stored(layer.unfold(x.detach()))
        ctx.layer, ctx.call, ctx.shape, ctx.version = layer, len(layer.inputs), x.shape, a._version
        layer.inputs.append(a)
        layer.gradients.append(None)
        y = layer.compute(a).flatten(0, 1)
        # a view returned from a Function must not be modified in place, as nn.ReLU(inplace=True) does:
        # return a separate tensor with the same storage
        if layer.session.tracing:
            return y.clone()  # a compiler removes the copy
        own = y.new_empty(0)
        return own.set_(y) if y._is_view() else y  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        layer: Layer = ctx.layer
        if layer.inputs[ctx.call]._version != ctx.version:
            raise ModelError(
                "the input of a layer was changed in place after the layer had used it; change a copy instead"
            )
        d = gradient.reshape(layer.session.trials, layer.session.rows, *gradient.shape[1:])
        d = layer.gradients[ctx.call] = layer.session.stored(d)
        found = None
        if ctx.needs_input_grad[0]:
            found = layer.input_gradient(layer.inputs[ctx.call], d).reshape(ctx.shape)
        layer.reduce(ctx.call)
        return found, None, None
