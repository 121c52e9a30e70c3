"""Arrays in this user's cache folder, by a hash of what they were made from.

They may be private (features of records), so only their owner may read them, and nothing publishes
them. A cache that cannot be read or written costs time, nothing else. Data sets are cached by `data/card_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpsgd_cli.common.package_files import cache_folder

MOST_BYTES = 4_000_000_000


def place(folder: str, told: object, arrays: Sequence[np.ndarray]) -> Path:
    """Return the file of the array that is made from `told` (plain values) and `arrays`."""
    name = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for array in arrays:
        name.update(np.ascontiguousarray(array).data)
    return cache_folder() / folder / f"{name.hexdigest()[:32]}.npy"


def load(path: Path) -> np.ndarray | None:
    """Return the array at `path`; None if there is none or it cannot be read."""
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError):
        return None


def keep(path: Path, array: np.ndarray) -> None:
    """Write `array` for the next run, unless it is too large or cannot be written."""
    if array.nbytes > MOST_BYTES:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}.npy")
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
            np.save(stream, array)
        os.replace(temporary, path)
    except OSError:
        return
