"""Main memory that this process may still take, and a refusal of what is known to need more."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from dpsgd_cli.errors import DataError

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


def free_memory() -> int:
    """Return the free bytes: what the system can give without swapping, within the limit of a container.

    2^62 if the system does not report them.
    """
    found = [1 << 62]
    with suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, TypeError):
        # pages that hold copies of files can be taken, and SC_AVPHYS_PAGES leaves them out
        available = re.search(r"^MemAvailable: *(\d+) kB$", _SYSTEM.read_text(), re.MULTILINE)
        found.append(int(available[1]) * 1024)  # type: ignore[index]
    with suppress(OSError, ValueError):
        most, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        # as above, copies of files count as free
        files = re.findall(r"^(?:in)?active_file (\d+)$", (_GROUP / "memory.stat").read_text(), re.MULTILINE)
        found.append(max(0, most - used + sum(map(int, files))))
    return min(found)


def refuse_beyond_memory(needed: int, what: str, advice: str) -> None:
    """Raise DataError if `what` takes `needed` bytes of main memory, at the least, and fewer are free."""
    free = free_memory()
    if needed > free:
        raise DataError(
            f"{what} take at least {needed / _GIB:.1f} GiB of memory, and {free / _GIB:.1f} GiB are free; {advice}"
        )
