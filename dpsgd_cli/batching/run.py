"""Samplers that choose the records of each step, one for each kind of batching, for every trial of a pack at once.

The number of records, the expected batch size and the steps of an epoch are public. The drawn records must stay
secret, and so must their number where it is random: the privacy guarantees rely on that. The recipe's kinds of
batching are in `accounting/adjacency.py`, their prices in `accounting/mechanism.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.engine.tensors import Batch, to_device

BITS = 512
_SCALE = 192
_MOST_RECORDS = 1 << 40
_SINGLE_BLOCK = 4096
_NUMBERS_AT_ONCE = 1 << 21

Drawn = TypeVar("Drawn")


class Sampler(ABC):
    """Batches by step number, each trial from its own streams."""

    steps_per_epoch: int
    varies: bool = False
    """True if batch sizes are random."""

    def __init__(self, streams: Sequence[Streams], records: int, batch_size: int) -> None:
        self._streams = streams
        self._records = records
        self._batch_size = batch_size
        self._drawn: tuple[int, list[Any]] = (-1, [])
        self.steps_per_epoch = -(-records // batch_size)

    def _once(self, draw: Callable[[Streams, int], Drawn], number: int) -> list[Drawn]:
        """Return what `draw` gives of each trial's streams for a block of steps, which is kept until the next block."""
        if self._drawn[0] != number:
            self._drawn = number, [draw(stream, number) for stream in self._streams]
        return self._drawn[1]

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, counted from 0 over the whole training."""


class FullSampler(Sampler):
    """Every record in every step; `places` (R, N) lists them for trials that use few of a table's records.

    >>> FullSampler().batch(3)
    Batch(rows=None, mask=None, span=None)
    """

    steps_per_epoch = 1

    def __init__(self, places: np.ndarray | None = None) -> None:
        self._places = places

    def batch(self, step: int) -> Batch:
        del step
        return Batch(rows=self._places)


class BatchSizes:
    """The distribution Binomial(N, B / N) as a table of integers; once it is built, a draw is one search in it.

    Notation: N records, B the expected size, q = B / N as a fraction, u_k = 2^192 p_k / p_m with p_k the probability
    of size k and m the most likely size.

    Guarantee: for N <= 2^40, `draw` applied to 512 uniform bits has a distribution within 2^-100 of Binomial(N, q) in
    total variation. Proof. The table holds w_m = 2^192. Outwards from m it holds w_(k+1) = floor(w_k r_k), until w is
    0. The ratio of integers r_k = (N - k) B / ((k + 1) (N - B)) is at most 1 (downwards: its inverse). So
    0 <= u_k - w_k <= |k - m| <= N, and where the table ends u is at most N and does not grow further. Hence
    sum |u_k - w_k| <= N (N + 1), while sum u_k >= 2^192: the normalised distributions differ by at most
    2 N (N + 1) / 2^192 < 2^-110. `draw` maps 2^512 equally likely numbers onto the W <= (N + 1) 2^192 units of the
    table. Each unit gets its share to 1 / 2^512, so all of them together to less than 2^-270.

    Consequence for privacy. A batch of this size, filled with a uniform set of records, is within 2^-100 of independent
    inclusions with probability q, because those are a uniform set given their number. T steps are within T 2^-100 on
    each of two neighbouring data sets. So (epsilon, delta) of exact Poisson sampling becomes
    (epsilon, delta + (1 + e^epsilon) T 2^-100). Sampling record by record, or by geometric gaps, with uniforms of 53
    bits has no such bound: the distribution of a gap is off by 2^-53 at each of its millions of likely values.

    >>> BatchSizes(4, 2).draw(2**511)
    2
    """

    def __init__(self, records: int, expected: int) -> None:
        if not 0 < expected <= records <= _MOST_RECORDS:
            raise ValueError(f"expected size {expected} of {records} records; give 0 < size <= records <= 2^40")
        most_likely = min((records + 1) * expected // records, records)
        odds, against = expected, records - expected
        below: list[int] = []
        above: list[int] = []
        weight, size = 1 << _SCALE, most_likely
        while size > 0 and (weight := weight * size * against // ((records - size + 1) * odds)):
            below.append(weight)
            size -= 1
        self._least = size
        weight, size = 1 << _SCALE, most_likely
        while size < records and (weight := weight * (records - size) * odds // ((size + 1) * against)):
            above.append(weight)
            size += 1
        self._cumulative = list(accumulate([*reversed(below), 1 << _SCALE, *above]))

    def draw(self, bits: int) -> int:
        """Return the batch size that `bits`, uniform on 0..2^512 - 1, selects."""
        return self._least + bisect_right(self._cumulative, bits * self._cumulative[-1] >> BITS)

    def probability(self, size: int) -> float:
        """Return the probability of `size` under `draw`, as a float (the table itself is exact)."""
        place = size - self._least
        if not 0 <= place < len(self._cumulative):
            return 0.0
        weight = self._cumulative[place] - (self._cumulative[place - 1] if place else 0)
        return weight / self._cumulative[-1]


batch_sizes = lru_cache(maxsize=8)(BatchSizes)
"""Cached `BatchSizes` of (records, expected size), shared by all trials of a pack."""


class PoissonSampler(Sampler):
    """Poisson batches: each record independently with probability `rate` = expected batch size / records, every step.

    Guarantee: a size drawn from Binomial(records, rate), and then a uniform set of that size, have the distribution of
    independent inclusions. The size is drawn to within 2^-100 of it (`BatchSizes` gives the effect on epsilon and
    delta). The set is drawn exactly, by integers and rejection. `rate` is exactly the fraction batch_size / records.
    The time is proportional to the batch, not to the number of records. Batches may be empty. An epoch is
    ceil(1 / rate) steps by convention.

    Each trial has its own batch; shorter ones are padded with masked rows.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = PoissonSampler([SeededStreams(0), SeededStreams(1)], records=10, batch_size=3)
    >>> sampler.rate, sampler.steps_per_epoch
    (0.3, 4)
    >>> drawn = sampler.batch(2)
    >>> drawn.rows.tolist(), drawn.mask.sum(axis=1).tolist()
    ([[6, 0, 3, 2], [3, 0, 0, 0]], [4, 1])
    """

    varies = True

    def __init__(self, streams: Sequence[Streams], records: int, batch_size: int) -> None:
        super().__init__(streams, records, batch_size)
        self.rate = batch_size / records
        self._sizes = batch_sizes(records, batch_size)

    def batch(self, step: int) -> Batch:
        drawn = []
        for stream in self._streams:
            size = self._sizes.draw(stream.bits("poisson", step))
            drawn.append(stream.distinct("poisson", step, self._records, size))
        return _padded(drawn)


class CyclicSampler(Sampler):
    """Cyclic Poisson batches: step t draws from group t mod `groups`, at rate groups x batch size / records.

    Guarantee: each record is assigned to a group, 0 to groups - 1, by its own data-independent draw from `lasting`;
    the other records do not influence its distribution. The record is in batches of its group's steps only, in each
    with that rate, whatever the group holds: a batch is a `PoissonSampler` batch of all records without those of other
    groups. Group sizes are random, and so are batch sizes; neither changes the rate. Each trial has its own groups and
    its own number of them; with 1 group, batches are those of `PoissonSampler`.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = CyclicSampler([SeededStreams(0)], [SeededStreams(0)], records=10, batch_size=3, groups=[3])
    >>> [sampler.batch(step).rows[0].tolist() for step in range(4)]
    [[4, 5, 6, 7, 9], [0, 1, 2, 3, 8], [], [5, 6, 7, 9]]
    """

    varies = True

    def __init__(
        self,
        streams: Sequence[Streams],
        lasting: Sequence[Streams],
        records: int,
        batch_size: int,
        groups: Sequence[int],
    ) -> None:
        super().__init__(streams, records, batch_size)
        self._groups = groups
        self._whole = [
            PoissonSampler([stream], records, own * batch_size) for stream, own in zip(streams, groups, strict=True)
        ]
        self._of = [_groups_of(stream, records, own) for stream, own in zip(lasting, groups, strict=True)]

    def batch(self, step: int) -> Batch:
        drawn = []
        for whole, of, groups in zip(self._whole, self._of, self._groups, strict=True):
            rows = np.asarray(whole.batch(step).rows)[0]
            drawn.append(rows[of[rows] == step % groups])
        return _padded(drawn)


def _groups_of(stream: Streams, records: int, groups: int) -> np.ndarray:
    """Draw the group of each record, independently and uniformly."""
    drawn = stream.normal("groups", 0, torch.empty(records, dtype=torch.float64))
    uniform = torch.special.ndtr(drawn).numpy()
    return np.minimum((uniform * groups).astype(np.int32), groups - 1)


class FixedSampler(Sampler):
    """Batches of fixed size: a uniform set of `batch_size` records, drawn independently at each step.

    A batch of one record is uniform over all records (Lecture 15, Algorithm 3). These are drawn many steps at a time;
    with a seed, from normals through their distribution function.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> FixedSampler([SeededStreams(0)], records=7, batch_size=3).batch(1).rows.tolist()
    [[1, 3, 5]]
    >>> single = FixedSampler([SeededStreams(0)], records=7, batch_size=1)
    >>> [int(single.batch(step).rows[0, 0]) for step in range(5)]
    [5, 5, 6, 6, 2]
    """

    def batch(self, step: int) -> Batch:
        if self._batch_size > 1:
            return Batch(np.stack([s.distinct("fixed", step, self._records, self._batch_size) for s in self._streams]))
        number, place = divmod(step, _SINGLE_BLOCK)
        return Batch(rows=np.stack([rows[place : place + 1] for rows in self._once(self._singles, number)]))

    def _singles(self, stream: Streams, number: int) -> np.ndarray:
        if not stream.reproducible:
            return stream.integers("single", number, self._records, _SINGLE_BLOCK)
        uniform = torch.special.ndtr(stream.normal("single", number, torch.empty(_SINGLE_BLOCK, dtype=torch.float64)))
        return np.minimum((uniform.numpy() * self._records).astype(np.int64), self._records - 1)


class AllocationSampler(Sampler):
    """Each record in one step of each epoch, drawn uniformly and independently of all others.

    Guarantee: the step of a record depends on no record, not even on which other records exist. Batch sizes are random
    and may be 0. The sampler stores 8 bytes for each record and trial.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = AllocationSampler([SeededStreams(0)], records=7, batch_size=3)
    >>> [sampler.batch(step).rows[0].tolist() for step in range(sampler.steps_per_epoch)]
    [[2], [1, 4, 5, 6], [0, 3]]
    """

    varies = True

    def batch(self, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        return _padded([batches[place] for batches in self._once(self._allocated, epoch)])

    def _allocated(self, stream: Streams, epoch: int) -> list[np.ndarray]:
        """Return the records of each step."""
        steps = self._steps(stream, epoch)
        sizes = np.bincount(steps, minlength=self.steps_per_epoch)
        return np.split(np.argsort(steps, kind="stable"), np.cumsum(sizes)[:-1])

    def _steps(self, stream: Streams, epoch: int) -> np.ndarray:
        """Draw the step of each record."""
        return stream.integers("allocation", epoch, self.steps_per_epoch, self._records)


class CyclicAllocationSampler(AllocationSampler):
    """Each record in one step of each epoch, drawn uniformly from the steps of its group: step t is of t mod `groups`.

    Guarantee: the group of a record is its own data-independent draw from `lasting`, the same in every epoch, and its
    step within the group is drawn anew for each epoch, independently of all other records. Each trial has its own
    groups and its own number of them, which divides the steps of an epoch; with 1 group, batches are those of
    `AllocationSampler`.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = CyclicAllocationSampler([SeededStreams(0)], [SeededStreams(0)], records=9, batch_size=2, groups=[5])
    >>> [sampler.batch(step).rows[0].tolist() for step in range(sampler.steps_per_epoch)]
    [[5, 6, 7], [4], [1, 2, 3], [0, 8], []]
    """

    def __init__(
        self,
        streams: Sequence[Streams],
        lasting: Sequence[Streams],
        records: int,
        batch_size: int,
        groups: Sequence[int],
    ) -> None:
        super().__init__(streams, records, batch_size)
        self._of = {
            stream: (own, _groups_of(kept, records, own))
            for stream, kept, own in zip(streams, lasting, groups, strict=True)
        }

    def _steps(self, stream: Streams, epoch: int) -> np.ndarray:
        groups, of = self._of[stream]
        return stream.integers("allocation", epoch, self.steps_per_epoch // groups, self._records) * groups + of


class ShuffleSampler(Sampler):
    """Disjoint batches of `batch_size` from a new uniform permutation each epoch; the last one may be smaller.

    Guarantee: within an epoch every record is in exactly one batch, whose choice does not depend on any record's
    value. The sampler stores the permutation: 8 bytes per record and trial.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = ShuffleSampler([SeededStreams(0)], records=7, batch_size=3)
    >>> [sampler.batch(step).rows[0].tolist() for step in range(sampler.steps_per_epoch)]
    [[5, 1, 3], [4, 2, 6], [0]]
    """

    def batch(self, step: int) -> Batch:
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self._batch_size
        orders = self._once(lambda stream, number: stream.permutation("shuffle", number, self._records), epoch)
        return Batch(rows=np.stack([order[start : start + self._batch_size] for order in orders]))


class SamePartitionSampler(ShuffleSampler):
    """The batches of the first epoch of a `ShuffleSampler` in every epoch; its streams are `Context.lasting`.

    >>> from dpsgd_cli.engine.streams import SeededStreams
    >>> sampler = SamePartitionSampler([SeededStreams(0)], records=7, batch_size=3)
    >>> [sampler.batch(step).rows[0].tolist() for step in (0, 1, 3)]
    [[5, 1, 3], [4, 2, 6], [5, 1, 3]]
    """

    def batch(self, step: int) -> Batch:
        return super().batch(step % self.steps_per_epoch)


class WrappedSampler(Sampler):
    """The batches of `whole`, each passed through `change`, a function of the step and the batch."""

    def __init__(self, whole: Sampler, change: Callable[[int, Batch], Batch] = lambda step, batch: batch) -> None:
        self._whole = whole
        self._change = change
        self.steps_per_epoch = whole.steps_per_epoch
        self.varies = whole.varies

    def batch(self, step: int) -> Batch:
        return self._change(step, self._whole.batch(step))


def padded_to(unit: int, batch: Batch) -> Batch:
    """Return `batch`, padded to a multiple of `unit` rows, for steps that take `unit` rows at a time.

    Every piece of every batch then has the same shape, so the result for a row cannot depend on the number of other
    rows (`precision.py` explains where that matters).

    >>> last = padded_to(4, Batch(np.array([[0]])))
    >>> last.rows.tolist(), last.mask.tolist()
    ([[0, 0, 0, 0]], [[True, False, False, False]])
    """
    if batch.rows is None:
        return batch
    return Batch(*_widened(batch, max(1, -(-batch.rows.shape[1] // unit)) * unit))


def _widened(batch: Batch, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a batch and its mask, each (R, width); those that are added are masked."""
    rows = np.asarray(batch.rows)
    added = ((0, 0), (0, width - rows.shape[1]))
    mask = np.ones(rows.shape, dtype=bool) if batch.mask is None else np.asarray(batch.mask)
    return np.pad(rows, added), np.pad(mask, added)


