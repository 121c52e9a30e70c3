"""Paths: the folders of shipped files, the user's cache folder, and a check that a path is a regular file.

Cards are read in `data/cards.py`, recipes in `recipe/loading.py`.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Literal

import platformdirs

MODEL = "model.safetensors"
"""Name of the file of models in a result (`engine/bundle.py`)."""
_PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def shipped(kind: Literal["datasets", "recipes"]) -> Path:
    """Return the folder of shipped `kind`: inside an installed package, else at the top of the checkout."""
    packaged = _PACKAGE / "shipped" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind


def cache_folder() -> Path:
    """Return this user's cache folder, which may not exist yet."""
    return Path(platformdirs.user_cache_dir("dpsgd"))


def irregularity(path: Path) -> str | None:
    """Return why `path` is not read, to follow its name: a pipe, a socket or a device could block a command for ever.

    Return None if it is a file, a folder, or does not exist.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return None
    return None if kind is None else f"is {kind}, not a file; write what it gives to a file, and name that"


def files_of(folder: Path) -> list[str]:
    """Return the names of the files of a folder that a model of transformers or a tokenizer is made from."""
    kinds = ("*.json", "*.safetensors", "*.txt", "*.model")
    return sorted({path.name for kind in kinds for path in folder.glob(kind) if path.is_file()})
