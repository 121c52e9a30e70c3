"""How long does noise take, all told, and how much memory?

    python benchmarks/noise.py           # nanoseconds a number, of draws and of releases, one thread

A release is what a training step does with its sums: digits, rounding, integer addition and float64 back. `numpy` is a
generator that is neither secure nor exact, for scale. Peaks of memory are of NumPy's allocations (tracemalloc), beside
the sums themselves.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch

from dpsgd_cli.engine import digits
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.noise.run import BLOCK_ELEMENTS, Grid, NoiseSource

SIZES = (1, 1000, 61_000, 1_000_000, 8_000_000)
ROUNDS = 7


def nanoseconds(run: Callable[[], object], size: int) -> float:
    """The fastest of a few rounds, over `size`."""
    run()
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return min(taken) / size * 1e9


def mebibytes(run: Callable[[], object]) -> float:
    run()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def released(stream: Streams, size: int) -> Callable[[], None]:
    """64 steps at once where digits are drawn in blocks of steps, else one."""
    source = NoiseSource([stream], size, torch.device("cpu"), torch.float32)
    sums, scale = torch.ones(1, size, dtype=torch.float64), torch.ones(1, 1)
    grid, steps = Grid.of(size, 60_000, [1.0]), iter(range(1 << 30))

    def run() -> None:
        for _ in range(64 if size < BLOCK_ELEMENTS else 1):
            source.add(sums, next(steps), scale, grid)

    return run


def main() -> None:
    torch.set_num_threads(1)
    print("| numbers | digits, ns | release without a seed, ns | its MiB | release with a seed, ns | numpy, ns |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        out, plain, generator = np.empty(size, dtype=np.int64), np.empty(size), np.random.default_rng(0)
        many = size * (64 if size < BLOCK_ELEMENTS else 1)
        secure = released(SecureStreams(), size)
        told = [
            nanoseconds(lambda out=out: digits.fill(out, digits.fresh()), size),  # type: ignore[misc]
            nanoseconds(secure, many),
            mebibytes(secure),
            nanoseconds(released(SeededStreams(0), size), many),
            nanoseconds(lambda plain=plain, own=generator: own.standard_normal(out=plain), size),  # type: ignore[misc]
        ]
        print(f"| {size:,} | " + " | ".join(f"{one:,.1f}" for one in told) + " |")


if __name__ == "__main__":
    main()
