"""Batches of a gradient method: the records of each step, in pieces that fit in memory, augmented on request.

The distribution of batches is in `batching/run.py`, augmentation in `data/augmentation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.batching.run import (
    AheadSampler,
    CyclicAllocationSampler,
    CyclicSampler,
    FullSampler,
    SamePartitionSampler,
    Sampler,
    WrappedSampler,
    padded_to,
    part_of,
)
from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.common.plugins import named
from dpsgd_cli.data.augmentation import Augmentation
from dpsgd_cli.engine.context import AuditHook
from dpsgd_cli.engine.tensors import Batch, Examples
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.settings import section_of
from dpsgd_cli.users.run import UnitTable

WORTH_CAPTURING = 20
"""Steps of a training from which `runtime.compile: auto` captures them on a GPU; to capture one takes about four."""
_MOST_PADDED = 1 << 30
"""Most padded rows times parameters for `auto`: small products, which take a GPU less time than kernels to start."""


def compiles(context: Context, epochs: int) -> bool:
    """Return True if steps are programs: as the recipe says, or for `auto` by what is public of the training."""
    recipe, batch = context.recipes[0], section_of(context.recipes[0]).batch
    if recipe.runtime.compile != "auto":
        return recipe.runtime.compile
    long = epochs * (1 if batch is None else -(-len(context.table) // batch)) >= WORTH_CAPTURING
    alone = context.team.size == 1 and not isinstance(context.table, UnitTable)
    small = context.pack.session.rounds or (width_of(batch or 0) - (batch or 0)) * context.pack.size <= _MOST_PADDED
    return long and alone and context.pack.values.is_cuda and small


def width_of(batch: int) -> int:
    """Return the public width of padded batches of random size: three standard deviations above the mean size.

    A batch in 700 needs a second piece.
    """
    return batch + 3 * math.isqrt(batch) + 1


class Batches:
    """Batches by step number; with several processes, this process's part of every batch.

    `compiled`: whether steps are, for which all pieces have one public shape.
    """

    def __init__(self, context: Context, epochs: int) -> None:
        self.compiled = compiles(context, epochs)
        augment, table = context.recipes[0].data.augment, context.table
        self.table = table
        self.augment = None if augment is None else Augmentation(augment, context.lasting, table.input_shape)
        sampler = _whole_sampler(context)
        self.most_rows = _most_rows(context, self.compiled, sampler.varies)
        sampler = _wrapped(sampler, context, self.most_rows, self.compiled)
        self.sampler = (
            sampler if context.watcher is None else WrappedSampler(sampler, partial(_watched, context.watcher))
        )

    def span(self, step: int) -> tuple[int, int] | None:
        """Return the first row of a step's batch and the one after its last, if its rows are consecutive; else None."""
        batch = self.sampler.batch(step)
        return None if batch.rows is not None else batch.span or (0, self.table.rows)

    def pieces(self, step: int) -> Iterator[Examples]:
        """Yield the step's batch in pieces of at most `most_rows` rows per trial: features, labels and mask."""
        batch = self.sampler.batch(step)
        for x, y, mask in self.table.chunks(batch, self.most_rows):
            yield (x if self.augment is None else self.augment(x, step)), y, mask


def _watched(watcher: AuditHook, step: int, batch: Batch) -> Batch:
    watcher.drawn(step, batch)
    return batch


def _most_rows(context: Context, compiled: bool, varies: bool) -> int:
    """Return the examples of a piece: as many as fit in memory; padded batches have equal pieces of a public width."""
    settings, augment = section_of(context.recipes[0]), context.recipes[0].data.augment
    beside = context.table.members.shape[1] if isinstance(context.table, UnitTable) else 1
    most = max(1, context.most_rows // (beside if augment is None else augment.copies))
    if not (context.pack.session.rounds or compiled) or settings.batch is None:
        return most
    wide = width_of(settings.batch) if varies else settings.batch
    pieces = -(-wide // min(most, wide))
    return -(-wide // pieces)


def _wrapped(sampler: Sampler, context: Context, most_rows: int, compiled: bool) -> Sampler:
    """Return `sampler`, wrapped for processes, rounded passes, compiled steps and GPUs."""
    if context.team.size > 1:
        part = partial(part_of, context.team.part, context.table.rows)
        sampler = WrappedSampler(sampler, lambda step, batch: part(batch))
    if compiled or (context.pack.session.rounds and sampler.varies):
        sampler = WrappedSampler(sampler, lambda step, batch: padded_to(most_rows, batch))
        sampler.varies = False
    device, on_disk = context.pack.values.device, isinstance(context.table, StreamedTable)
    return AheadSampler(sampler, device) if not on_disk and (device.type == "cuda" or compiled) else sampler


def _whole_sampler(context: Context) -> Sampler:
    recipe, records = context.recipes[0], len(context.table)
    settings = section_of(recipe)
    adds_records = recipe.privacy is not None and NEIGHBOURS[recipe.adjacency].counted
    if context.pack.session.rounds and settings.batching == "full" and adds_records:
        raise RecipeError(
            "runtime.dtype: rounded passes over all records are rounded anew when one comes or goes, which add-remove"
            " does not allow; use float32, or batching poisson"
        )
    if settings.batching == "full" or settings.batch is None:
        # a masked pass over all rows costs less than gathering each trial's own rows, unless these are few
        few = context.table.own is not None and 2 * records < context.table.rows
        return FullSampler(np.tile(np.arange(records), (context.trials, 1)) if few else None)
    groups = [1 if plan is None else plan.sampling.groups for plan in context.plans]
    if settings.batching == "poisson" and max(groups) > 1:
        return CyclicSampler(context.streams, context.lasting, records, settings.batch, groups)
    if settings.batching == "random-allocation" and max(groups) > 1:
        return CyclicAllocationSampler(context.streams, context.lasting, records, settings.batch, groups)
    if settings.batching == "shuffle" and any(isinstance(p, Plan) and p.correlated is not None for p in context.plans):
        return SamePartitionSampler(context.lasting, records, settings.batch)
    kind = BATCHINGS[settings.batching].sampler
    assert kind is not None, "batches of all records have no size"
    drawn: Sampler = named(kind)(context.streams, records, settings.batch)
    return drawn
