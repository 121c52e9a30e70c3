"""Memory of a training process: what the allocator keeps, and how many rows of a batch fit at once.

Batches larger than what fits are worked off in pieces (`Table.chunks`), which changes sums by rounding only.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from dpsgd_cli.core.clipping import Clipping, sum_clipped
from dpsgd_cli.core.noise import BLOCK_ELEMENTS
from dpsgd_cli.core.packing import Pack, elements_per_row

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_KEPT = 1 << 28
_MOST_KEPT = 1 << 30
_ELEMENTS_AT_ONCE = 1 << 26
_SHARE_OF_GPU = 0.7
_PROBES = (16, 32)


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

    On a CPU, counted from the model's shapes: more than 2^26 numbers at once only leave the caches, and no more than
    a quarter of the free memory is taken. On a GPU, measured: what 32 rows take beyond 16 is a row's need, and 0.7
    of what is free is given to rows.
    """
    if x.device.type == "cuda":
        return _measured_on_gpu(pack, x)
    elements = min(_ELEMENTS_AT_ONCE, _free_here() // (4 * x.element_size()))
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
    numbers = 11 * parameters + max(parameters, BLOCK_ELEMENTS) + _PROBES[0] * row
    return max(1, min(64 if gpu is None else 4096, total // 2 // (4 * numbers)))


def _free_here() -> int:
    """Bytes of main memory that are free; far more than there are where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 1 << 62


def _measured_on_gpu(pack: Pack, x: Tensor) -> int:
    probes = [x.repeat(-(-count // len(x)), *[1] * (x.dim() - 1))[:count] for count in _PROBES]
    for rows in probes:
        # what libraries keep from their first call on is no row's need, nor are the runs that choose a form
        _peak(pack, rows)
    few, more = (_peak(pack, rows) for rows in probes)
    row = max(1, (more - few) // (_PROBES[1] - _PROBES[0]))
    rest = max(0, few - _PROBES[0] * row)
    free, _ = torch.cuda.mem_get_info(x.device)
    free += torch.cuda.memory_reserved(x.device) - torch.cuda.memory_allocated(x.device)
    return max(1, int(_SHARE_OF_GPU * free - rest) // row)


def _peak(pack: Pack, x: Tensor) -> int:
    """Bytes that the clipped sums of rows `x` take at most; the pack is left as it was, but for its sums."""
    torch.cuda.reset_peak_memory_stats(x.device)
    before = torch.cuda.memory_allocated(x.device)
    clipping = Clipping(torch.ones(1, pack.trials, device=x.device, dtype=pack.values.dtype))
    labels = torch.zeros(1, len(x), device=x.device)
    sum_clipped(pack, (x[None], labels, None), lambda outputs, _: outputs.flatten(2).square().sum(dim=2), clipping)
    torch.cuda.synchronize(x.device)
    return int(torch.cuda.max_memory_allocated(x.device)) - before
