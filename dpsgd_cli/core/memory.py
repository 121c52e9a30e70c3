"""Memory of a training process: what the allocator keeps.

Not here: how many rows a step may hold (`trials.py`).
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_KEPT = 1 << 28
_MOST_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the C library to keep up to 1 GiB of freed memory for the next step, and not to return it to the system.

    Every step frees and takes the same tensors. Where each of them is fetched anew from the system, page by page,
    a step of the small networks of `benchmarks/step.py` takes a tenth to a fifth longer
    (`python benchmarks/step.py --return-memory`). Returns whether the C library (glibc) was asked; elsewhere nothing
    happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))
