"""A learned tensor that is added to every example: y = x + v, as positions and class tokens are.

One example's gradient by v is the gradient d by its output, summed over calls.
"""

from __future__ import annotations

from torch import Tensor

from dpsgd_cli.core import modules
from dpsgd_cli.core.layers.base import Layer


class Offset(Layer):
    """Rule for `modules.Offset`. Value (R, *shape), the shape of one example."""

    kinds = (modules.Offset,)
    rounds = True

    def compute(self, a: Tensor) -> Tensor:
        return a + self.values["value"].unsqueeze(1)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        del a
        return d

    def _per_example(self) -> Tensor:
        """(R, B, P)."""
        (_, total), *others = self.recorded()
        for _, d in others:
            total = total + d
        return total.flatten(2)

    def square_norms(self) -> Tensor:
        return self._per_example().square().sum(dim=2)

    def add_clipped_sums(self, factors: Tensor) -> None:
        total = factors.unsqueeze(1) @ self._per_example()
        self.sums["value"] += total.view(self.sums["value"].shape)
