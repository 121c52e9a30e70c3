"""Clip bounds of a pack's trials while they train: those that the recipe states, or those that releases lead to.

A kind of clipping (`recipe/schema/clipping.py`) names the class here that holds its bounds. What bounds are made of is
released, and so public: each class says what it releases, how far one record moves that, and what prices it.

Not here: sums and factors (`core/clipping.py`), noise on the sums (`dp_sgd.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dpsgd_cli.core.clipping import Clipping
from dpsgd_cli.core.noise import NoiseSource, add_noise
from dpsgd_cli.core.precision import PRECISION
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import Context
from dpsgd_cli.recipe.schema.clipping import ClippingKind, QuantileClipping
from dpsgd_cli.recipe.schema.descriptor import named


class Bounds:
    """Bounds that stay as the recipe states them.

    `clipping` is that of the step that `begin` began. `sensitivities` are by trial the L2 norm of what one record adds
    to a sum, in the units in which sums are charged. `unit` (R, 1) is how long those units are: None where they are 1.
    `beside` (R, n), float64, is what else a step sums up over its records and releases; `kept` (R, n) are tensors that
    change from step to step; `published` are public numbers by trial.
    """

    unit: Tensor | None = None
    beside: Tensor | None = None

    def __init__(self, context: Context, kinds: Sequence[ClippingKind]) -> None:
        layers, first = len(context.pack.layers), kinds[0]
        norms = torch.tensor([kind.bounds(layers) for kind in kinds], dtype=PRECISION).T.to(context.pack.values)
        factors, settings = named(first.factors), first.factor_settings
        self.clipping = Clipping(norms, not first.by_layer, partial(factors, **settings) if settings else factors)
        self.sensitivities = self.clipping.sensitivities
        self.kept: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins: its bounds are what was released before it leads to."""

    def privatise(self, step: int, moves: Tensor) -> None:
        """Turn `beside` into what may be released; `moves` (R, 1) is 2 where a record is replaced by another, else 1.

        On one process only, whose sums are those of all.
        """

    def follow(self, divisor: float) -> None:
        """Learn from what was released `beside`, over the expected number of records `divisor`."""

    def beside_unit(self, multipliers: Tensor) -> Tensor:
        """What `beside` is measured in so that its noise, too, is the noise multiplier (R, 1) times `moves`."""
        raise NotImplementedError

    def published(self) -> dict[str, list[float]]:
        return {}


class QuantileBounds(Bounds):
    """Bounds C_t that follow a quantile of the gradients' norms (Andrew et al. 2019, arXiv 1905.03871, Algorithm 1).

    Notation: records i of a batch of step t, of expected size m (public); g_i their gradients; b_i = 1/2 where
    |g_i| <= C_t, else -1/2 (also where g_i is not finite); z the step's noise multiplier, s_b = `count_noise`; moves is
    1 under add-remove and zero-out, 2 under replace-one.

    Released at step t: G = sum of g_i min(1, C_t / |g_i|) plus N(0, (z_d C_t moves)^2) on every coordinate, and
    B = sum b_i + N(0, (s_b moves)^2), where z_d = (z^-2 - (2 s_b)^-2)^(-1/2). Then
    C_{t+1} = C_t exp(-eta (B / m + 1/2 - gamma)), within a millionth and a million times C_0.

    Sensitivity: in units of z_d C_t / z for G and of s_b / z for B, the pair is one sum of vectors, a record's being
    v_i = ((z / z_d) g_i min(1, C_t / |g_i|) / C_t, (z / s_b) b_i), of norm at most
    ((z / z_d)^2 + (z / (2 s_b))^2)^(1/2) = 1, with noise N(0, (z moves)^2) on every coordinate. A record that is not
    there, or is the null record of zero-out, adds the zero vector: b_i is shifted, so that nobody is counted by 0 and
    a record by 1. So the sum moves by at most 1, and where another record takes its place, by |v - v'| <= 2: the count
    by 1 and not by 1/2, which is why its noise, too, is doubled.

    Price: that is `GaussianSum` of multiplier z and sensitivity `moves`, on whatever batches: what is proved of noisy
    sums of vectors of bounded norm is proved of this one, C_t being a function of earlier releases (adaptive
    composition; within an epoch of disjoint batches, each of which may use C_t made of those before it, as the weights
    do). All units are public when the step begins. The schedule's z may change from step to step.
    """

    def __init__(self, context: Context, kinds: Sequence[ClippingKind]) -> None:
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
        self.beside = torch.zeros_like(self._first)
        # streams of its own: those of the sums' noise begin with the same normals
        streams = [stream.under("clip-count") for stream in context.streams]
        self._normals = NoiseSource(streams, 1, self._first.device, PRECISION)
        self.begin()

    def begin(self) -> None:
        assert self.beside is not None
        self.beside.zero_()
        norms = self.kept["clip"].T.to(self.clipping.norms)
        self.clipping = replace(self.clipping, norms=norms, told=self._count)
        self.unit = norms.T

    def _count(self, squares: Tensor, mask: Tensor | None) -> None:
        """Add 1/2 for a gradient within its bound, -1/2 for any other; squared norms (M, R, B) of its parts."""
        assert self.beside is not None
        within = squares.sum(dim=0).sqrt() <= self.clipping.norms[0].unsqueeze(-1)
        signed = within.to(PRECISION) - 0.5
        self.beside += (signed if mask is None else torch.where(mask, signed, 0.0)).sum(dim=1, keepdim=True)

    def privatise(self, step: int, moves: Tensor) -> None:
        assert self.beside is not None
        add_noise(self.beside, self._normals.draw(step), self._noise * moves)

    def follow(self, divisor: float) -> None:
        assert self.beside is not None
        share = self.beside / divisor + 0.5
        clip = self.kept["clip"]
        clip.mul_(torch.exp(-self._rate * (share - self._quantile)))
        clip.copy_(clip.clamp(min=1e-6 * self._first, max=1e6 * self._first))

    def beside_unit(self, multipliers: Tensor) -> Tensor:
        return self._noise / multipliers

    def published(self) -> dict[str, list[float]]:
        return {"clip_norm": self.kept["clip"].squeeze(1).tolist()}


def bounds_of(context: Context, kinds: Sequence[ClippingKind]) -> Bounds:
    """What holds the bounds of trials that train together; PrivacyError where these differ in more than numbers."""

    def alike(kind: ClippingKind) -> tuple[object, ...]:
        return kind.kind, kind.by_layer, dict(kind.factor_settings)

    if any(alike(kind) != alike(kinds[0]) for kind in kinds):
        told = sorted({kind.kind for kind in kinds})
        raise PrivacyError(f"trials that train together share one kind of clipping and its settings, not {told}")
    made: Bounds = named(kinds[0].held)(context, kinds)
    return made
