"""Parameters that a module uses in code of its own: class tokens, positions, gains, and any layer without a rule.

While the module's code runs on one example at a time (`apart.py`), the attribute that holds the parameter gives a copy
of the example's own, so its gradient with respect to the copy is the example's gradient, by autograd. The module's
children keep their rules. Copies share memory; each example's own gradient is held.

A product with a matrix (`F.linear(x, W)`, `x @ W`, `torch.addmm(b, x, W)`, `F.embedding(tokens, W)`) does not use the
copy: it has the rule of a dense layer or of an embedding. So subclasses of `nn.Linear` and `nn.Embedding`, and the
transposed dense layers of Hugging Face (`Conv1D`), are clipped in closed form by what they compute. Both kinds of use
of one parameter add up (`tied.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.engine.layers.base import (
    CLOSED_FORM,
    OWN_GRADIENTS,
    Described,
    Each,
    Instantiated,
    Layer,
    Outer,
    Session,
    added,
    aligned,
)
from dpsgd_cli.engine.layers.embedding import Embedding
from dpsgd_cli.engine.layers.linear import Linear


class Own(Instantiated):
    """Rule for the trained parameters that are attributes of a module itself. Parameters (R, *shape)."""

    kinds = ()
    clipped = OWN_GRADIENTS
    holds_gradients = True
    rounds = True

    def __init__(self, source: nn.Module, session: Session, clone: nn.Module) -> None:
        super().__init__(source, session)
        self.clone = [clone]
        clone._parameters = {
            name: p if p is None or not p.requires_grad else Described.of(p, self.kind, name)  # type: ignore[misc]
            for name, p in source._parameters.items()
        }
        self.products = {name: products_of(p, session) for name, p in self.parameters_of.items() if p.dim() == 2}
        session.passes.lent.append(self)

    @classmethod
    def trained_of(cls, source: nn.Module) -> dict[str, nn.Parameter]:
        return {name: p for name, p in source._parameters.items() if p is not None and p.requires_grad}

    def lend(self) -> None:
        """Give the module's attributes one example's copies of its parameters."""
        passes = self.session.passes
        for number, name in enumerate(self.names):
            with passes.outside():
                copies = _Copied.apply(self.session.anchor, self, number)
            lent = vars(self.clone[0])[name] = passes.unfold(copies)
            passes.parts[id(lent)] = cache(lent.unbind)
            for function, product in self.products.get(name, {}).items():
                passes.matrices[id(lent), function] = lent, product

    def take_back(self) -> None:
        """Remove the copies."""
        for name in self.names:
            vars(self.clone[0]).pop(name, None)

    def copies(self, number: int) -> Tensor:
        """Return copies (N, *shape) of parameter `number` for N examples; they share memory."""
        value = self.values[self.names[number]]
        rows = self.session.passes.rows // len(value)
        return value.unsqueeze(1).expand(len(value), rows, *value.shape[1:])

    def compute(self, a: Tensor) -> Tensor:
        raise NotImplementedError("a module's own parameters have no input")

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        raise NotImplementedError("a module's own parameters have no input")

    def recorded(self) -> list[tuple[Tensor, Tensor]]:
        return [(d, d) for d in self.gradients if d is not None]

    def uses(self, name: str) -> bool:
        pairs = zip(self.inputs, self.gradients, strict=True)
        return any(d is not None and self.names[int(number)] == name for number, d in pairs)

    def per_example(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, d in zip(self.inputs, self.gradients, strict=True):
            if d is not None:
                # a pass lends each parameter once
                found[self.names[int(number)]] = added(self.by_copy(d.to(self.session.exact)))
        return found

    def zero_nonfinite(self, bad: Tensor) -> None:
        for index, d in enumerate(self.gradients):
            if d is not None:
                every = bad if d.shape[1] == bad.shape[1] else bad.repeat(1, d.shape[1] // bad.shape[1])
                self.gradients[index] = d.masked_fill(aligned(every, d), 0.0)
        self._kept = None


class Matrix(Linear):
    """Rule for y = x W with a matrix (R, I, O): a dense layer with transposed weight."""

    kinds = ()
    clipped = CLOSED_FORM
    holds_gradients = False
    rounds = True

    def turned(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": views["weight"].mT}

    def contributions(self, name: str) -> list[Outer | Each]:
        a, d = self._sequence(self.stored())
        return [Outer(a, d, a.shape[-1])]


def products_of(matrix: nn.Parameter, session: Session) -> dict[Any, Layer]:
    """Return the rules of products with `matrix` by function: F.linear, F.embedding, and torch.matmul for x W."""
    height, width = matrix.shape
    dense = nn.Linear(width, height, bias=False, device="meta")
    turned = nn.Linear(height, width, bias=False, device="meta")
    table = nn.Embedding(height, width, device="meta")
    dense.weight = turned.weight = table.weight = matrix
    return {
        F.linear: Linear(dense, session),
        F.embedding: Embedding(table, session),
        torch.matmul: Matrix(turned, session),
    }


class _Copied(torch.autograd.Function):
    """Autograd function from a parameter to its copies (N, *shape), which passes the rule each copy's gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, own: Own, number: int) -> Tensor:
        copies = own.copies(number)
        if own.session.recording:
            ctx.own, ctx.call, ctx.shape = own, len(own.gradients), copies.shape
            own.inputs.append(torch.tensor(number))
            own.gradients.append(None)
        return copies.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.own.gradients[ctx.call] = ctx.own.session.stored(gradient.reshape(ctx.shape))
        return None, None, None
