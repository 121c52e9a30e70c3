"""The observer of an audited training: batches, clipped sums, noise, released values on canary coordinates.

Noise is computed from what is released. It is the released mean times the public divisor, minus the clipped sums, in
units of the ledger's noise multiplier times sensitivity. This shows noise that is added elsewhere and sums that are
divided by another number. Noise that is correlated across steps is first multiplied by the plan's matrix, which leaves
the independent noise that the ledger charges for.

Tier C compares the noise of a run's releases and the rate of its batches with the ledger.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from scipy.special import logsumexp
from torch import Tensor

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism
from dpsgd_cli.audit.claim import last_gradient, log_ratio, score, shift_of
from dpsgd_cli.audit.findings import Finding, by_p_value
from dpsgd_cli.audit.stage import StagedTrials
from dpsgd_cli.audit.statistics import far_from, noise_bound, too_little_noise
from dpsgd_cli.engine.context import AroundNoise, AuditHook, Units
from dpsgd_cli.engine.tensors import Batch
from dpsgd_cli.noise.correlation import StepNoise, step_noise
from dpsgd_cli.noise.price import NoiseStrategy
from dpsgd_cli.preconditioning.price import LABELS, Marginals
from dpsgd_cli.preconditioning.second_moments import from_vector

_MOST_KEPT = 1 << 22
BEFORE = -1
"""Used instead of an epoch's number for what is released before the first epoch."""


@dataclass
class ObservedNoise:
    """Noise in units of the ledger's: sums of squares and counts by epoch."""

    squares: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, epoch: int, drawn: np.ndarray | Tensor) -> None:
        self.squares[epoch] = self.squares.get(epoch, 0.0) + float((drawn**2).sum())
        self.counts[epoch] = self.counts.get(epoch, 0) + math.prod(drawn.shape)


class StepObserver(AuditHook, ABC):
    """Observer that receives each step's sums before noise, and the noisy mean, in equal units; one process only."""

    sums: Tensor
    divisor: float
    units: Units
    exact: Sequence[Tensor]

    @abstractmethod
    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        """Receive a step's clipped sums (R, P) before noise, and the noisy mean that the update uses.

        The observer may change `mean` in place; training uses the changed values.
        """

    def around(self, sums: Tensor, divisor: float, units: Units) -> AroundNoise:
        self.sums, self.divisor, self.units = sums, divisor, units
        return self

    def before_noise(self, beside: Sequence[Tensor]) -> None:
        self.exact = [sums.clone() for sums in (self.sums, *beside)]

    def after_noise(self, epoch: int, step: int, mean: Tensor, beside: Sequence[Tensor]) -> None:
        units, means = self.units(epoch), [mean, *(sums / self.divisor for sums in beside)]
        exact, noisy = (
            torch.cat([one / unit for one, unit in zip(parts, units, strict=False)], dim=1)
            for parts in (self.exact, means)
        )
        self.released(epoch, step, exact, noisy)
        places = noisy.split([one.shape[1] for one in means[: len(units)]], dim=1)
        mean.copy_(places[0] * units[0])
        for sums, place, unit in zip(beside, places[1:], units[1:], strict=False):
            sums.copy_(place * unit * self.divisor)


