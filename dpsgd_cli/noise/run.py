"""Noise of releases: on a public grid without a seed, standard normals of a stream of its own for each trial with one.

`add_noise` is the only place where Gaussian noise meets a sum. What `NoiseSource`, `TrialNoise` and `drawn` give is
unscaled: float normals of seeded streams (an experiment, whose grid shows), int64 digits of all others
(`engine/digits.py`, with the theorem), which no other function can take for noise. Laplace noise and choices are in
`engine/discrete.py`.

Not here: how much noise (the method scales it) and what it costs (`accounting/`).
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
from dpsgd_cli.engine.streams import Streams

BLOCK_ELEMENTS = 1 << 19
_TRIAL_BLOCK_ELEMENTS = 1 << 14
# each block of a seeded trial is drawn as this many streams, which cores fill side by side; a GPU fills one by itself
_PARTS = {"cpu": 4}
_AT_ONCE = 1 << 16
"""Coordinates of large sums that get digits at once, so that their number takes no memory."""
_LARGEST = 62
"""Rounded sums are clipped to +-2^62, which leaves room for noise in 64 bits; clipping moves no two apart."""


@dataclass(frozen=True)
class Grid:
    """The public grid of a release: a step of sigma `raised` 2^-`bits`.

    Guarantee: with sums of `records` float64 vectors of L2 norm at most S, `numbers` coordinates in all and a
    `multiplier` z, noise of z S `raised` on the grid is a Gaussian mechanism of noise multiplier z or more. Proof: a
    record moves the computed sum by S (1 + e) at most, with e = `excess` + 2^-51 records (`engine/precision.py`, and
    two roundings of S / q on either side), and rounding to integers moves each coordinate by a step q at most. So S' =
    S (1 + e) + q `moved` sqrt(`numbers`), and z S' <= z S raised for raised = (1 + e) / (1 - z 2^-bits moved
    sqrt(numbers)), as q = z S raised 2^-bits.

    >>> f"{Grid.of(10**6, 60_000, [1.0]).raised - 1:.0e}"
    '2e-07'
    """

    bits: int
    raised: float

    @classmethod
    def of(cls, numbers: int, records: int, multipliers: Iterable[float], moved: float = 1.0) -> Grid:
        """The grid of releases of noise `multipliers`. `moved`: steps that rounding moves a coordinate by.

        Raises ValueError where the grid is too coarse: noise of 2^20 times S and 10^9 coordinates, say.
        """
        known = sorted(multipliers)
        # beyond 2^20 of the noise, sums need room for larger integers
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
        """q, float64, of noise of standard deviation `scale`."""
        return scale.to(torch.float64) * (self.raised * 2.0**-self.bits)

    def shortened(self, fresh: Tensor) -> Tensor:
        """floor(N 2^bits) of the digits floor(N 2^42)."""
        return fresh if self.bits == digits.BITS else fresh >> (digits.BITS - self.bits)


def is_secure(streams: Sequence[Streams]) -> bool:
    """Whether noise is drawn as digits: unless a seed can repeat the noise of all trials."""
    return not all(stream.reproducible for stream in streams)


def add_noise(sums: Tensor, fresh: Tensor, scale: Tensor, grid: Grid | None) -> None:
    """sums += noise of standard deviation `scale`, in place; all (R, P) or broadcastable, `sums` float64.

    Of digits (`fresh` int64) the sums become (y + 1/2) q, y = rint(sums / q) + `fresh` in integers
    (`engine/digits.py`). Of float normals, which need no `grid`, they become sums + scale fresh. Rounding to the
    model's precision comes afterwards, as post-processing.
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
    """sums = (rint(sums / step) + noise + 1/2) step: `noise` int64, `step` float64 above 0, broadcastable.

    The addition is one of integers, hence exact. Sums that are no number count as 0.
    """
    valid = (step > 0) & (step < math.inf)
    if step.is_cpu and not bool(valid.all()):
        raise ValueError("noise without a seed needs a finite standard deviation above 0")
    # to ask a GPU would be to wait for it: there, what has no noise is no number
    step = step if step.is_cpu else torch.where(valid, step, math.nan)
    nearest = torch.div(sums, step).nan_to_num_(nan=0.0).round_().clamp_(-(2.0**_LARGEST), 2.0**_LARGEST)
    released = nearest.to(torch.int64).add_(noise)
    sums.copy_(released).add_(0.5).mul_(step)


def drawn(stream: Streams, purpose: str, counter: int, shape: Sequence[int]) -> Tensor:
    """Noise of one release, unscaled: float64 normals with a seed, digits without."""
    dtype = torch.int64 if is_secure([stream]) else torch.float64
    return stream.normal(purpose, counter, torch.empty(tuple(shape), dtype=dtype))


