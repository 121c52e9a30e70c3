"""Canary coordinates: parameters on which one canary has a gradient above the clip norm, and no other record has any.

A canary is a record like any other: a row of the table that is drawn by the sampler, clipped, summed and covered by
noise. Only its gradient is artificial. It is `STEEP` on the canary's own coordinate (minus `STEEP` for a record that
replaces the canary) and negligible everywhere else, so clipping leaves a vector along that coordinate, as long as the
clip norm. The release then shows noise on the coordinate, plus the clip norm if the canary was drawn. Nothing more can
be learned of the canary.

In a model of `engine/packing.py`, canary coordinates are further parameters of layers that exist already. The number of
layers, on which layer-wise clipping depends, does not change. `instrument` adds them to the last layer (flat clipping)
or to every layer (clipping layer by layer: the worst-case record reaches every layer's clip norm). The input of canary
i is `FIRST_ID` + i; the model itself never sees it. The fast path of a convex model has no layers. There, the canary
coordinates are the weights of further input columns (`columns`), so large that a canary's gradient stays above the clip
norm as long as its margin is below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsgd_cli.engine.layers import Layer, Ruled, Session
from dpsgd_cli.engine.models import Builder
from dpsgd_cli.engine.packing import Wrapper, rule_for
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.risks.affine import shortened, slopes_of
from dpsgd_cli.training.start import Trials

FIRST_ID = float(1 << 20)
STEEP = 1e10
COLUMN = 5.0
"""Feature of a convex canary, in clip norms. At margin 0, a logistic loss has half of it as gradient."""


class CanaryIds:
    """Numbers of the canaries in the rows of the last forward pass; -1 for a row that is no canary."""

    def __init__(self) -> None:
        self.found = torch.empty(0, dtype=torch.long)

    def taken_from(self, x: Tensor) -> Tensor:
        """Return rows (n, ...) with canaries replaced by zeros, and note the canaries' numbers."""
        largest = x.flatten(1).amax(dim=1)
        is_canary = largest >= FIRST_ID
        self.found = torch.where(is_canary, largest - FIRST_ID, -1.0).long()
        return torch.where(is_canary.view(-1, *[1] * (x.dim() - 1)), torch.zeros((), dtype=x.dtype, device=x.device), x)