class Watch(StepObserver):
    """Observer of every step of all trials. Call `begin` before the first epoch.

    `staged`: the observed trials, from `begin` on.
    """

    staged: StagedTrials

    def __init__(self) -> None:
        self.sizes: list[np.ndarray] = []
        self.drew = ObservedNoise()
        self.mechanism: GaussianSum | None = None
        self._fresh = StepNoise()
        self._blocks: Blocks | None = None
        self._batch: Batch | None = None
        self._scale: tuple[int, np.ndarray, np.ndarray] | None = None

    def begin(self, staged: StagedTrials) -> None:
        self.staged = staged
        sampling, trials = staged.plan.sampling, staged.inside.shape[0]
        pack, planned = staged.trials.context.pack, staged.plan.correlated
        own = None if planned is None else NoiseStrategy.of(planned)
        self._fresh = step_noise([own] * trials, pack.size, pack.values.device)
        self.scores = np.zeros(staged.inside.shape)
        if own is not None and sampling.kind.sampled:
            self._blocks = Blocks((own.column[: own.reach] / own.norm).tolist(), staged.inside.shape)

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        staged = self.staged
        assert isinstance(mechanism, GaussianSum)
        entries = staged.trials.context.ledgers[0].entries
        charged = [e.release.mechanism for e in entries if e.phase == "before"]
        own = next((m for m in charged if isinstance(m, GaussianSum) and m.label == mechanism.label), mechanism)
        self.drew.add(BEFORE, (noisy - exact) / (own.noise_multiplier * own.sensitivity))
        if own.label not in LABELS or staged.vectors is None or staged.vectors.instead is not None:
            return  # a row and its opposite have the same second moment
        # if cells are counted, each feature of these rows is the cell of a column
        rows = noisy.numpy()
        rows = rows if own.label == Marginals().kind else np.stack([np.diag(from_vector(one)) for one in rows])
        shown = rows[:, -staged.inside.shape[1] :]
        self.scores += score(shown / own.sensitivity, own.noise_multiplier, 1.0, shift_of(own))

    def drawn(self, step: int, batch: Batch) -> None:
        del step
        self._batch = batch

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        staged = self.staged
        multipliers, scales = self._of_ledgers(epoch)
        on = torch.from_numpy(scales).to(exact)
        running = multipliers > 0
        added = mean.double() * staged.plan.sampling.batch_size - exact
        difference = self._fresh.fresh(step, added) / on
        self.drew.add(epoch, difference[torch.from_numpy(running).to(exact.device)])
        if staged.vectors is None:
            self._note_coordinates(mean, multipliers, running)
        else:
            self._note_vectors(mean, multipliers, running)
        if self._batch is not None and self._batch.rows is not None:
            self.sizes.append(_drawn(self._batch)[1].sum(axis=1))

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        staged = self.staged
        charged = [staged.trials.context.ledgers[trial].entries[-1].release.mechanism for trial in trials]
        gaussians = [one for one in charged if isinstance(one, GaussianSum)]
        assert len(gaussians) == len(trials), "a gradient was measured before it was charged"
        self.mechanism = gaussians[0]
        multipliers = np.array([one.noise_multiplier for one in gaussians])[:, None]
        units = np.array([one.sensitivity for one in gaussians])[:, None]
        noise = (noisy.double() - exact.double()).cpu().numpy() / (multipliers * units)
        self.drew.add(0, noise)
        seen = staged.signs * noisy[:, staged.columns[0]].double().cpu().numpy() / units
        self.scores[list(trials)] += score(seen, multipliers, 1.0, shift_of(gaussians[0]))

    def _of_ledgers(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the noise multipliers (R,) charged in `epoch`, and the standard deviations of noise (R, 1 or P).

        The noise multiplier is 0 for a trial that has ended.
        """
        staged = self.staged
        if self._scale is not None and self._scale[0] == epoch:
            return self._scale[1:]
        charged = [last_gradient(ledger, epoch) for ledger in staged.trials.context.ledgers]
        self.mechanism = self.mechanism or next((one for one in charged if one is not None), None)
        scale = np.array([1.0 if one is None else one.noise_multiplier * one.sensitivity for one in charged])
        multipliers = np.array([0.0 if one is None else one.noise_multiplier for one in charged])
        if staged.plan.correlated is not None:  # whose charges are relative to what a record moves in several steps
            multipliers = np.where(multipliers > 0, scale / staged.plan.sensitivity, 0.0)
        scales = scale[:, None] * self._by_parameter()
        self._scale = (epoch, multipliers, scales)
        return multipliers, scales

    def _by_parameter(self) -> np.ndarray:
        """Return each parameter's noise (1, 1 or P), in units of the ledger's noise for the whole vector.

        Noise z C_l on each layer l of M is one Gaussian of noise multiplier z / sqrt(M) and sensitivity sqrt(sum
        C_l^2).
        """
        staged = self.staged
        privacy = staged.trials.recipe.required_privacy
        if not privacy.clipping.noise_by_layer:
            return np.ones((1, 1))
        pack = staged.trials.context.pack
        bounds = np.array(privacy.clipping.bounds(len(pack.layers)))
        whole = math.sqrt(float(np.square(bounds).sum()) / len(bounds))
        return np.asarray((bounds / whole)[pack.group_of.cpu().numpy()][None])

    def _note_coordinates(self, mean: Tensor, multipliers: np.ndarray, running: np.ndarray) -> None:
        staged = self.staged
        sampling, sensitivity = staged.plan.sampling, staged.plan.sensitivity
        weights = self._weights()
        unit = sensitivity if len(weights) == 1 else sum(w * b for w, b in weights) * replace_factor(sampling.adjacency)
        seen = np.zeros(staged.inside.shape)
        for (weight, _), columns in zip(weights, staged.columns, strict=True):
            seen += weight * mean[:, columns].double().cpu().numpy() * sampling.batch_size
        first = self._first
        counted = running[:, None] & self._told()

        def of(shown: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore", invalid="ignore"):
                found = score(shown, multipliers[:, None], first.sampling_rate, shift_of(first))
            return np.where(counted, found, 0.0)

        shown = staged.signs * seen / unit
        self.scores = self.scores + of(shown) if self._blocks is None else self._blocks.add(shown, of)

    def _note_vectors(self, mean: Tensor, multipliers: np.ndarray, running: np.ndarray) -> None:
        staged = self.staged
        assert staged.vectors is not None
        plan, rate = staged.plan, self._first.sampling_rate

        shown = np.stack([mean[:, columns].double().cpu().numpy() for columns in staged.columns], axis=2)
        seen = shown * plan.sampling.batch_size / plan.sensitivity
        counted = running[:, None] & self._told()
        for sign, vector in zip((1, -1), staged.vectors.gradients(), strict=True):
            if vector is not None:
                own = vector / plan.sensitivity
                with np.errstate(divide="ignore", invalid="ignore"):
                    found = log_ratio((seen * own).sum(axis=2), (own**2).sum(axis=2), multipliers[:, None], rate)
                self.scores += sign * np.where(counted, found, 0.0)

    @property
    def _first(self) -> GaussianSum:
        assert self.mechanism is not None
        return self.mechanism

    def _weights(self) -> list[tuple[float, float]]:
        """Return weight and clip norm of each layer's canary coordinates.

        The weighted sum is the projection that separates in from out best.
        """
        staged = self.staged
        privacy = staged.trials.recipe.required_privacy
        if len(staged.columns) == 1:
            return [(1.0, 1.0)]
        bounds = privacy.clipping.bounds(len(staged.trials.context.pack.layers))
        return [(1 / bound if privacy.clipping.noise_by_layer else bound, bound) for bound in bounds]

    def _told(self) -> np.ndarray:
        """Return a mask (R, k) of the canaries whose scores this step changes, or (1, 1) for all of them.

        With shuffled batches these are the canaries in a trial's batch: the theorem that prices a partition reveals it.
        """
        staged = self.staged
        batch = self._batch
        if self._first.batching != "shuffle" or batch is None or batch.rows is None:
            return np.ones((1, 1), dtype=bool)
        return self._members(batch, staged.places)

    def _members(self, batch: Batch, places: np.ndarray) -> np.ndarray:
        """Return a mask (R, k) of the records at `places` (k,) that are in each trial's batch."""
        rows, there = _drawn(batch)
        nobody = self.staged.plan.sampling.records
        held = np.zeros((len(rows), nobody + 1), dtype=bool)
        np.put_along_axis(held, np.where(there, rows, nobody), True, axis=1)
        return held[:, places]


def _drawn(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers (R, B) of a batch, and a mask of those that are no padding."""
    rows = np.asarray(torch.as_tensor(batch.rows).cpu())
    return rows, np.ones(rows.shape, bool) if batch.mask is None else np.asarray(torch.as_tensor(batch.mask).cpu())


class Blocks:
    """Scores (R, k) of canaries under banded correlated noise: by blocks of steps, for every group of a canary.

    Multiplied by the public matrix C, the release is C g plus independent noise. Let a canary be in group j of b. In
    blocks of b steps that begin at j, j + b, ..., it moves the rows by weights w (the first column of C) times its
    gradient, |w| = 1, if it was drawn. So the release shows sum_k w_k (C r)_{s+k} of the canary in a block that begins
    at s: a subsampled Gaussian, as a step of independent noise does. A canary of an unknown group is in each group with
    probability 1 / b, so its likelihood ratio is the mean of the groups' ratios.
    """

    def __init__(self, weights: Sequence[float], shape: tuple[int, ...]) -> None:
        self._weights = weights
        self._raw: deque[np.ndarray] = deque(maxlen=len(weights))
        self._rows: deque[np.ndarray] = deque(maxlen=len(weights))
        self._scores = np.zeros((len(weights), *shape))
        self._steps = 0

    def add(self, seen: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return log-likelihood ratios of all steps so far, after a step that shows `seen` on the canary coordinates.

        `score` returns the log-likelihood ratio of one block.
        """
        bands = len(self._weights)
        self._raw.appendleft(seen)
        self._rows.append(self._sum(self._raw))
        self._steps += 1
        if self._steps >= bands:
            self._scores[self._steps % bands] += score(self._sum(self._rows))
        return np.asarray(logsumexp(self._scores, axis=0) - math.log(bands))

    def _sum(self, rows: deque[np.ndarray]) -> np.ndarray:
        return np.asarray(sum(weight * row for weight, row in zip(self._weights, rows, strict=False)))


def noise_checks(drew: ObservedNoise, confidence: float) -> Iterator[Finding]:
    """Check that all noise together is not below the ledger's, and that each epoch has that of its own charge."""
    squares, count = sum(drew.squares.values()), sum(drew.counts.values())
    if not count:
        return
    bound = f"at most {noise_bound(squares, count, confidence):.4f} times the ledger's ({count:,} draws)"
    yield by_p_value("C", "noise", bound, "1", too_little_noise(squares, count))
    epochs = sorted(drew.squares)
    if len(epochs) > 1:
        # too much noise is no breach of privacy, but still contradicts the claim
        below = [float(stats.chi2.cdf(drew.squares[epoch], drew.counts[epoch])) for epoch in epochs]
        each = [2 * min(one, 1 - one) for one in below]
        worst = epochs[int(np.argmin(each))]
        ratio = math.sqrt(drew.squares[worst] / drew.counts[worst])
        place = "releases before training" if worst == BEFORE else f"epoch {worst}"
        found = f"{ratio:.4f} times the ledger's in {place}, the farthest"
        yield by_p_value("C", "noise of each epoch", found, "1", min(1.0, min(each) * len(each)))


def batch_checks(watch: Watch) -> Iterator[Finding]:
    """Check how often records are in batches, over all draws of a sampler."""
    mechanism = watch.mechanism
    assert mechanism is not None
    if not mechanism.sampled:
        return
    sizes, sampling = np.array(watch.sizes), watch.staged.plan.sampling
    # a step draws from one of the groups, at the rate that the mechanism has within it
    total, draws, rate = int(sizes.sum()), sampling.records * sizes.size, mechanism.sampling_rate / sampling.groups
    found = f"{total / draws:.6f} ({draws:,} draws)" if draws else "no batch was drawn by a sampler"
    yield by_p_value("C", "inclusion rate", found, f"{rate:.6f}", far_from(total, draws, rate) if draws else 0.0)
