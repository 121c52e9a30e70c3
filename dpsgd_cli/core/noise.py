"""Standard normal noise, one stream per trial, drawn in blocks: for trials in step, and for each at its own pace.

Not here: how much noise (the method scales it) and what it costs (`privacy/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from dpsgd_cli.core.streams import Streams

BLOCK_ELEMENTS = 1 << 19
_TRIAL_BLOCK_ELEMENTS = 1 << 14
# each block of a trial is drawn as this many streams, which cores fill side by side; a GPU fills one by itself
_PARTS = {"cpu": 4}


def noise_precision(streams: Sequence[Streams], dtype: torch.dtype) -> torch.dtype:
    """float64 for secure noise, whose low bits must not show before it is added; the training's own otherwise."""
    return dtype if all(stream.reproducible for stream in streams) else torch.float64


def add_noise(sums: torch.Tensor, noise: torch.Tensor, scale: torch.Tensor) -> None:
    """sums += scale * noise, all (R, P) or broadcastable; `sums` are float64, in which noise meets them.

    Rounding after the addition is post-processing. Noise that was rounded before it would have gaps that betray the
    sum's low bits (Mironov 2012), and a sum of millions that was rounded before it is moved by more than one record.
    """
    if sums.dtype != torch.float64:
        raise ValueError(f"noise is added to float64 sums, not {sums.dtype}")
    sums.addcmul_(noise, scale)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that wait between blocks: starting some for every block costs more than the block."""
    return ThreadPoolExecutor(workers, thread_name_prefix="noise")


class NoiseSource:
    """Standard normals of shape (R, P) by step number.

    Guarantee: the draw of (trial, step) depends on that trial's streams, the step and P only, and no two
    (trial, step) pairs share a normal. The block length is a function of P alone, so packs of any size
    agree. With seeded streams a step can be asked for again, and gives the same draw; with secure streams
    steps must be asked for in increasing order, once each, and a repetition raises RuntimeError.
    """

    def __init__(self, streams: Sequence[Streams], size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._streams = streams
        self._steps = max(1, min(64, BLOCK_ELEMENTS // max(1, size)))
        self._block: torch.Tensor | None = None
        self._number = -1
        self._last_step = -1
        self._shape = (len(streams), self._steps, size)
        self._options = {"device": device, "dtype": dtype}

    def _fill(self, number: int, block: torch.Tensor) -> None:
        """Draw block `number` of every trial. Filling releases the interpreter, so that threads run side by side."""

        parts = _PARTS.get(block.device.type, 1)

        def fill(job: tuple[Streams, int, torch.Tensor]) -> None:
            stream, part, out = job
            stream.normal("noise", number * parts + part, out)

        jobs = [
            (stream, part, out)
            for stream, own in zip(self._streams, block, strict=True)
            for part, out in enumerate(own.view(-1).tensor_split(parts))
        ]
        workers = torch.get_num_threads() if block.device.type == "cpu" else 1
        if workers == 1 or block.numel() < 1 << 14:
            for job in jobs:
                fill(job)
            return
        list(_pool(workers).map(fill, jobs))

    def draw(self, step: int) -> torch.Tensor:
        """Noise of `step` (0, 1, 2, ...): a view (R, P) that stays valid until the next call."""
        if step <= self._last_step and not all(stream.reproducible for stream in self._streams):
            raise RuntimeError(f"noise of step {step} was drawn before; secure noise is never used twice")
        self._last_step = step
        number, offset = divmod(step, self._steps)
        if number != self._number or self._block is None:
            if self._block is None:
                self._block = torch.empty(self._shape, **self._options)  # type: ignore[call-overload]
            self._fill(number, self._block)
            self._number = number
        return self._block[:, offset]


class TrialNoise:
    """Standard normals for trials that draw each at its own pace: the adaptive methods.

    The k-th draw of a trial is a function of its streams, the purpose, k and the size, whoever else draws when.

    No normal is given out twice. `drawn` counts each trial's draws and goes into checkpoints: set it back with
    `resume`.
    """

    def __init__(self, streams: Sequence[Streams], purpose: str, size: int, like: torch.Tensor) -> None:
        self._streams = streams
        self._purpose = purpose
        self._length = max(1, min(64, _TRIAL_BLOCK_ELEMENTS // max(1, size)))
        self._block = torch.empty(len(streams), self._length, size, dtype=like.dtype, device=like.device)
        self.drawn = [0] * len(streams)
        self._filled = [-1] * len(streams)

    def draw(self, trials: Sequence[int]) -> torch.Tensor:
        """One draw (A, size) for each of `trials` (distinct)."""
        places = []
        for trial in trials:
            number, place = divmod(self.drawn[trial], self._length)
            if number != self._filled[trial]:
                self._streams[trial].normal(self._purpose, number, self._block[trial])
                self._filled[trial] = number
            places.append(place)
            self.drawn[trial] += 1
        return self._block[torch.tensor(list(trials)), torch.tensor(places)]

    def resume(self, drawn: Sequence[int]) -> None:
        """Continue after `drawn` draws of each trial; secure streams then draw afresh."""
        self.drawn = list(drawn)
        self._filled = [-1] * len(self.drawn)
