"""A packed layer: R copies of one layer that runs forward, keeps what clipping needs, and sums clipped gradients.

A recorded forward keeps the layer's input `a`; one backward pass through the whole model delivers the
gradient `d` of the summed loss by the layer's output. Because each example's loss depends on that example
alone, row b of `d` is example b's own. From `a` and `d` a rule computes every example's squared gradient
norm, and, once clip factors are known, the factored sum of gradients: an ordinary weight-gradient product
with rows rescaled. There is no second backward pass.

Shapes: activations cross layer borders folded as (R*B, ...), so that any parameterless module between them
works unchanged; a rule sees (R, B, ...). An input that no parameter has touched yet may be shared by all
trials: it crosses as (B, ...) and a rule sees (1, B, ...).

Examples may come in K copies (augmentations), K B rows, all first copies first. Their gradient is one: the copies share
its factor. A rule then sees K calls of B rows, and a layer that was called several times adds up its calls anyway.

Not here: the formula of any layer kind (one file each beside this), clipping itself (`clipping/run.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpsgd_cli.errors import ModelError

STATEMENTS = ("kinds", "clipped", "holds_gradients", "rounds")
CLOSED_FORM = "by a closed form, from inputs and gradients by outputs; no example's own gradient is held"
OWN_GRADIENTS = "by each example's own gradient, which is held: its parameters times the rows of a batch"
EITHER = "by a closed form, or each example's own gradient, whichever takes fewer operations"
_PLAIN = (bool, int, float, str, tuple)


class Session:
    """What the layers of one pack share during a pass.

    Batch rows per trial; whether to record, to round; how precisely what was recorded is given out; and whether
    operations are being written down for a compiler, so that nothing may ask what a number is.
    """

    def __init__(self, trials: int, anchor: Tensor) -> None:
        self.trials = trials
        self.rows = 0
        self.recording = False
        self.rounds = False
        self.exact = anchor.dtype
        self.tracing = False
        self.anchor = anchor

    def begin(self) -> None:
        """Record from now on.

        Autograd ends a pass on the stream where its leaf was first used, so each pass has a leaf of its own: an earlier
        one may outlive its pass in garbage, and a graph that torch captures may not wait for another stream.
        """
        self.recording = True
        self.anchor = self.anchor.detach().requires_grad_()


class Layer(nn.Module, ABC):
    """R copies of `source`; parameters live in the pack's flat tensor and are bound as views (R, *shape).

    Every rule states the next four in its own body: none has a default. A class that is no rule by itself says
    `stated=False`. Raises TypeError for any other that leaves one out.

    `kinds`: the exact types of modules that it covers. `clipped`: how, in words, and what that takes.
    `holds_gradients`: a step may hold each example's own gradient, as large as the layer's parameters.
    `rounds`: the rule is exact for rounded passes: it takes norms and sums from what `recorded` gives alone.
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
        self.names: list[str] = [name for name, p in source.named_parameters() if p.requires_grad]
        self.values: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.kind = type(source).__name__
        self._told = {name: value for name, value in vars(source).items() if isinstance(value, _PLAIN)}
        self._kept = {name for name, _ in source.named_parameters(recurse=False)} | set(dict(source.named_children()))

    def __getattr__(self, name: str) -> Any:
        """What the source says of itself in plain values (sizes, say); its parameters are given to nobody."""
        if name in self.__dict__.get("_told", {}):
            return self._told[name]
        if name in self.__dict__.get("_kept", ()):
            raise AttributeError(
                f"{self.kind} is clipped by what it is called with, and its {name} may not be used by itself; call it"
            )
        return super().__getattr__(name)

    @classmethod
    def accepts(cls, source: nn.Module) -> bool:
        """Whether this rule covers `source`: its exact type, all parameters its own, trainable and unhooked."""
        own = {name for name, _ in source.named_parameters(recurse=False)}
        every = dict(source.named_parameters())
        hooked = bool(source._forward_hooks or source._forward_pre_hooks)
        return (
            type(source) in cls.kinds
            and own == set(every)
            and all(p.requires_grad for p in every.values())
            and not hooked
        )

    def bind(self, values: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        """Attach the views that hold parameter values and receive clipped sums, both (R, *shape)."""
        self.values, self.sums = values, sums

    def forget(self) -> None:
        """Drop everything recorded."""
        self.inputs.clear()
        self.gradients.clear()

    def forward(self, x: Tensor) -> Tensor:
        """(R*B, ...) or shared (B, ...) in; (R*B, ...) out."""
        x = self.prepare(x)
        if self.session.recording:
            return _Recorded.apply(x, self.session.anchor, self)
        return self.compute(self.unfold(x)).flatten(0, 1)

    def prepare(self, x: Tensor) -> Tensor:
        """Parameterless work that autograd may do itself, before the recorded part."""
        return x

    def unfold(self, x: Tensor) -> Tensor:
        """(R*B, ...) -> (R, B, ...); shared (B, ...) -> (1, B, ...)."""
        trials, rows = self.session.trials, self.session.rows
        if x.shape[0] == rows:
            return x.unsqueeze(0)
        return x.reshape(trials, rows, *x.shape[1:])

    @abstractmethod
    def compute(self, a: Tensor) -> Tensor:
        """Output (R, B, ...) of input (R or 1, B, ...)."""

    @abstractmethod
    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        """Gradient by the input, (R, B, ...), from the gradient `d` by the output."""

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Squared L2 norm of each example's gradient by this layer's parameters, (R, B), over all recorded calls."""

    @abstractmethod
    def add_clipped_sums(self, factors: Tensor) -> None:
        """Add sum_b factors[r, b] * gradient[r, b] to `sums`; factors (R, B) are at least 0."""

    @property
    def used(self) -> bool:
        """Whether a recorded call took part in the loss."""
        return any(d is not None for d in self.gradients)

    def recorded(self) -> list[tuple[Tensor, Tensor]]:
        """(a, d) of every call that took part in the loss; B rows each, one call for each copy of the examples."""
        found: list[tuple[Tensor, Tensor]] = []
        for a, d in zip(self.inputs, self.gradients, strict=True):
            if d is not None:
                # as precise as what is computed of them, which rounded passes are not; tokens stay as they are
                a = a.to(self.session.exact) if a.is_floating_point() else a
                found += zip(self.by_copy(a), self.by_copy(d.to(self.session.exact)), strict=True)
        return found

    def by_copy(self, x: Tensor) -> tuple[Tensor, ...]:
        """(R or 1, K B, ...), K copies of B examples one after the other -> K times (R or 1, B, ...)."""
        return (x,) if x.shape[1] == self.session.rows else x.split(self.session.rows, dim=1)

    def add(self, name: str, factors: Tensor, gradients: Tensor) -> None:
        """Add sum_b factors[r, b] gradients[r, b] to the sums of one parameter: gradients (R, B, *shape)."""
        total = torch.bmm(factors.unsqueeze(1), gradients.reshape(*gradients.shape[:2], -1).to(factors.dtype))
        self.sums[name] += total.view(self.sums[name].shape)

    def erase(self, bad: Tensor) -> None:
        """Zero the recorded rows of examples whose gradient is not finite; `bad` is bool (R, B)."""
        for index, (a, d) in enumerate(zip(self.inputs, self.gradients, strict=True)):
            if d is None:
                continue
            every = bad if d.shape[1] == bad.shape[1] else bad.repeat(1, d.shape[1] // bad.shape[1])
            self.gradients[index] = d.masked_fill(aligned(every, d), 0.0)
            if a.is_floating_point():
                rows = every if a.shape[0] == every.shape[0] else every.any(dim=0, keepdim=True)
                # a shared row is bad in one trial only if its own values or that trial's weights are:
                # zero it only where it is itself not finite
                if a.shape[0] != every.shape[0]:
                    rows = rows & ~torch.isfinite(a.flatten(2)).all(dim=2)
                self.inputs[index] = a.masked_fill(aligned(rows, a), 0.0)


class Ruled(nn.Module):
    """A module that brings its own rule, which `RULES` then is not asked for; for what an audit adds to a model."""

    rule: ClassVar[type[Layer]]


class Instantiated(Layer, stated=False):
    """A rule for parameters so few that every example's gradient is simply computed."""

    @abstractmethod
    def per_example(self) -> dict[str, Tensor]:
        """Each example's gradient (R, B, *shape) by every parameter, over all recorded calls."""

    def square_norms(self) -> Tensor:
        return torch.stack(
            # reshaped, not flattened: a parameter may have no dimension
            [g.reshape(*g.shape[:2], -1).square().sum(dim=2) for g in self.per_example().values()]
        ).sum(dim=0)

    def add_clipped_sums(self, factors: Tensor) -> None:
        for name, g in self.per_example().items():
            self.add(name, factors, g)


def gram_is_cheaper(positions: int, inputs: int, outputs: int) -> bool:
    """Which form of a norm takes fewer operations: from Gram matrices of positions, or from the instantiated gradient.

    Both are exact. The Gram form takes T^2 (I + O) operations an example and the instantiated one T I O.

    >>> gram_is_cheaper(5, 10, 10), gram_is_cheaper(6, 10, 10)
    (True, False)
    """
    return positions * (inputs + outputs) <= inputs * outputs


def instantiated_margin(inputs: Tensor, outputs: Tensor) -> Tensor:
    """What to add to the squared norm of sum_t d_t a_t^T that was instantiated, from sum_t |a_t|^2 and sum_t |d_t|^2.

    The clipped sum is another matrix product than the norm's. Where terms cancel, the two differ by rounding errors
    of a few machine epsilons of sum_t |a_t| |d_t|, whose square is at most the product of the two. 8 epsilons of
    it are taken, as for `gram_squares`; where nothing cancels this is far below one part in 1000.
    """
    return inputs * outputs * (8 * torch.finfo(inputs.dtype).eps)


def gram_squares(inputs: Tensor, outputs: Tensor, width: int) -> Tensor:
    """Squared norms (...) of sums over t of d_t a_t^T, from the Gram matrices (..., T, T) of the a_t and of the d_t.

    `width` is the larger of the lengths of an a_t and a d_t.

    Guarantee: no less than the true squared norm. Terms of the sum may cancel and leave rounding errors larger
    than what remains, even below zero; those of matrix products and of the sum were measured to stay within 3 machine
    epsilons of (sum_t |a_t| |d_t|)^2, and 8 are added. Where nothing cancels this is far below one part in 1000.
    Squares that underflow hide at most `width` least numbers in an entry of either matrix, and are added too.
    """
    ours, theirs = inputs.diagonal(dim1=-2, dim2=-1).sqrt(), outputs.diagonal(dim1=-2, dim2=-1).sqrt()
    numbers = torch.finfo(inputs.dtype)
    margin = (ours * theirs).sum(dim=-1).square() * (8 * numbers.eps)
    hidden = (ours.sum(dim=-1).square() + theirs.sum(dim=-1).square()) * (width * numbers.tiny)
    return (inputs * outputs).sum(dim=(-1, -2)).clamp_min_(0.0) + margin + hidden


def aligned(numbers: Tensor, like: Tensor) -> Tensor:
    """One number an example, (R, B), as it is broadcast over `like` (R, B, ...)."""
    return numbers.reshape(*numbers.shape, *[1] * (like.dim() - 2))


class _Recorded(torch.autograd.Function):
    """Runs a layer and hands it the gradient by its output; the anchor makes autograd visit even the first layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: Layer) -> Tensor:
        del anchor
        a = layer.unfold(x.detach())
        ctx.layer, ctx.call, ctx.shape, ctx.version = layer, len(layer.inputs), x.shape, a._version
        layer.inputs.append(a)
        layer.gradients.append(None)
        y = layer.compute(a).flatten(0, 1)
        # a view returned from a Function may not be modified in place, as nn.ReLU(inplace=True) would:
        # hand out the same storage as a tensor of its own
        if layer.session.tracing:
            return y.clone()  # which a compiler leaves out
        own = torch.empty(0, dtype=y.dtype, device=y.device)
        return own.set_(y) if y._is_view() else y  # type: ignore[call-overload]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        layer: Layer = ctx.layer
        if layer.inputs[ctx.call]._version != ctx.version:
            raise ModelError(
                "the input of a layer was changed in place after the layer had used it; change a copy instead"
            )
        d = gradient.reshape(layer.session.trials, layer.session.rows, *gradient.shape[1:])
        layer.gradients[ctx.call] = d
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return layer.input_gradient(layer.inputs[ctx.call], d).reshape(ctx.shape), None, None