class WithCanaryIds(Wrapper):
    """A model that first takes the canaries' ids from its input."""

    def __init__(self, model: nn.Module, ids: CanaryIds) -> None:
        super().__init__()
        self.model = model
        self.ids = ids

    def prepared(self, x: Tensor) -> Tensor:
        return self.ids.taken_from(x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(self.prepared(x))
        return y


class CanaryLayer(Layer):
    """A layer of any rule with canary coordinates. An example's gradient has both parts."""

    kinds = ()
    clipped = "by the rule of the layer inside, and its canary coordinates by each example's own gradient"
    holds_gradients = True
    rounds = False

    def __init__(self, source: nn.Module, session: Session) -> None:
        super().__init__(source, session)
        assert isinstance(source, WithCanaries)
        rule = rule_for(source.inner, "")
        assert rule is not None
        self.own = [rule(source.inner, session)]  # in a list, so that the pack does not find it as a layer
        self.kind, self.ids = self.own[0].kind, source.ids
        self.inputs, self.gradients = self.own[0].inputs, self.own[0].gradients
        self.leading = 1

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own")
        return super().__getattr__(name) if own is None else getattr(own[0], name)

    def bind(self, values: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        super().bind(values, sums)
        inner = [
            {n.removeprefix("inner."): t for n, t in one.items() if n != "canary_coordinates"} for one in (values, sums)
        ]
        self.own[0].bind(*inner)

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        # one copy of the rows for each trial, or a single one that all trials share
        self.leading = len(self.ids.found) // self.session.rows
        y: Tensor = self.own[0](x, *more, **named)
        return y

    def compute(self, a: Tensor) -> Tensor:
        return self.own[0].compute(a)

    def input_gradient(self, a: Tensor, d: Tensor) -> Tensor:
        return self.own[0].input_gradient(a, d)

    def forget(self) -> None:
        self.own[0].forget()

    def zero_nonfinite(self, bad: Tensor) -> None:
        self.own[0].zero_nonfinite(bad)

    def _canaries(self) -> Tensor:
        """Return the number of each row's canary (R or 1, B), or -1.

        If examples are in several copies, the first copy decides.
        """
        return self.ids.found.view(self.leading, -1)[:, : self.session.rows]

    def square_norms(self) -> Tensor:
        squares = self.own[0].square_norms()
        return squares + (self._canaries() >= 0).to(squares) * STEEP**2

    def add_clipped_sums(self, factors: Tensor) -> None:
        self.own[0].add_clipped_sums(factors)
        canary_coordinates = self.sums["canary_coordinates"]
        canaries = self._canaries().expand(factors.shape)
        trial, row = (canaries >= 0).nonzero(as_tuple=True)
        number = canaries[trial, row]
        sign = torch.where(number < canary_coordinates.shape[1], 1.0, -1.0).to(canary_coordinates)
        added = factors[trial, row].to(canary_coordinates) * STEEP * sign
        canary_coordinates.index_put_((trial, number % canary_coordinates.shape[1]), added, accumulate=True)


class WithCanaries(Ruled):
    """A layer of the model together with its canary coordinates."""

    rule = CanaryLayer

    def __init__(self, inner: nn.Module, ids: CanaryIds, canary_coordinates: int) -> None:
        super().__init__()
        self.inner = inner
        self.canary_coordinates = nn.Parameter(torch.zeros(canary_coordinates))
        self.ids = ids

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.inner(*given, **named)


def instrument(canary_coordinates: int, every: bool) -> Callable[[Builder], Builder]:
    """Return a function that adds canary coordinates to a model's builder: to its last layer, or to `every` layer."""

    def changed(build: Builder) -> Builder:
        def made() -> nn.Module:
            ids = CanaryIds()
            model = build()
            found = layers_of(model)
            for place in found if every else found[-1:]:
                model = _replaced(model, place, ids, canary_coordinates)
            return WithCanaryIds(model, ids)

        return made

    return changed


def layers_of(model: nn.Module, name: str = "") -> list[str]:
    """Return the names of the modules that become layers with a rule of their own."""
    if rule_for(model, name) is not None:
        return [name]
    found = [layers_of(child, f"{name}.{key}".strip(".")) for key, child in model.named_children()]
    return [place for places in found for place in places]


def _replaced(model: nn.Module, place: str, ids: CanaryIds, canary_coordinates: int) -> nn.Module:
    if not place:
        return WithCanaries(model, ids, canary_coordinates)
    parent, _, key = place.rpartition(".")
    owner = model.get_submodule(parent)
    owner._modules[key] = WithCanaries(owner._modules[key], ids, canary_coordinates)  # type: ignore[arg-type]
    return model


def marked_rows(shape: tuple[int, ...], canaries: int) -> np.ndarray:
    """Return the inputs (canaries, *shape) of canaries 0, 1, ... of a model that is not on a convex fast path."""
    numbers = (FIRST_ID + np.arange(canaries)).astype(np.float32)
    return np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (canaries, *shape)).copy()


def columns(features: int, canaries: int, clip: float, replaced: bool) -> np.ndarray:
    """Return the inputs (rows, features + canaries) of a convex model's canaries.

    With `replaced`, as many rows with the opposite sign follow: the records that replace the canaries.
    """
    coordinate = np.eye(canaries, dtype=np.float32) * np.float32(COLUMN * clip)
    rows = np.concatenate([coordinate, -coordinate]) if replaced else coordinate
    return np.concatenate([np.zeros((len(rows), features), np.float32), rows], axis=1)


@dataclass(frozen=True)
class VectorCanaries:
    """Canaries at `rows` (k,) of the table. `instead` (k,): the rows that replace canaries that are out, or None.

    `columns`: for each output of the model, an array (k,) with the positions of the canaries' features among the
    weights.
    """

    trials: Trials
    rows: np.ndarray
    instead: np.ndarray | None
    columns: list[np.ndarray]

    def gradients(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the clipped gradients (R, k, outputs) on canary coordinates, of canaries and of what replaces them.

        The second is None if nothing replaces a canary that is out.
        """
        return self._of(self.rows), None if self.instead is None else self._of(self.instead)

    def _of(self, rows: np.ndarray) -> np.ndarray:
        context, method = self.trials.context, self.trials.method
        assert isinstance(method, DpSgd)
        table, values = context.table, context.pack.values
        units = table.x[torch.from_numpy(rows)][None]
        if method.preconditioning is not None:
            units = method.preconditioning.ready.units(units)
        units = units.double().expand(len(values), -1, -1)
        outputs, width = len(self.columns), units.shape[-1]
        weights = values[:, : outputs * width].view(len(values), outputs, width).double()
        shown = torch.einsum("rkd,rod->rko", units, weights)
        biases = values[:, outputs * width :].double()
        shown = shown if not biases.numel() else shown + biases[:, None]
        _, slopes = slopes_of(context.loss, shown, table.y[rows][None].expand(len(shown), -1))
        squares = slopes.square().sum(dim=-1) * (units.square().sum(dim=-1) + float(biases.numel() > 0))
        coordinate = torch.as_tensor(self.columns[0] % width)
        own = units.gather(2, coordinate.expand(len(values), -1)[..., None]).squeeze(-1)
        found: np.ndarray = (shortened(slopes, squares, method.bounds.clipping) * own[..., None]).cpu().numpy()
        return found
