"""Clip bounds of a pack's trials while they train: those that the recipe states, or those that releases lead to.

A kind of clipping (`recipe/schema/clipping.py`) names the class here that holds its bounds. What bounds are made of is
released, and so public: each class says what it releases, how far one record moves that, and what prices it.

Not here: sums and factors (`core/clipping.py`), noise on the sums (`dp_sgd.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dpsgd_cli.core.clipping import Clipping
from dpsgd_cli.core.noise import Grid, NoiseSource, add_noise, gaussian
from dpsgd_cli.core.precision import PRECISION
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import Context
from dpsgd_cli.privacy.norm_histogram import released_histogram
from dpsgd_cli.recipe.naming import named
from dpsgd_cli.recipe.schema.clipping import ClippingKind, HistogramClipping, QuantileClipping

Visit = Callable[[Clipping], None]
"""Makes the gradients of this process's part of all training records, at the weights as they are: those who are told by
the clipping are told, and the sums are dropped."""


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

    def prepare(self, visit: Visit) -> None:
        """Release what bounds are made of before the first step, unless that was done; `visit` shows all records."""

    def begin(self) -> None:
        """A step begins: its bounds are what was released before it leads to."""

    def privatise(self, step: int, moves: Tensor, grid: Grid | None) -> None:
        """Turn `beside` into what may be released; `moves` (R, 1) is 2 where a record is replaced by another, else 1.

        `grid` is that of the step's sums, and None with seeded noise.

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

    def privatise(self, step: int, moves: Tensor, grid: Grid | None) -> None:
        assert self.beside is not None
        add_noise(self.beside, self._normals.draw(step), self._noise * moves, grid)

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


class HistogramBounds(Bounds):
    """One bound C, a quantile of the gradients' norms at the initial weights, by a noised histogram of these.

    Released, once, before the first step: counts h_k of the training records i with |g_i| in bin k, plus N(0, s^2) on
    every count. Bins are public: of equal ratio between two bounds, the first one with all that is shorter, the last
    one with all that is longer or not finite. C is where the noised counts, added up, reach `quantile` of the public
    number of records: a function of the release and of public numbers, within the bounds of the bins.

    Sensitivity: a record that is there is in one bin, one that is not there, and the null record, in none, and no bin
    depends on other records. So counts move by 1 (add-remove, zero-out) or sqrt(2) (replace-one) in the L2 norm.

    Price: s = z times that is a Gaussian mechanism on all records, of noise multiplier z, charged before training
    (`privacy/norm_histogram.py`). The sums of the steps, clipped at C, are charged in units of C, which is fixed when
    the first of them is made (adaptive composition): noise z_t C moves on a sum that one record moves by C moves.
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
            visit(Clipping(torch.ones_like(self.clipping.norms), told=self._count))
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
        # what is no number is as long as can be
        bins = torch.bucketize(norms.nan_to_num(nan=math.inf, posinf=math.inf), inner)
        there = torch.ones_like(norms) if mask is None else mask.to(PRECISION)
        self._counts.scatter_add_(1, bins, there)

    def _release(self) -> None:
        """Turn the counts into what may be released."""
        context, watcher = self._context, self._context.watcher
        exact = None if watcher is None else self._counts.clone()
        mechanisms = [released_histogram(plan) for plan in context.plans if plan is not None]
        for stream, counts, mechanism in zip(context.streams, self._counts, mechanisms, strict=True):
            noisy = gaussian(stream, "norm-histogram", 0, counts.cpu().numpy(), mechanism, context.table.summed)
            counts.copy_(torch.from_numpy(noisy))
        if watcher is not None and exact is not None:
            watcher.prepared(mechanisms[0], exact, self._counts)

    def _read_off(self, trial: int, quantile: float) -> Tensor:
        """Where the noised counts, added up, reach the quantile: within a bin in equal ratios."""
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
    """What holds the bounds of trials that train together; PrivacyError where these differ in more than numbers."""

    def alike(kind: ClippingKind) -> tuple[object, ...]:
        return kind.kind, kind.by_layer, dict(kind.factor_settings)

    if any(alike(kind) != alike(kinds[0]) for kind in kinds):
        told = sorted({kind.kind for kind in kinds})
        raise PrivacyError(f"trials that train together share one kind of clipping and its settings, not {told}")
    made: Bounds = named(kinds[0].held)(context, kinds)
    return made
