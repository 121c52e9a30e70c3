"""Canary lanes: parameters that no real record's gradient touches, one canary's gradient far above the clip bound each.

A canary is a record like any other: a row of the table, drawn by the sampler, clipped, summed, covered by noise. Only
its gradient is made: on its own lane it is `STEEP` (or minus that, for what replaces it), and everywhere else as
good as nothing, so that clipping leaves a vector of the clip bound's length along the lane. What is then released of
the lane is noise, plus the bound where the canary was drawn: all that anybody can learn of it.

In a packed model (`engine/packing.py`) lanes are parameters of a layer that is there already, so that layers, and what
clipping layer by layer makes of their number, stay as they are: `instrument` gives lanes to the last layer (flat
clipping), or to every layer (where each has a bound of its own, and the worst record is at all of them). A canary is
known by its input, `MARK` plus its number, which the model itself never sees. A convex model's fast path knows no
layers: its lanes are further columns of the input (`columns`), so large that every canary's gradient stays above the
bound as long as its margin is below 1.

Not here: which canary is in (`stage.py`), what is seen (`watch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsgd_cli.engine.layers import Layer, Ruled, Session
from dpsgd_cli.engine.models import Builder
from dpsgd_cli.engine.packing import rule_for

MARK = float(1 << 20)
STEEP = 1e10
COLUMN = 5.0
"""A convex canary's feature, in clip bounds: at a margin of 0 half of that is the gradient of a logistic loss."""


class Marks:
    """Which rows of the pass before were canaries: the number of each, or -1."""

    def __init__(self) -> None:
        self.found = torch.empty(0, dtype=torch.long)

    def taken_from(self, x: Tensor) -> Tensor:
        """Rows (n, ...) with canaries replaced by zeros, once their numbers were noted."""
        largest = x.flatten(1).amax(dim=1)
        marked = largest >= MARK
        self.found = torch.where(marked, largest - MARK, -1.0).long()
        return torch.where(marked.view(-1, *[1] * (x.dim() - 1)), torch.zeros((), dtype=x.dtype, device=x.device), x)


class Marked(nn.Module):
    """A model that takes the marks from its input first."""

    OVERWRITTEN = frozenset({"marks"})

    def __init__(self, model: nn.Module, marks: Marks) -> None:
        super().__init__()
        self.model = model
        self.marks = marks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(self.marks.taken_from(x))
        return y


class LanedLayer(Layer):
    """A layer of any rule, with lanes beside its own parameters; one example's gradient is that of both."""

    OVERWRITTEN = frozenset({"marks", "leading"})
    kinds = ()
    clipped = "by the rule of the layer inside, and its lanes by each example's own gradient"
    holds_gradients = True
    rounds = False

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        assert isinstance(source, Laned)
        rule = rule_for(source.inner, "")
        assert rule is not None
        self.own = [rule(source.inner, session)]  # in a list: the pack shall not find it as a layer
        self.kind, self.marks = self.own[0].kind, source.marks
        self.inputs, self.gradients = self.own[0].inputs, self.own[0].gradients
        self.leading = 1

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own")
        return super().__getattr__(name) if own is None else getattr(own[0], name)

    def bind(self, values: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        super().bind(values, sums)
        inner = [{n.removeprefix("inner."): t for n, t in one.items() if n != "lanes"} for one in (values, sums)]
        self.own[0].bind(*inner)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        # of each trial, or of all together where these share their rows
        self.leading = len(self.marks.found) // self.session.rows
        y: Tensor = self.own[0](x, *more, **named)
        return y

    def compute(self, a: Tensor) -> Tensor:
        return self.own[0].compute(a)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        return self.own[0].input_gradient(a, d)

    def forget(self) -> None:
        self.own[0].forget()

    def erase(self, bad: Tensor) -> None:
        self.own[0].erase(bad)

    def _canaries(self) -> Tensor:
        """The number of each row's canary (R or 1, B), or -1; of several copies of the examples, the first's."""
        return self.marks.found.view(self.leading, -1)[:, : self.session.rows]

    def square_norms(self) -> Tensor:
        squares = self.own[0].square_norms()
        return squares + (self._canaries() >= 0).to(squares) * STEEP**2

    def add_clipped_sums(self, factors: Tensor) -> None:
        self.own[0].add_clipped_sums(factors)
        lanes = self.sums["lanes"]
        canaries = self._canaries().expand(factors.shape)
        trial, row = (canaries >= 0).nonzero(as_tuple=True)
        number = canaries[trial, row]
        sign = torch.where(number < lanes.shape[1], 1.0, -1.0).to(lanes)
        added = factors[trial, row].to(lanes) * STEEP * sign
        lanes.index_put_((trial, number % lanes.shape[1]), added, accumulate=True)


class Laned(Ruled):
    """A layer of the model, and its lanes."""

    rule = LanedLayer
    OVERWRITTEN = frozenset({"marks"})

    def __init__(self, inner: nn.Module, marks: Marks, lanes: int) -> None:
        super().__init__()
        self.inner = inner
        self.lanes = nn.Parameter(torch.zeros(lanes))
        self.marks = marks


def instrument(lanes: int, every: bool) -> Callable[[Builder], Builder]:
    """What turns a model's builder into that of the model with lanes: in its last layer, or in `every` layer."""

    def changed(build: Builder) -> Builder:
        def made() -> nn.Module:
            marks = Marks()
            model = build()
            found = layers_of(model)
            for place in found if every else found[-1:]:
                model = _replaced(model, place, marks, lanes)
            return Marked(model, marks)

        return made

    return changed


def layers_of(model: nn.Module, name: str = "") -> list[str]:
    """Where the modules are that a pack makes layers of."""
    if rule_for(model, name) is not None:
        return [name]
    found = [layers_of(child, f"{name}.{key}".strip(".")) for key, child in model.named_children()]
    return [place for places in found for place in places]


def _replaced(model: nn.Module, place: str, marks: Marks, lanes: int) -> nn.Module:
    if not place:
        return Laned(model, marks, lanes)
    parent, _, key = place.rpartition(".")
    owner = model.get_submodule(parent)
    owner._modules[key] = Laned(owner._modules[key], marks, lanes)  # type: ignore[arg-type]
    return model


def marked_rows(shape: tuple[int, ...], canaries: int) -> np.ndarray:
    """Inputs (canaries, *shape) of canaries 0, 1, ... of a packed model."""
    numbers = (MARK + np.arange(canaries)).astype(np.float32)
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (canaries, *shape)).copy()


def columns(features: int, canaries: int, clip: float, replaced: bool) -> np.ndarray:
    """Inputs (canaries, features + lanes) of a convex model's canaries; `replaced`: and of those that replace them."""
    lane = np.eye(canaries, dtype=np.float32) * np.float32(COLUMN * clip)
    rows = np.concatenate([lane, -lane]) if replaced else lane
    return np.concatenate([np.zeros((len(rows), features), np.float32), rows], axis=1)
