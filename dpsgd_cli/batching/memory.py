"""Memory of a training process: the allocator's thresholds, and how many rows and trials fit at once.

Larger batches are processed in pieces (`Table.chunks`), which changes sums by rounding only.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from dpsgd_cli.common.free_memory import free_memory
from dpsgd_cli.engine.packing import Pack, elements_per_row
from dpsgd_cli.noise.run import BLOCK_ELEMENTS

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_KEPT = 1 << 28
_MOST_KEPT = 1 << 30
_ELEMENTS_AT_ONCE = 1 << 26
_LEAST_ROWS = 16


def keep_freed_memory() -> bool:
    """Make the C library keep up to 1 GiB of freed memory for the next step instead of returning it to the system.

    Every step frees and allocates the same tensors. To get their pages from the system each time takes time (to measure
    it, run `python -m benchmarks.steps` with and without `--return-memory`). Returns True if the C library (glibc)
    accepted; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


def rows_that_fit(pack: Pack, x: Tensor) -> int:
    """Return how many rows per trial to process at once, at least 1, from a few synthetic rows `x` (B, ...).

    Computed from the model's shapes. The limit is a quarter of the free memory, and on a CPU 2^26 numbers at once,
    because more would only leave the caches.
    """
    on_gpu = x.device.type == "cuda"
    free = torch.cuda.mem_get_info(x.device)[0] if on_gpu else free_memory()
    elements = free // (4 * x.element_size())
    elements = elements if on_gpu else min(_ELEMENTS_AT_ONCE, elements)
    return max(1, elements // (pack.trials * elements_per_row(pack, x)))


def trials_that_fit(parameters: int, row: int, gpu: int | None) -> int:
    """Return how many trials may train together, at most 64 on a CPU and 4,096 on a GPU.

    Each trial has `parameters` numbers, and `row` numbers for each row of a batch. The limit is half of the total
    memory, free or not, so a sweep that is continued makes the same packs. A trial holds its weights, sums (which count
    twice), noise, optimizer state, average and two checkpoints. `gpu` is the number of a GPU, or None.
    """
    if gpu is not None:
        total = torch.cuda.get_device_properties(gpu).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    numbers = 11 * parameters + max(parameters, BLOCK_ELEMENTS) + _LEAST_ROWS * row
    return max(1, min(64 if gpu is None else 4096, total // 2 // (4 * numbers)))
