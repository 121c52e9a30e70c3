"""What may be read as a file: a pipe, a socket or a device would keep a command waiting for ever."""

from __future__ import annotations

import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def irregularity(path: Path) -> str | None:
    """Why `path` is not read, to follow its name; None where it is a file, a folder, or nothing at all."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return None
    return None if kind is None else f"is {kind}, not a file; write what it gives to a file, and name that"
