"""How long does 2 x 2 max-pooling at every position take, forward and backward, beside PyTorch's own?

    python benchmarks/pooling.py

In turns in one process, on as many threads as torch takes; medians, ratios of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.engine.pooling import MaxPool

SHAPES = ((256, 16, 14, 14), (256, 32, 5, 5), (64, 32, 32, 32))


def seconds(pool: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """One forward and one backward pass."""
    begun = time.perf_counter()
    pool(x).sum().backward()
    return time.perf_counter() - begun


def main() -> None:
    torch.manual_seed(0)
    print("| input | torch, ms | dpsgd, ms | dpsgd over torch |\n| --- | ---: | ---: | ---: |")
    for shape in SHAPES:
        x, ours = torch.randn(shape, requires_grad=True), MaxPool()
        rounds = [(seconds(lambda x: F.max_pool2d(x, 2, 1), x), seconds(ours, x)) for _ in range(30)]
        own, new = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
        print(f"| {' x '.join(map(str, shape))} | {own:.2f} | {new:.2f} | {new / own:.2f} |")


if __name__ == "__main__":
    main()
