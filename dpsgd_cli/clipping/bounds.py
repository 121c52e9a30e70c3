"""Clip bounds of a pack's trials during training: fixed by the recipe, or computed from releases.

A kind of clipping (`clipping/settings.py`) names the class here that holds its bounds. Bounds are public, since
they are computed from releases. Each class states its releases, their sensitivity and their price.
Clipped sums are in `clipping/run.py`, noise on the sums in `methods/dp_sgd/run.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dpsgd_cli.clipping.run import Clipping
from dpsgd_cli.clipping.settings import ClippingKind, QuantileClipping
from dpsgd_cli.common.plugins import named
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.precision import PRECISION
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.run import Grid, NoiseSource, add_noise


class Bounds:
    """Fixed bounds from the recipe, and the base of bounds that change.

    - `clipping`: the clipping of the step that `begin` started.
    - `sensitivities`: per trial, the largest L2 norm of a record's contribution to a sum, in the units of the charge.
    - `unit` (R, 1): the length of those units; None if it is 1.
    - `side_statistics` (R, n), float64: what a step sums over its records and releases together with the gradients.
    - `kept` (R, n) by name: tensors that change from step to step.
    """

    unit: Tensor | None = None
    side_statistics: Tensor | None = None

    def __init__(self, context: PackContext, kinds: Sequence[ClippingKind]) -> None:
        layers, first = len(context.pack.layers), kinds[0]
        norms = torch.tensor([kind.bounds(layers) for kind in kinds], dtype=PRECISION).T.to(context.pack.values)
        factors, settings = named(first.factors), first.factor_settings
        self.clipping = Clipping(norms, not first.by_layer, partial(factors, **settings) if settings else factors)
        self.sensitivities = self.clipping.sensitivities
        self.kept: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Start a step: set its bounds from earlier releases."""

    def privatise(self, step: int, moves: Tensor, grid: Grid | None) -> None:
        """Add noise to `side_statistics` in place, so that it may be released.

        `moves` (R, 1) is 2 under replace-one, else 1. `grid` is the grid of the step's sums; None with seeded noise.
        Only one process calls it, with the sums of all processes.
        """

    def follow(self, divisor: float) -> None:
        """Update the bounds from the released `side_statistics`; `divisor`: the expected number of records (public)."""

    def units(self, charged: Tensor, applied: Tensor) -> Sequence[Tensor | float]:
        """Return the units of the sums and of `side_statistics` in which all noise is `charged` (R, 1) times `moves`.

        `applied` (R, 1): the noise multipliers of the sums in units of `unit`.
        """
        return [1.0] if self.unit is None else [self.unit * applied / charged]

    def published(self) -> dict[str, list[float]]:
        return {}


