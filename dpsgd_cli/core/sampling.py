"""Which records a step sees: Poisson, shuffled and full batches, for every trial of a pack at once.

Not here: what a batching costs or is proved for (`privacy/mechanism.py`, README's table).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dpsgd_cli.core.batch_sizes import batch_sizes
from dpsgd_cli.core.streams import Streams

_SINGLE_BLOCK = 4096


@dataclass(frozen=True)
class Batch:
    """Rows of one step. `rows` is int64 (R, B); `mask` is bool (R, B), False where a row is padding.

    `rows` None stands for every record, shared by all trials, or those of `span` (first, one past the last).
    `mask` None stands for no padding.
    """

    rows: np.ndarray | torch.Tensor | None
    mask: np.ndarray | torch.Tensor | None = None
    span: tuple[int, int] | None = None


class Sampler(ABC):
    """Batches by step number, each trial from its own streams."""

    steps_per_epoch: int
    varies: bool = False
    """Whether batches differ in size by chance."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0 over the whole training."""


class FullSampler(Sampler):
    """Every record in every step."""

    steps_per_epoch = 1

    def batch(self, step: int) -> Batch:
        del step
        return Batch(rows=None)


class PoissonSampler(Sampler):
    """Each record independently with probability `rate` = expected batch size / records, anew at each step.

    Guarantee: a size drawn from Binomial(records, rate) and then a uniform set of that size have the law of
    independent inclusions. The size is drawn to 2^-100 of that law (`BatchSizes`, which says what that does to epsilon
    and delta), the set exactly, by whole numbers and rejection; `rate` is the fraction batch_size / records itself.
    Both cost time in proportion to the batch, whatever the number of records. Batches may be empty. An epoch
    is ceil(1 / rate) steps by convention.
    """

    varies = True

    def __init__(self, streams: Sequence[Streams], records: int, batch_size: int) -> None:
        self._streams = streams
        self._records = records
        self.rate = batch_size / records
        self._sizes = batch_sizes(records, batch_size)
        self.steps_per_epoch = -(-records // batch_size)

    def batch(self, step: int) -> Batch:
        drawn = []
        for stream in self._streams:
            size = self._sizes.draw(stream.bits("poisson", step))
            drawn.append(stream.distinct("poisson", step, self._records, size))
        return _padded(drawn)


class SingleSampler(Sampler):
    """One record a step, uniform over all of them, independent of other steps (Lecture 15, Algorithm 3).

    Indices come from normals through their distribution function, in blocks; an epoch is as many steps as records.
    """

    def __init__(self, streams: Sequence[Streams], records: int) -> None:
        self._streams = streams
        self._records = records
        self.steps_per_epoch = records
        self._block = -1
        self._rows = np.empty((0, 0), dtype=np.int64)

    def batch(self, step: int) -> Batch:
        number, place = divmod(step, _SINGLE_BLOCK)
        if number != self._block:
            drawn = [s.normal("single", number, torch.empty(_SINGLE_BLOCK, dtype=torch.float64)) for s in self._streams]
            uniform = torch.special.ndtr(torch.stack(drawn)).numpy()
            self._rows = np.minimum((uniform * self._records).astype(np.int64), self._records - 1)
            self._block = number
        return Batch(rows=self._rows[:, place : place + 1])


class ShuffleSampler(Sampler):
    """Disjoint batches of `batch_size` of a fresh uniform permutation each epoch; the last one may be smaller.

    Guarantee: within an epoch every record is in exactly one batch, and which one does not depend on any
    record's value. Holds the permutation: 8 bytes a record and trial, the only sampler that takes memory by the
    number of records.
    """

    def __init__(self, streams: Sequence[Streams], records: int, batch_size: int) -> None:
        self._streams = streams
        self._records = records
        self._batch_size = batch_size
        self.steps_per_epoch = -(-records // batch_size)
        self._epoch = -1
        self._order = np.empty((0, 0), dtype=np.int64)

    def batch(self, step: int) -> Batch:
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.stack([s.permutation("shuffle", epoch, self._records) for s in self._streams])
            self._epoch = epoch
        start = position * self._batch_size
        return Batch(rows=self._order[:, start : start + self._batch_size])


class SteadySampler(Sampler):
    """The batches of `whole`, padded to a multiple of `unit` rows, for steps that take `unit` rows at a time.

    Every piece of every batch then has the same shape, so what is computed of a row cannot depend on how many others
    there are (`precision.py` says where that matters).
    """

    def __init__(self, whole: Sampler, unit: int) -> None:
        self._whole = whole
        self._unit = unit
        self.steps_per_epoch = whole.steps_per_epoch

    def batch(self, step: int) -> Batch:
        whole = self._whole.batch(step)
        if whole.rows is None:
            return whole
        drawn = np.asarray(whole.rows)
        missing = -drawn.shape[1] % self._unit if drawn.shape[1] else self._unit
        mask = np.ones(drawn.shape, dtype=bool) if whole.mask is None else np.asarray(whole.mask)
        rows, own = (np.pad(x, ((0, 0), (0, missing))) for x in (drawn, mask))
        return Batch(rows, own)


class PartSampler(Sampler):
    """One process's part of every batch: `part` of so many places in a row gives the places that are its own.

    Guarantee: where the parts of all processes are disjoint and cover all places, and all draw the same whole batches,
    each record of a batch is in the part of exactly one process.
    """

    def __init__(self, whole: Sampler, part: Callable[[int], slice], rows: int) -> None:
        self._whole = whole
        self._part = part
        self._rows = rows
        self.steps_per_epoch = whole.steps_per_epoch
        self.varies = whole.varies

    def batch(self, step: int) -> Batch:
        whole = self._whole.batch(step)
        if whole.rows is None:
            own = self._part(self._rows)
            return Batch(rows=None, span=(own.start, own.stop))
        own = self._part(whole.rows.shape[1])
        return Batch(whole.rows[:, own], None if whole.mask is None else whole.mask[:, own])


def _padded(drawn: list[np.ndarray]) -> Batch:
    longest = max(len(rows) for rows in drawn)
    if all(len(rows) == longest for rows in drawn):
        return Batch(rows=np.stack(drawn))
    rows = np.zeros((len(drawn), longest), dtype=np.int64)
    mask = np.zeros((len(drawn), longest), dtype=bool)
    for trial, own in enumerate(drawn):
        rows[trial, : len(own)] = own
        mask[trial, : len(own)] = True
    return Batch(rows=rows, mask=mask)
