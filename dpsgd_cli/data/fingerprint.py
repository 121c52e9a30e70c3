"""Fingerprints of files: SHA-256 and other facts, read in pieces, and remembered while the process runs."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsgd_cli.data import memory

_SETTLED_NS = 2 * 10**9

_answers: dict[tuple[object, ...], dict[str, Any]] = {}
"""Answers that this process remembers."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the records in memory that stand for it."""
    held = memory.at(path)
    if held is not None:
        return held.sha256
    return str(found(path, "sha256", lambda: {"sha256": _read(path)})["sha256"])


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def found(path: Path, question: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` finds in the file; it is called again in this process only if the file has changed.

    `question` names what is asked. A file counts as unchanged while its path, size, inode and times of modification and
    of change (to the nanosecond) are the same. Answers about a file that was written within the last two seconds, or
    while it was read, are not kept, since another write could leave the same modification time.
    """
    status = path.stat()
    state = (str(path.resolve()), question, *_kept_facts(status))
    if state in _answers:
        return _answers[state]
    answer = read()
    if time.time_ns() - status.st_mtime_ns >= _SETTLED_NS and _kept_facts(path.stat()) == _kept_facts(status):
        _answers[state] = answer
    return answer


def _kept_facts(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
