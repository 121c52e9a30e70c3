"""Batches of many steps, drawn ahead and sent to a GPU at once, so that no step waits for the host.

Which records a step sees depends on streams alone, never on the data, so the host can draw batches long before
they are used; and it knows their sizes, so the room for them on the device is that of the largest: no batch can
overflow it, and none is cut.

Not here: the law of a batch (`sampling.py`), rows (`tensors.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.core.sampling import Batch, Sampler
from dpsgd_cli.core.tensors import sent

_NUMBERS_AT_ONCE = 1 << 21


class AheadSampler(Sampler):
    """The batches of `whole`, on `device`, in blocks of steps.

    Guarantee: the rows of a step, padding aside, are those of `whole`. Sizes that vary by chance are padded
    to one of few widths, so that a program compiled for a width serves many steps.
    """

    def __init__(self, whole: Sampler, device: torch.device) -> None:
        self._whole = whole
        self._device = device
        self.steps_per_epoch = whole.steps_per_epoch
        self.varies = whole.varies
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
        """Draw batches until there is no more room for one as large as those so far."""
        drawn, most = [first], 1
        while len(drawn) < self.steps_per_epoch and (len(drawn) + 1) * most <= _NUMBERS_AT_ONCE:
            drawn.append(self._whole.batch(step + len(drawn)))
            most = max(most, np.asarray(drawn[-1].rows).size)
        sets = [np.asarray(batch.rows) for batch in drawn]
        longest = max(rows.shape[1] for rows in sets)
        width = _rounded_up(longest) if self.varies else longest
        block = np.zeros((len(sets), len(sets[0]), width), dtype=np.int64)
        mask = np.zeros(block.shape, dtype=bool)
        for place, (batch, rows) in enumerate(zip(drawn, sets, strict=True)):
            block[place, :, : rows.shape[1]] = rows
            mask[place, :, : rows.shape[1]] = True if batch.mask is None else batch.mask
        padded = self.varies or any(batch.mask is not None for batch in drawn)
        self._first = step
        self._widths = [width if padded else rows.shape[1] for rows in sets]
        self._rows = sent(torch.from_numpy(block), self._device)
        self._mask = sent(torch.from_numpy(mask), self._device) if padded else None


def _rounded_up(width: int) -> int:
    """At least 1, and at most a sixteenth more than asked: up to 16 widths between a power of 2 and the next."""
    unit = max(1, (1 << width.bit_length()) // 32)
    return max(1, -(-width // unit) * unit)