class QuantileBounds(Bounds):
    """Bounds C_t that follow a quantile of the gradients' norms (Andrew et al. 2019, arXiv 1905.03871, Algorithm 1).

    Notation: step t has a batch of records i, of expected size m (public), with gradients g_i. b_i is 1/2 if
    |g_i| <= C_t, else -1/2 (also if g_i is not finite). z is the step's noise multiplier, s_b is `count_noise`. moves
    is 1 under add-remove and zero-out, 2 under replace-one.

    Released at step t: G = sum of g_i min(1, C_t / |g_i|) plus N(0, (z_d C_t moves)^2) on every coordinate, and
    B = sum b_i + N(0, (s_b moves)^2), where z_d = (z^-2 - (2 s_b)^-2)^(-1/2). Then
    C_{t+1} = C_t exp(-eta (B / m + 1/2 - gamma)), kept between 1e-6 C_0 and 1e6 C_0.

    Sensitivity: measure G in units of z_d C_t / z and B in units of s_b / z. The pair is then one sum of vectors. A
    record adds v_i = ((z / z_d) g_i min(1, C_t / |g_i|) / C_t, (z / s_b) b_i), of norm at most
    ((z / z_d)^2 + (z / (2 s_b))^2)^(1/2) = 1. The noise is N(0, (z moves)^2) on every coordinate. An absent record, and
    the null record of zero-out, add the zero vector: b_i is shifted by 1/2, so that a record is counted by -1/2 or 1/2
    and never by 0 or 1. So the sum moves by at most 1. Under replace-one it moves by |v - v'| <= 2: the count moves by
    1 and not by 1/2, so its noise is doubled, too.

    Price: the release is a `GaussianSum` of multiplier z and sensitivity `moves`, for every kind of batching. Theorems
    on noisy sums of vectors of bounded norm apply, because C_t is a function of earlier releases (adaptive
    composition). Within an epoch of disjoint batches, C_t may depend on earlier batches, as the weights do. All units
    are public when the step begins. The schedule's z may change from step to step.
    """

    def __init__(self, context: PackContext, kinds: Sequence[ClippingKind]) -> None:
        super().__init__(context, kinds)
        own = [kind for kind in kinds if isinstance(kind, QuantileClipping)]
        if len(own) < len(kinds):
            raise PrivacyError("trials that train together share one kind of clipping")

        def column(values: list[float]) -> Tensor:
            return context.column(values).to(PRECISION)

        self._first = column([kind.initial for kind in own])
        self._quantile = column([kind.quantile for kind in own])
        self._rate = column([kind.learning_rate for kind in own])
        self._noise = column([kind.count_noise for kind in own])
        self.kept = {"clip": self._first.clone()}
        self.side_statistics = torch.zeros_like(self._first)
        # streams of its own: those of the sums' noise begin with the same normals
        streams = [stream.under("clip-count") for stream in context.streams]
        self._normals = NoiseSource(streams, 1, self._first.device, PRECISION)
        self.begin()

    def begin(self) -> None:
        assert self.side_statistics is not None
        self.side_statistics.zero_()
        norms = self.kept["clip"].T.to(self.clipping.norms)
        self.clipping = replace(self.clipping, norms=norms, on_norms=self._count)
        self.unit = norms.T

    def _count(self, squares: Tensor, mask: Tensor | None) -> None:
        """Add 1/2 per gradient within its bound and -1/2 per other gradient; `squares` (M, R, B) are squared norms."""
        assert self.side_statistics is not None
        within = squares.sum(dim=0).sqrt() <= self.clipping.norms[0].unsqueeze(-1)
        signed = within.to(PRECISION) - 0.5
        self.side_statistics += (signed if mask is None else torch.where(mask, signed, 0.0)).sum(dim=1, keepdim=True)

    def privatise(self, step: int, moves: Tensor, grid: Grid | None) -> None:
        assert self.side_statistics is not None
        add_noise(self.side_statistics, self._normals.draw(step), self._noise * moves, grid)

    def follow(self, divisor: float) -> None:
        assert self.side_statistics is not None
        share = self.side_statistics / divisor + 0.5
        clip = self.kept["clip"]
        clip.mul_(torch.exp(-self._rate * (share - self._quantile)))
        clip.copy_(clip.clamp(min=1e-6 * self._first, max=1e6 * self._first))

    def units(self, charged: Tensor, applied: Tensor) -> Sequence[Tensor | float]:
        return [*super().units(charged, applied), self._noise / charged]

    def published(self) -> dict[str, list[float]]:
        return {"clip_norm": self.kept["clip"].squeeze(1).tolist()}


def bounds_of(context: PackContext, kinds: Sequence[ClippingKind]) -> Bounds:
    """Return the bounds of trials that train together.

    Raises PrivacyError if the trials' clipping differs in its kind or settings, not only in its numbers.
    """

    def alike(kind: ClippingKind) -> tuple[object, ...]:
        return kind.kind, kind.by_layer, dict(kind.factor_settings)

    if any(alike(kind) != alike(kinds[0]) for kind in kinds):
        told = sorted({kind.kind for kind in kinds})
        raise PrivacyError(f"trials that train together share one kind of clipping and its settings, not {told}")
    made: Bounds = named(kinds[0].held)(context, kinds)
    return made
