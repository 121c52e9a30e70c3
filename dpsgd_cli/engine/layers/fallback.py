"""Rule for all other modules with parameters: a vectorised vector-Jacobian product for the module.

The module runs once per example (a batch of one) under `torch.func.vmap`, so it cannot mix examples. Its per-example
gradients are stored, (R, B, parameters of this module). This is slower and takes more memory than a special rule, but
is equally exact. The module must take one floating-point tensor and return one tensor. A module that cannot be
vectorised is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from dpsgd_cli.engine.layers.base import Instantiated, Session, aligned
from dpsgd_cli.errors import ModelError


class Fallback(Instantiated):
    """Rule for modules without a rule of their own. Parameters (R, *shape) of the module and its children."""

    kinds = ()
    clipped = "one example at a time: slow, and each example's own gradient is held"
    holds_gradients = True
    rounds = False

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        self.source = [source]
        self.frozen = {name: p.detach() for name, p in source.named_parameters() if not p.requires_grad}
        self.found: dict[str, Tensor] = {}

    def forget(self) -> None:
        super().forget()
        self.found = {}

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        if more or named:
            raise ModelError(
                f"{self.kind} is called with several arguments, and a private layer takes one tensor; make it of dense"
                " layers, or call it inside of a module of your own that has all of its parameters"
            )
        return super().forward(x)

    def _one(self, values: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the output for one example by one trial's copy."""
        y = functional_call(self.source[0], {**self.frozen, **values}, (x.unsqueeze(0),))
        if not isinstance(y, Tensor):
            raise ModelError(f"{self.kind} returns {type(y).__name__}; a private layer must return one tensor")
        return y.squeeze(0)

    def _each(self, function: Callable[..., Any], *tensors: Tensor) -> list[Any]:
        """Apply `function(values, *rows)` to every example of `tensors` (R or 1, B, ...): a result (B, ...) per trial.

        It uses a vmap over examples and a loop over trials: nested vmaps give wrong gradients for some modules (PReLU,
        in torch 2.13).
        """
        results = []
        for trial in range(self.session.trials):
            values = {name: value[trial] for name, value in self.values.items()}
            rows = [t[min(trial, t.shape[0] - 1)] for t in tensors]
            results.append(vmap(function, in_dims=(None, *[0] * len(rows)))(values, *rows))
        return results

    def compute(self, a: Tensor) -> Tensor:
        try:
            return torch.stack(self._each(self._one, a))
        except RuntimeError as error:
            raise ModelError(
                f"{self.kind} cannot be trained privately: running it one example at a time failed ({error})."
                " Build it from layers that have a rule (dense, convolution, normalisation, embedding)."
            ) from error

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        def pull(values: dict[str, Tensor], x: Tensor, g: Tensor) -> Tensor:
            return vjp(lambda z: self._one(values, z), x)[1](g)[0]

        return torch.stack(self._each(pull, a, d))

    def per_example(self) -> dict[str, Tensor]:
        def pull(values: dict[str, Tensor], x: Tensor, g: Tensor) -> dict[str, Tensor]:
            return vjp(lambda v: self._one(v, x), values)[1](g)[0]

        if not self.found:
            calls = [self._each(pull, a, d) for a, d in self.recorded()]
            self.found = {
                name: torch.stack([torch.stack([own[name] for own in call]) for call in calls]).sum(dim=0)
                for name in self.names
            }
        return self.found

    def zero_nonfinite(self, bad: Tensor) -> None:
        super().zero_nonfinite(bad)
        for name, g in self.found.items():
            self.found[name] = g.masked_fill(aligned(bad, g), 0.0)