def part_of(part: Callable[[int], slice], rows: int, batch: Batch) -> Batch:
    """Return one process's part of a batch of a table of `rows`: of `count` places, the slice `part(count)`.

    Guarantee: if the slices of all processes are disjoint and cover all places, and all processes draw the same whole
    batches, then each record of a batch is in the part of exactly one process.

    >>> whole = Batch(np.array([[5, 1, 3]]))
    >>> [part_of(part, 7, whole).rows.tolist() for part in (lambda n: slice(0, n // 2), lambda n: slice(n // 2, n))]
    [[[5]], [[1, 3]]]
    """
    own = part(rows if batch.rows is None else batch.rows.shape[1])
    if batch.rows is None:
        return Batch(rows=None, span=(own.start, own.stop))
    return Batch(batch.rows[:, own], None if batch.mask is None else batch.mask[:, own])


class AheadSampler(WrappedSampler):
    """The batches of `whole`, drawn ahead in blocks of steps and stored on `device`.

    Guarantee: the rows of a step, padding aside, are those of `whole`. Batches of random size are padded to one of a
    few widths, so that a program compiled for a width serves many steps.
    """

    def __init__(self, whole: Sampler, device: torch.device) -> None:
        super().__init__(whole)
        self._device = device
        self._first = 0
        self._widths: list[int] = []
        self._rows = torch.empty(0)
        self._mask: Tensor | None = None

    def batch(self, step: int) -> Batch:
        if not self._first <= step < self._first + len(self._widths):
            first = self._whole.batch(step)
            if first.rows is None:
                return first
            self._fill(step, first)
        place = step - self._first
        width = self._widths[place]
        return Batch(self._rows[place, :, :width], None if self._mask is None else self._mask[place, :, :width])

    def _fill(self, step: int, first: Batch) -> None:
        """Draw batches until the block has no room for another one as large as the largest so far."""
        drawn, most = [first], 1
        while len(drawn) < self.steps_per_epoch and (len(drawn) + 1) * most <= _NUMBERS_AT_ONCE:
            drawn.append(self._whole.batch(step + len(drawn)))
            most = max(most, np.asarray(drawn[-1].rows).size)
        widths = [np.asarray(batch.rows).shape[1] for batch in drawn]
        width = _rounded_up(max(widths)) if self.varies else max(widths)
        rows, masks = (torch.from_numpy(np.stack(x)) for x in zip(*(_widened(b, width) for b in drawn), strict=True))
        padded = self.varies or any(batch.mask is not None for batch in drawn)
        self._first = step
        self._widths = [width] * len(widths) if padded else widths
        self._rows = to_device(rows, self._device)
        self._mask = to_device(masks, self._device) if padded else None


def _rounded_up(width: int) -> int:
    """Round a width up by at most a sixteenth, to at least 1; up to 16 widths lie between two powers of 2."""
    unit = max(1, (1 << width.bit_length()) // 32)
    return max(1, -(-width // unit) * unit)


def _padded(drawn: list[np.ndarray]) -> Batch:
    """Return the trials' rows as one batch, shorter ones padded with masked rows."""
    lengths = np.array([len(rows) for rows in drawn])[:, None]
    mask = np.arange(lengths.max()) < lengths
    rows = np.zeros(mask.shape, dtype=np.int64)
    rows[mask] = np.concatenate(drawn)
    return Batch(rows, None if mask.all() else mask)
