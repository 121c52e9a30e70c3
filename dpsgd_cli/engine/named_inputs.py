"""Inputs of several named arrays, which a table keeps as one row of numbers (`data/named_arrays.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class NamedInputs(nn.Module):
    """A model that is called with keyword arguments, for rows (B, F) that hold all of its arrays side by side.

    The code runs on one example at a time as that of any model (`apart.py`), so it moves no number between examples.
    Integers of a row of floats are exact and become integers again.

    Args:
        model: takes the arrays by name, each (B, *shape).
        shapes: shape of each array of one example, in the order of the row.
        integers: names of the arrays that hold integers.
    """

    takes_exact_rows = True

    def __init__(self, model: nn.Module, shapes: Mapping[str, Sequence[int]], integers: frozenset[str]) -> None:
        super().__init__()
        self.model = model
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.integers = integers

    def forward(self, x: Tensor) -> Any:
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        # the type of the model's own numbers: the rounded one in a rounded pass
        own_types = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        real = next(own_types, torch.get_default_dtype())
        given = {}
        for (name, shape), part in zip(self.shapes.items(), x.split(sizes, dim=1), strict=True):
            own = part.reshape(len(x), *shape)
            given[name] = own.long() if name in self.integers else own.to(real)
        y = self.model(**given)
        return getattr(y, "logits", y)
