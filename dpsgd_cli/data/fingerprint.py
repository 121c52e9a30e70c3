"""Fingerprints of files: SHA-256 and other facts, read in pieces, and remembered until the file changes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.data import memory

_AT_ONCE = 1 << 24
_LARGE = 1 << 26
_SETTLED_NS = 2 * 10**9

Look = Callable[[int, memoryview], None]
_answers: dict[tuple[object, ...], dict[str, Any]] = {}
"""Answers that this process remembers."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, or of the records in memory that stand for it."""
    held = memory.at(path)
    if held is not None:
        return held.sha256
    return str(found(path, "sha256", lambda: {"sha256": read_through(path)})["sha256"])


def read_through(path: Path, look: Look | None = None) -> str:
    """Read a file once and return its SHA-256. `look(offset, piece)` gets all of it in order, in pieces of 16 MiB."""
    digest, room, offset = hashlib.sha256(), bytearray(_AT_ONCE), 0
    with path.open("rb") as file:
        while count := file.readinto(room):
            piece = memoryview(room)[:count]
            digest.update(piece)
            if look is not None:
                look(offset, piece)
            offset += count
    return digest.hexdigest()


def found(path: Path, question: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` finds in the file, as JSON values; it is called again only if the file has changed.

    `question` names what is asked. A file counts as unchanged while its path, size, inode and times of modification and
    of change (to the nanosecond) are the same. Answers about files of 64 MiB and more are kept in the user's cache
    folder. Answers about a file that was written within the last two seconds, or while it was read, are not kept at
    all, since another write could leave the same modification time.
    """
    status = path.stat()
    state = (str(path.resolve()), question, *_kept_facts(status))
    if time.time_ns() - status.st_mtime_ns < _SETTLED_NS:
        return read()
    if state not in _answers:
        place = _place(state) if status.st_size >= _LARGE else None
        answer = None if place is None else _load(place)
        if answer is None:
            answer = read()
            if _kept_facts(path.stat()) != _kept_facts(status):
                return answer  # of a file that was written meanwhile
            if place is not None:
                _keep(place, answer)
        _answers[state] = answer
    return _answers[state]


def _kept_facts(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _place(state: tuple[object, ...]) -> Path:
    name = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    return cache_folder() / "files" / f"{name}.json"


def _load(place: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None


def _keep(place: Path, answer: dict[str, Any]) -> None:
    """Write the answer to the cache folder. If that fails, later calls only take longer, so errors are ignored."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(answer), encoding="utf-8")
        temporary.replace(place)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
