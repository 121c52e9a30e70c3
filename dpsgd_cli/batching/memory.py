"""Memory of a training process: what the allocator keeps, and how many rows of a batch fit at once.

Batches larger than what fits are worked off in pieces (`Table.chunks`), which changes sums by rounding only.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from dpsgd_cli.engine.packing import Pack, elements_per_row
from dpsgd_cli.noise.run import BLOCK_ELEMENTS

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_KEPT = 1 << 28
_MOST_KEPT = 1 << 30
_ELEMENTS_AT_ONCE = 1 << 26
_LEAST_ROWS = 16


def keep_freed_memory() -> bool:
    """Ask the C library to keep up to 1 GiB of freed memory for the next step, and not to return it to the system.

    Every step frees and takes the same tensors; fetching each of them anew from the system, page by page, takes time
    (how much: `python benchmarks/step.py` with and without `--return-memory`). Returns whether the C library (glibc)
    was asked; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


def rows_that_fit(pack: Pack, x: Tensor) -> int:
    """How many rows a trial may hold at once, from a few rows `x` (B, ...) that are no records; at least 1.

    Counted from the model's shapes: no more than a quarter of the free memory is taken, and on a CPU no more than 2^26
    numbers at once, which only leave the caches.
    """
    on_gpu = x.device.type == "cuda"
    free = torch.cuda.mem_get_info(x.device)[0] if on_gpu else _free_here()
    elements = free // (4 * x.element_size())
    elements = elements if on_gpu else min(_ELEMENTS_AT_ONCE, elements)
    return max(1, elements // (pack.trials * elements_per_row(pack, x)))


def trials_that_fit(parameters: int, row: int, gpu: int | None) -> int:
    """How many trials of `parameters` numbers each, and `row` numbers for one row of a batch, may train together.

    From half of all memory, free or not, so that a sweep makes the same packs whenever it is continued. A trial
    holds its weights, sums (which count twice), noise, optimizer state, average and two checkpoints. At most 64 on a
    CPU, 4,096 on a GPU. `gpu` is the number of one, or None.
    """
    if gpu is not None:
        total = torch.cuda.get_device_properties(gpu).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    numbers = 11 * parameters + max(parameters, BLOCK_ELEMENTS) + _LEAST_ROWS * row
    return max(1, min(64 if gpu is None else 4096, total // 2 // (4 * numbers)))


def _free_here() -> int:
    """Bytes of main memory that are free; far more than there are where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62
