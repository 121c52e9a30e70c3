"""Clip bounds of a pack's trials during training: fixed by the recipe, or computed from releases.

A kind of clipping (`clipping/settings.py`) names the class here that holds its bounds. Bounds are public, since
they are computed from releases. Each class states its releases, their sensitivity and their price.
Clipped sums are in `clipping/run.py`, noise on the sums in `methods/dp_sgd/run.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dpsgd_cli.clipping.price import released_histogram
from dpsgd_cli.clipping.run import Clipping
from dpsgd_cli.clipping.settings import ClippingKind, HistogramClipping, QuantileClipping
from dpsgd_cli.common.plugins import named
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.precision import PRECISION
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.run import Grid, NoiseSource, add_noise, gaussian

Visit = Callable[[Clipping], None]
"""Function that computes the gradients of this process's part of all training records at the current weights.

It passes the gradients' norms to the clipping's `on_norms` callback and drops the sums."""


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

    def __init__(self, context: Context, kinds: Sequence[ClippingKind]) -> None:
        layers, first = len(context.pack.layers), kinds[0]
        norms = torch.tensor([kind.bounds(layers) for kind in kinds], dtype=PRECISION).T.to(context.pack.values)
        factors, settings = named(first.factors), first.factor_settings
        self.clipping = Clipping(norms, not first.by_layer, partial(factors, **settings) if settings else factors)
        self.sensitivities = self.clipping.sensitivities
        self.kept: dict[str, Tensor] = {}

    def prepare(self, visit: Visit) -> None:
        """Release the statistics that the bounds need before the first step, unless done; `visit` reads all records."""

    def begin(self) -> None:
        """Start a step: set its bounds from earlier releases."""

    def privatise(self, step: int, moves: Tensor, grid: Grid | None) -> None:
        """Add noise to `side_statistics` in place, so that it may be released.

        `moves` (R, 1) is 2 under replace-one, else 1. `grid` is the grid of the step's sums; None with seeded noise.
        Only one process calls it, with the sums of all processes.
        """

    def follow(self, divisor: float) -> None:
        """Update the bounds from the released `side_statistics`; `divisor`: the expected number of records (public)."""

    def side_unit(self, multipliers: Tensor) -> Tensor:
        """Return the unit (R, 1) of `side_statistics` in which its noise is `multipliers` (R, 1) times `moves`."""
        raise NotImplementedError

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

    def side_unit(self, multipliers: Tensor) -> Tensor:
        return self._noise / multipliers

    def published(self) -> dict[str, list[float]]:
        return {"clip_norm": self.kept["clip"].squeeze(1).tolist()}


class HistogramBounds(Bounds):
    """One bound C: a quantile of the gradients' norms at the initial weights, from a noisy histogram of the norms.

    Released, once, before the first step: counts h_k of the training records i with |g_i| in bin k, plus N(0, s^2) on
    every count. The bins are public, of equal ratio between two bounds. The first bin also counts all shorter norms,
    the last one all longer or non-finite norms. C is the point at which the cumulative noisy counts reach `quantile` of
    the public number of records. It is a function of the release and of public numbers, within the bounds of the bins.

    Sensitivity: a present record is in one bin; an absent record and the null record are in none; no record's bin
    depends on other records. So the counts move by 1 (add-remove, zero-out) or sqrt(2) (replace-one) in the L2 norm.

    Price: with s = z times this sensitivity it is a Gaussian mechanism on all records, of noise multiplier z, charged
    before training (`clipping/price.py`). The sums of the steps, clipped at C, are charged in units of C, which
    is fixed before the first step (adaptive composition): the noise is z_t C moves on a sum that one record moves by
    C moves.
    """

    def __init__(self, context: Context, kinds: Sequence[ClippingKind]) -> None:
        super().__init__(context, kinds)
        self._context = context
        self._kinds = [kind for kind in kinds if isinstance(kind, HistogramClipping)]
        if len({(kind.bins, kind.range) for kind in self._kinds}) > 1 or len(self._kinds) < len(kinds):
            raise PrivacyError("trials that train together share the bins of privacy.clipping histogram")
        (low, high), bins = self._kinds[0].range, self._kinds[0].bins
        device = context.pack.values.device
        self._edges = low * (high / low) ** (torch.arange(bins + 1, dtype=PRECISION, device=device) / bins)
        self._counts = torch.zeros(context.trials, bins, dtype=PRECISION, device=device)
        self.kept = {"clip": torch.full((context.trials, 1), math.nan, dtype=PRECISION, device=device)}

    def prepare(self, visit: Visit) -> None:
        if bool(self.kept["clip"].isnan().any()):
            visit(Clipping(torch.ones_like(self.clipping.norms), on_norms=self._count))
            self._context.team.add_up(self._counts)
            if self._context.team.first:
                self._release()
            self._context.team.share(self._counts)
            clips = [self._read_off(trial, kind.quantile) for trial, kind in enumerate(self._kinds)]
            self.kept["clip"].copy_(torch.stack(clips).unsqueeze(1))
            self._counts.zero_()
        norms = self.kept["clip"].T.to(self.clipping.norms)
        self.clipping, self.unit = replace(self.clipping, norms=norms), norms.T

    def _count(self, squares: Tensor, mask: Tensor | None) -> None:
        """Add 1 to the bin of each gradient's norm."""
        norms = squares.sum(dim=0).sqrt().to(PRECISION)
        inner = self._edges[1:-1].contiguous()
        # a NaN norm counts as infinite
        bins = torch.bucketize(norms.nan_to_num(nan=math.inf, posinf=math.inf), inner)
        there = torch.ones_like(norms) if mask is None else mask.to(PRECISION)
        self._counts.scatter_add_(1, bins, there)

    def _release(self) -> None:
        """Add noise to the counts in place, so that they may be released."""
        context, watcher = self._context, self._context.watcher
        exact = None if watcher is None else self._counts.clone()
        mechanisms = [released_histogram(plan) for plan in context.plans if plan is not None]
        for stream, counts, mechanism in zip(context.streams, self._counts, mechanisms, strict=True):
            noisy = gaussian(stream, "norm-histogram", 0, counts.cpu().numpy(), mechanism, context.table.summed)
            counts.copy_(torch.from_numpy(noisy))
        if watcher is not None and exact is not None:
            watcher.prepared(mechanisms[0], exact, self._counts)

    def _read_off(self, trial: int, quantile: float) -> Tensor:
        """Return the norm at which cumulative noisy counts reach `quantile`; geometric interpolation within a bin."""
        reached = self._counts[trial].cumsum(dim=0)
        wanted = quantile * len(self._context.table)
        at = int((reached < wanted).cumprod(dim=0).sum())
        if at == len(reached):
            return self._edges[-1]
        before = reached[at - 1] if at else reached.new_zeros(())
        part = ((wanted - before) / (reached[at] - before)).clamp(0, 1)
        return self._edges[at] * (self._edges[at + 1] / self._edges[at]) ** part

    def published(self) -> dict[str, list[float]]:
        return {"clip_norm": self.kept["clip"].squeeze(1).tolist()}


def bounds_of(context: Context, kinds: Sequence[ClippingKind]) -> Bounds:
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
