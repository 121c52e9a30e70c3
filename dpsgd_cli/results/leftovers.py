"""Names for files and folders in the making, from which one can tell later whether their maker was killed.

Not here: what is written (`store.py`, `checkpoint.py`).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

_MARK = re.compile(r"\.writing-(?P<host>[A-Za-z0-9-]*)_(?P<pid>\d+)_[0-9a-f]{8}$")
_A_DAY = 86_400.0


def hidden_name(path: Path) -> Path:
    """A name beside `path` that no other writer has; it says which process on which machine it belongs to."""
    return path.with_name(f".{path.name.lstrip('.')}.writing-{_host()}_{os.getpid()}_{secrets.token_hex(4)}")


def sweep_up(folder: Path) -> None:
    """Remove what killed processes left in the making: theirs of this machine at once, others' after a day."""
    for left in folder.glob(".*.writing-*"):
        if _is_abandoned(left):
            _remove(left)


def remove(path: Path) -> bool:
    """Remove what this process and killed ones named by `hidden_name(path)`; returns whether there was any."""
    names = path.parent.glob(f".{path.name.lstrip('.')}.writing-*")
    found = [left for left in names if _is_ours(left) or _is_abandoned(left)]
    for left in found:
        _remove(left)
    return bool(found)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_ours(path: Path) -> bool:
    mark = _MARK.search(path.name)
    return mark is not None and (mark["host"], int(mark["pid"])) == (_host(), os.getpid())


def _is_abandoned(path: Path) -> bool:
    mark = _MARK.search(path.name)
    if mark is None:
        return False
    if mark["host"] == _host():
        return not _is_alive(int(mark["pid"]))
    try:
        return time.time() - path.stat().st_mtime > _A_DAY
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())
