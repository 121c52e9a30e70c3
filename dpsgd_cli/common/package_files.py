"""Files as such: where those that ship with the package lie, and what may be read as a file at all.

Not here: reading cards (`data/catalog.py`), recipes (`recipe/loading.py`), or anything that a user writes.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

MODEL = "model.safetensors"
"""Its name in a result (`engine/bundle.py`)."""
_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def shipped(kind: Literal["datasets", "recipes"]) -> Path:
    """The folder of shipped `kind`: inside an installed package, else at the top of the checkout."""
    packaged = _PACKAGE / "shipped" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind


def irregularity(path: Path) -> str | None:
    """Why `path` is not read, to follow its name: a pipe, a socket or a device would keep a command waiting for ever.

    None where it is a file, a folder, or nothing at all.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return None
    return None if kind is None else f"is {kind}, not a file; write what it gives to a file, and name that"