def gaussian(
    stream: Streams, purpose: str, counter: int, exact: np.ndarray, mechanism: GaussianSum, records: int
) -> np.ndarray:
    """A statistic with Gaussian noise of the mechanism's multiplier times its sensitivity; float64, shaped as `exact`.

    `exact` is a sum over `records` (a public number, or more).
    """
    made = torch.from_numpy(np.array(exact, dtype=np.float64))
    scale = torch.tensor(mechanism.noise_multiplier * mechanism.sensitivity, dtype=torch.float64)
    grid = Grid.of(made.numel(), records, [mechanism.noise_multiplier]) if is_secure([stream]) else None
    add_noise(made, drawn(stream, purpose, counter, made.shape), scale, grid)
    return made.numpy()


def laplace(
    stream: Streams, purpose: str, counter: int, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int
) -> np.ndarray:
    """Numbers with Laplace noise of scale `sensitivity` / `epsilon`, float64 of the shape of `exact`: epsilon-DP.

    `sensitivity` is of the L1 norm, and one record changes at most `changed` of the numbers.
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
    """Laplace variates of scale 1 (...) from standard normals (..., 4): a difference of two exponentials."""
    squares = normals**2
    return np.asarray((squares[..., 0] + squares[..., 1] - squares[..., 2] - squares[..., 3]) / 2)


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that wait between blocks: starting some for every block costs more than the block."""
    return ThreadPoolExecutor(workers, thread_name_prefix="noise")


class NoiseSource:
    """Unscaled noise of shape (R, P) by step number, drawn in blocks of steps: normals, or digits without a seed.

    Guarantee: the draw of (trial, step) depends on that trial's streams, the step and P only, and no two
    (trial, step) pairs share a number. The block length is a function of P alone, so packs of any size
    agree. With seeded streams a step can be asked for again, and gives the same draw; with secure streams
    steps must be asked for in increasing order, once each, and a repetition raises RuntimeError.
    """

    def __init__(self, streams: Sequence[Streams], size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._streams = streams
        self.secure = is_secure(streams)
        self._steps = max(1, min(64, BLOCK_ELEMENTS // max(1, size)))
        self._block: Tensor | None = None
        self._number = -1
        self._last_step = -1
        self._shape = (len(streams), self._steps, size)
        self._options = {"device": device, "dtype": torch.int64 if self.secure else dtype}

    def _fill(self, number: int, block: Tensor) -> None:
        """Draw block `number` of every trial. Filling releases the interpreter, so that threads run side by side."""

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
        """Noise of `step` (0, 1, 2, ...): a view (R, P) that stays valid until the next call."""
        self._begin(step)
        number, offset = divmod(step, self._steps)
        if number != self._number or self._block is None:
            if self._block is None:
                self._block = torch.empty(self._shape, **self._options)  # type: ignore[call-overload]
            self._fill(number, self._block)
            self._number = number
        return self._block[:, offset]

    def add(self, sums: Tensor, step: int, scale: Tensor, grid: Grid | None) -> None:
        """`add_noise` of `step` on sums (R, P); of large ones piece by piece, in 4 MiB whatever their size."""
        if self._steps > 1 or not self.secure:
            add_noise(sums, self.draw(step), scale, grid)
            return
        self._begin(step)
        room = torch.empty(_AT_ONCE, dtype=torch.int64, device=sums.device)
        every = scale.expand(len(sums), scale.shape[1])
        for trial, stream in enumerate(self._streams):
            for piece, start in enumerate(range(0, sums.shape[1], _AT_ONCE)):
                own = sums[trial, start : start + _AT_ONCE]
                counter = step * -(-sums.shape[1] // _AT_ONCE) + piece
                fresh = stream.normal("noise", counter, room[: len(own)])
                wide = every[trial, start : start + _AT_ONCE] if every.shape[1] > 1 else every[trial]
                add_noise(own, fresh, wide, grid)


class TrialNoise:
    """Unscaled noise for trials that draw each at its own pace: the adaptive methods.

    The k-th draw of a trial is a function of its streams, the purpose, k and the size, whoever else draws when.

    No number is given out twice. `drawn` counts each trial's draws and goes into checkpoints: set it back with
    `resume`.
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

    def coins(self, trials: Sequence[int]) -> list[discrete.Coins]:
        """Coins in the place of one draw for each of `trials`."""
        found = [self._streams[trial].coins(self._purpose, self.drawn[trial]) for trial in trials]
        for trial in trials:
            self.drawn[trial] += 1
        return found

    def resume(self, drawn: Sequence[int]) -> None:
        """Continue after `drawn` draws of each trial; secure streams then draw afresh."""
        self.drawn = list(drawn)
        self._filled = [-1] * len(self.drawn)
