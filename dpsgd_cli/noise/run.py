"""Noise of releases: without a seed on a public grid, with a seed standard normals from each trial's own stream.

`add_noise` is the only function that adds Gaussian noise to a sum. `NoiseSource`, `TrialNoise` and `drawn` return
unscaled noise. Seeded streams give float normals (for experiments only: the floating-point grid is visible). All other
streams give int64 digits (`digits.py`, with the theorem), which no other function can mistake for noise. Exact discrete
Laplace noise and choices are in `discrete.py`. The method sets the scale of the noise; `accounting/` computes its
price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.engine import digits, discrete
from dpsgd_cli.engine.precision import MOST_ROWS, excess
from dpsgd_cli.engine.streams import SecureStreams, Streams

BLOCK_ELEMENTS = 1 << 19
_TRIAL_BLOCK_ELEMENTS = 1 << 14
# each block of a seeded trial is drawn as this many streams, which CPU cores fill in parallel; a GPU uses one
_PARTS = {"cpu": 4}
_LARGEST = 62
"""Rounded sums are clipped to +-2^62, which leaves room for noise in 64 bits. Clipping increases no distance."""


@dataclass(frozen=True)
class Grid:
    """The public grid of a release: a step of sigma `raised` 2^-`bits`.

    Guarantee: let the sums be of `records` float64 vectors of L2 norm at most S, with `numbers` coordinates in all, and
    let z be a noise multiplier. Then noise of z S `raised` on the grid is a Gaussian mechanism of noise multiplier z or
    more. Proof: a record moves the computed sum by at most S (1 + e), with e = `excess` + 2^-51 records
    (`precision.py`, and two roundings of S / q on either side). Rounding to integers moves each coordinate by at most
    a step q (in general, `moved` steps). So S' = S (1 + e) + q `moved` sqrt(`numbers`). As q = z S raised 2^-bits,
    z S' <= z S raised for raised = (1 + e) / (1 - z 2^-bits moved sqrt(numbers)).

    >>> f"{Grid.of(10**6, 60_000, [1.0]).raised - 1:.0e}"
    '2e-07'
    """

    bits: int
    raised: float

    @classmethod
    def of(cls, numbers: int, records: int, multipliers: Iterable[float], moved: float = 1.0) -> Grid:
        """Return the grid for releases with noise `multipliers`.

        `moved` is the number of steps by which rounding moves a coordinate. Raises ValueError if the grid is too
        coarse, as for noise of 2^20 times S and 10^9 coordinates.
        """
        known = sorted(multipliers)
        # sums beyond 2^20 times the noise need room for larger integers
        bits = min(digits.BITS, _LARGEST - math.ceil(math.log2(max(records / known[0], 1.0)))) if known[0] > 0 else 0
        coarse = known[-1] * 2.0**-bits * moved * math.sqrt(numbers)
        if not 0 < known[0] <= known[-1] < math.inf or bits < 1 or coarse > 0.5:
            raise ValueError(
                f"no grid holds sums of {records} records, {numbers} numbers and noise multipliers {known[0]:g} to"
                f" {known[-1]:g}"
            )
        summed = excess(records, MOST_ROWS) + 2.0**-51 * records
        return cls(bits, (1 + summed) / (1 - coarse))

    def steps(self, scale: Tensor) -> Tensor:
        """Return the grid step q, float64, for noise of standard deviation `scale`."""
        return scale.to(torch.float64) * (self.raised * 2.0**-self.bits)

    def shortened(self, fresh: Tensor) -> Tensor:
        """Return floor(N 2^bits) from the digits floor(N 2^42)."""
        return fresh if self.bits == digits.BITS else fresh >> (digits.BITS - self.bits)


def is_secure(streams: Sequence[Streams]) -> bool:
    """Return True if noise is drawn as digits, that is unless all streams have a seed."""
    return not all(stream.reproducible for stream in streams)


def add_noise(sums: Tensor, fresh: Tensor, scale: Tensor, grid: Grid | None) -> None:
    """Add noise of standard deviation `scale` to `sums` in place; all (R, P) or broadcastable, `sums` float64.

    With digits (int64 `fresh`), the sums become (y + 1/2) q, with y = rint(sums / q) + `fresh` in integers
    (`digits.py`). With float normals, which need no `grid`, they become sums + scale fresh. Rounding to the model's
    precision comes afterwards, as post-processing.
    """
    if sums.dtype != torch.float64:
        raise ValueError(f"noise is added to float64 sums, not {sums.dtype}")
    if fresh.is_floating_point():
        sums.addcmul_(fresh, scale)
        return
    if grid is None:
        raise ValueError("noise without a seed needs the grid that it is released on")
    put_on_grid(sums, grid.shortened(fresh), grid.steps(scale))


def put_on_grid(sums: Tensor, noise: Tensor, step: Tensor) -> None:
    """Set sums = (rint(sums / step) + noise + 1/2) step; `noise` int64, `step` float64 above 0, broadcastable.

    The addition is one of integers, hence exact. NaN sums count as 0. Raises ValueError for an invalid step on a CPU; a
    GPU gives NaN instead.
    """
    valid = (step > 0) & (step < math.inf)
    if step.is_cpu and not bool(valid.all()):
        raise ValueError("noise without a seed needs a finite standard deviation above 0")
    # reading a GPU value would wait for the GPU: there, a sum without noise becomes NaN
    step = step if step.is_cpu else torch.where(valid, step, math.nan)
    nearest = torch.div(sums, step).nan_to_num_(nan=0.0).round_().clamp_(-(2.0**_LARGEST), 2.0**_LARGEST)
    released = nearest.to(torch.int64).add_(noise)
    sums.copy_(released).add_(0.5).mul_(step)


def drawn(stream: Streams, purpose: str, counter: int, shape: Sequence[int]) -> Tensor:
    """Draw the unscaled noise of one release: float64 normals with a seed, digits without."""
    dtype = torch.int64 if is_secure([stream]) else torch.float64
    return stream.normal(purpose, counter, torch.empty(tuple(shape), dtype=dtype))


def gaussian(
    stream: Streams, purpose: str, counter: int, exact: np.ndarray, mechanism: GaussianSum, records: int
) -> np.ndarray:
    """Return `exact` plus Gaussian noise of the mechanism's noise multiplier times its sensitivity; float64.

    `exact` is a sum over at most `records` (public) records.
    """
    made = torch.from_numpy(np.array(exact, dtype=np.float64))
    scale = torch.tensor(mechanism.noise_multiplier * mechanism.sensitivity, dtype=torch.float64)
    grid = Grid.of(made.numel(), records, [mechanism.noise_multiplier]) if is_secure([stream]) else None
    add_noise(made, drawn(stream, purpose, counter, made.shape), scale, grid)
    return made.numpy()


def laplace(
    stream: Streams, purpose: str, counter: int, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int
) -> np.ndarray:
    """Return `exact` plus Laplace noise of scale `sensitivity` / `epsilon`, float64: epsilon-DP.

    `sensitivity` is in the L1 norm; one record changes at most `changed` of the numbers.
    """
    exact = np.asarray(exact, dtype=np.float64)
    if not is_secure([stream]):
        normals = stream.normal(purpose, counter, torch.empty(*exact.shape, 4, dtype=torch.float64)).numpy()
        return np.asarray(exact + laplace_of(normals) * (sensitivity / epsilon))
    unit = Fraction(sensitivity) / discrete.drawn_epsilon(epsilon, changed)
    coins = stream.coins(purpose, counter)
    made = [discrete.on_grid(float(one), unit) + discrete.laplace(coins) for one in exact.ravel()]
    return np.array([float(one * unit / 2**discrete.BITS) for one in made]).reshape(exact.shape)


def laplace_of(normals: np.ndarray) -> np.ndarray:
    """Return Laplace variates (...) of scale 1 from standard normals (..., 4): a difference of two exponentials."""
    squares = normals**2
    return np.asarray((squares[..., 0] + squares[..., 1] - squares[..., 2] - squares[..., 3]) / 2)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Return threads that are kept between blocks: to start them for every block costs more than the block."""
    return ThreadPoolExecutor(workers, thread_name_prefix="noise")


