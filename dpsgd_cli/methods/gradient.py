"""The loop that all step-by-step gradient methods share: batch, clipped sums, noise, update, averaging.

The sum is divided by a public constant (expected batch size for poisson, batch size for shuffle, N for
full), never by what a batch happened to hold. A trial whose own plan is over keeps its weights while others go on.

Not here: whether the sum is private (`dp_sgd.py`, `sgd.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.ahead import AheadSampler
from dpsgd_cli.core.augmentation import Augmentation
from dpsgd_cli.core.averaging import StartAverage, make_average
from dpsgd_cli.core.clipping import Clipping, Diagnostics, SumClipped, add_clipped_sums, sum_clipped
from dpsgd_cli.core.projection import project_to_ball
from dpsgd_cli.core.sampling import (
    FullSampler,
    PartSampler,
    PoissonSampler,
    Sampler,
    ShuffleSampler,
    SingleSampler,
    SteadySampler,
)
from dpsgd_cli.core.streamed import StreamedTable
from dpsgd_cli.core.tensors import Rows, sent
from dpsgd_cli.core.updates import make_update
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Context, Method
from dpsgd_cli.methods.problem import l2_of, radii_of
from dpsgd_cli.privacy.plan import adjacency_of
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.base import Section
from dpsgd_cli.recipe.schema.learning_rate import Rate, rate_at
from dpsgd_cli.recipe.schema.method import Gradient


class GradientMethod(Method):
    """Subclasses say how sums are clipped (`clipping`), made private (`privatise`) and paid for (`spend`)."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        settings = section_of(context.recipes[0])
        self.most_rows = _most_rows(context)
        self.sampler = _sampler(context, self.most_rows)
        self.divisor = float(settings.batch_size or len(context.table))
        context.pack.expect(int(self.divisor))
        self.learning_rate = context.column(self.learning_rates(0))
        self.rate_changes = any(isinstance(section_of(r).learning_rate, Section) for r in context.recipes)
        self.weight_decay = context.column([section_of(r).weight_decay + l2_of(r) for r in context.recipes])
        self.decays = bool(self.weight_decay.any())
        self.update = make_update(settings.optimizer, context.pack.values)
        self.radii = context.column(radii_of(context.recipes))
        self.constrained = not bool(self.radii.isinf().all())
        self.average = make_average(settings.averaging, context.pack.values, [self.steps * n for n in self.lengths])
        augment = context.recipes[0].data.augment
        shape = context.table.input_shape
        self.augment = None if augment is None else Augmentation(augment, context.lasting, shape)
        self.sum_clipped = _way(context.recipes[0].runtime.compile)

    def learning_rates(self, epoch: int) -> list[float]:
        """Step length of each trial in `epoch`."""
        return [
            rate_at(given_rate(recipe), epoch, length)
            for recipe, length in zip(self.context.recipes, self.lengths, strict=True)
        ]

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Epochs of each trial."""

    @abstractmethod
    def clipping(self) -> Clipping | None:
        """Bounds on one example's gradient, or None."""

    @abstractmethod
    def privatise(self, epoch: int, step: int) -> None:
        """Turn `pack.sums` into what may be released."""

    @abstractmethod
    def spend(self, epoch: int, trial: int) -> None:
        """Charge the trial for the whole epoch, before any of it is released."""

    @property
    def epochs(self) -> int:
        return max(self.lengths)

    @property
    def steps(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def output(self) -> Tensor:
        return self.context.pack.values if self.average is None else self.average.average

    def run_epoch(self, epoch: int) -> Diagnostics:
        active = [epoch < length for length in self.lengths]
        for trial in range(self.context.trials):
            if active[trial]:
                self.spend(epoch, trial)
        if self.rate_changes:
            self.learning_rate = self.context.column(self.learning_rates(epoch))
        held = None if all(active) else _Held(self, active)
        seen = Diagnostics(self.context.trials, self.context.pack.values.device)
        for step in range(epoch * self.steps, (epoch + 1) * self.steps):
            self._step(epoch, step, seen)
        if held is not None:
            held.restore()
        return self.context.team.total(seen)

    def _step(self, epoch: int, step: int, seen: Diagnostics) -> None:
        pack = self.context.pack
        pack.sums.zero_()
        self.add_sums(epoch, step, seen)
        self.context.team.release(pack.sums, partial(self.privatise, epoch, step))
        gradient = pack.sums.div_(self.divisor).to(pack.values.dtype)
        if self.decays:
            gradient.addcmul_(pack.values, self.weight_decay)
        self.update.apply(pack.values, gradient, self.learning_rate, step)
        if self.constrained:
            project_to_ball(pack.values, self.radii)
        if self.average is not None:
            self.average.add(pack.values, step)

    def add_sums(self, epoch: int, step: int, seen: Diagnostics) -> None:
        """Add the clipped gradients of the step's batch to `pack.sums`."""
        del epoch
        for rows in self._batch(step):
            add_clipped_sums(self.context.pack, rows, self.context.loss, self.clipping(), seen, self.sum_clipped)

    def _batch(self, step: int) -> Iterator[Rows]:
        """The step's batch in pieces that fit in memory, augmented where the recipe says so."""
        batch, table = self.sampler.batch(step), self.context.table
        for piece, (x, y, mask) in enumerate(table.chunks(batch, self.most_rows)):
            if self.augment is not None:
                start = piece * self.most_rows
                x = self.augment(x, table.numbers(batch, start, start + y.shape[1]), step)
            yield x, y, mask

    def _trained(self) -> dict[str, Tensor]:
        """Every tensor (R, P) that a step changes."""
        found = {"values": self.context.pack.values, **{f"update.{k}": v for k, v in self.update.state.items()}}
        if self.average is not None:
            found["average"] = self.average.average
        if isinstance(self.average, StartAverage):
            found["previous"] = self.average.previous
        return found

    def state(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self._trained().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, tensor in self._trained().items():
            tensor.copy_(state[name])


def _way(compiles: bool) -> SumClipped:
    """How a batch's clipped sums are computed: operation by operation, or as one compiled program."""
    if not compiles:
        return sum_clipped
    from dpsgd_cli.core.compiling import Compiled  # takes a while to import

    return Compiled()


def section_of(recipe: Recipe) -> Gradient:
    """The method section of a gradient recipe."""
    assert isinstance(recipe.method, Gradient)
    return recipe.method


def given_rate(recipe: Recipe) -> float | Rate:
    """`method.learning_rate`, where no theorem is asked for it."""
    rate = section_of(recipe).learning_rate
    if rate == "theorem":
        raise RecipeError(f"method.learning_rate: there is no theorem for method {recipe.method.kind}; give a number")
    return rate


class _Held:
    """Weights and optimizer state of the trials that are over."""

    def __init__(self, method: GradientMethod, active: list[bool]) -> None:
        # numbers of trials, not a mask: a GPU would have to say how many it marks
        over = torch.tensor([trial for trial, goes_on in enumerate(active) if not goes_on])
        self.over = sent(over, method.context.pack.values.device)
        self.tensors = method._trained()
        self.kept = {name: tensor[self.over].clone() for name, tensor in self.tensors.items()}

    def restore(self) -> None:
        for name, tensor in self.tensors.items():
            tensor[self.over] = self.kept[name]


def _most_rows(context: Context) -> int:
    """Rows of one piece of a batch: what memory holds, and in rounded passes no more than a public width."""
    settings, augment = section_of(context.recipes[0]), context.recipes[0].data.augment
    most = max(1, context.most_rows // (1 if augment is None else augment.copies))
    if not context.pack.session.rounds or settings.batch_size is None:
        return most
    # almost every batch fits: six standard deviations of its size above the mean
    return min(most, settings.batch_size + 6 * math.isqrt(settings.batch_size) + 1)


def _sampler(context: Context, most_rows: int) -> Sampler:
    """Batches, or with several processes this one's part of every batch."""
    sampler = _whole_sampler(context)
    if context.team.size > 1:
        sampler = PartSampler(sampler, context.team.part, context.table.rows)
    if context.pack.session.rounds and sampler.varies:
        sampler = SteadySampler(sampler, most_rows)
    if isinstance(context.table, StreamedTable):
        return context.table.ahead(sampler)
    device = context.pack.values.device
    # a compiled step wants few shapes, too
    few = device.type == "cuda" or context.recipes[0].runtime.compile
    return AheadSampler(sampler, device) if few else sampler


def _adds_records(recipe: Recipe) -> bool:
    return recipe.privacy is not None and adjacency_of(recipe) == "add-remove"


def _whole_sampler(context: Context) -> Sampler:
    settings, records = section_of(context.recipes[0]), len(context.table)
    if context.pack.session.rounds and settings.batching == "full" and _adds_records(context.recipes[0]):
        raise RecipeError(
            "runtime.dtype: rounded passes over all records are rounded anew when one comes or goes, which add-remove"
            " does not allow; use float32, or batching poisson"
        )
    if settings.batching == "fixed":
        return SingleSampler(context.streams, records)
    if settings.batching == "full" or settings.batch_size is None:
        return FullSampler()
    kind = PoissonSampler if settings.batching == "poisson" else ShuffleSampler
    return kind(context.streams, records, settings.batch_size)