class NoiseSource:
    """Unscaled noise of shape (R, P) by step number, drawn in blocks of steps: normals, or digits without a seed.

    Guarantee: the draw of (trial, step) depends only on that trial's streams, the step and P, and no two (trial, step)
    pairs share a number. The block length is a function of P alone, so packs of any size agree. With seeded streams, a
    repeated step gives the same draw. With secure streams, steps must be drawn once each, in increasing order; a
    repetition raises RuntimeError. `apart`: no trial has a seed, so several processes may draw noise, each for numbers
    of its own.
    """

    def __init__(self, streams: Sequence[Streams], size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._streams = streams
        self.secure = is_secure(streams)
        self.apart = not any(stream.reproducible for stream in streams)
        self._steps = max(1, min(64, BLOCK_ELEMENTS // max(1, size)))
        self._block: Tensor | None = None
        self._number = -1
        self._last_step = -1
        self._shape = (len(streams), self._steps, size)
        self._options = {"device": device, "dtype": torch.int64 if self.secure else dtype}

    def _fill(self, number: int, block: Tensor) -> None:
        """Draw block `number` of every trial, in threads: filling releases the interpreter lock."""

        parts = 1 if self.secure else _PARTS.get(block.device.type, 1)

        def fill(job: tuple[Streams, int, Tensor]) -> None:
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

    def _begin(self, step: int) -> None:
        if step <= self._last_step and self.secure:
            raise RuntimeError(f"noise of step {step} was drawn before; secure noise is never used twice")
        self._last_step = step

    def draw(self, step: int) -> Tensor:
        """Return the noise of `step` (0, 1, 2, ...): a view (R, P) that is valid until the next call."""
        self._begin(step)
        number, offset = divmod(step, self._steps)
        if number != self._number or self._block is None:
            if self._block is None:
                self._block = torch.empty(self._shape, **self._options)  # type: ignore[call-overload]
            self._fill(number, self._block)
            self._number = number
        return self._block[:, offset]

    def add(self, sums: Tensor, step: int, scale: Tensor, grid: Grid | None, own: slice | None = None) -> None:
        """Add the noise of `step` to sums (R, P) by `add_noise`; large sums in pieces, whatever their size.

        The pieces take 4 MiB on a CPU and about 150 MiB on a device. With `own`, only these numbers of the sums,
        counted trial by trial, get noise, from this process's operating system (`processes.py`). Raises ValueError for
        `own` with a seed.
        """
        if own is not None and not self.apart:
            raise ValueError("noise with a seed is drawn by one process, as streams say")
        if own is None and (self._steps > 1 or not self.secure):
            add_noise(sums, self.draw(step), scale, grid)
            return
        self._begin(step)
        (trials, size), at_once = sums.shape, digits.AT_ONCE[sums.is_cpu]
        room = torch.empty(min(at_once, size), dtype=torch.int64, device=sums.device)
        every = scale.expand(trials, scale.shape[1])
        for trial, stream in enumerate(self._streams if own is None else [SecureStreams()] * trials):
            first, last = (0, size) if own is None else (own.start - trial * size, own.stop - trial * size)
            for piece, start in enumerate(range(max(0, first), min(size, last), at_once)):
                part = slice(start, min(start + at_once, last, size))
                counter = step * -(-size // at_once) + piece
                fresh = stream.normal("noise", counter, room[: part.stop - part.start])
                add_noise(sums[trial, part], fresh, every[trial, part] if every.shape[1] > 1 else every[trial], grid)


class TrialNoise:
    """Unscaled noise for adaptive methods, whose trials draw independently of each other.

    The k-th draw of a trial is a function of its streams, the purpose, k and the size alone. No number is used twice.
    `drawn` counts each trial's draws and is stored in checkpoints; `resume` restores it.
    """

    def __init__(self, streams: Sequence[Streams], purpose: str, size: int, like: Tensor) -> None:
        self._streams = streams
        self._purpose = purpose
        self._length = max(1, min(64, _TRIAL_BLOCK_ELEMENTS // max(1, size)))
        dtype = torch.int64 if is_secure(streams) else like.dtype
        self._block = torch.empty(len(streams), self._length, size, dtype=dtype, device=like.device)
        self.drawn = [0] * len(streams)
        self._filled = [-1] * len(streams)

    def draw(self, trials: Sequence[int]) -> Tensor:
        """Return one draw for each of `trials` (distinct), shape (A, size)."""
        places = []
        for trial in trials:
            number, place = divmod(self.drawn[trial], self._length)
            if number != self._filled[trial]:
                self._streams[trial].normal(self._purpose, number, self._block[trial])
                self._filled[trial] = number
            places.append(place)
            self.drawn[trial] += 1
        return self._block[torch.tensor(list(trials)), torch.tensor(places)]

    def coins(self, trials: Sequence[int]) -> list[discrete.Coins]:
        """Return random coins for each of `trials`; they count as one draw."""
        found = [self._streams[trial].coins(self._purpose, self.drawn[trial]) for trial in trials]
        for trial in trials:
            self.drawn[trial] += 1
        return found

    def resume(self, drawn: Sequence[int]) -> None:
        """Continue after `drawn` draws of each trial; secure streams then draw new numbers."""
        self.drawn = list(drawn)
        self._filled = [-1] * len(self.drawn)
