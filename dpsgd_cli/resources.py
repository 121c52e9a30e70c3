"""Where the files that ship with the package lie: data set cards and recipes.

Not here: reading them (`data/catalog.py`, `recipe/loading.py`), or anything that a user writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def shipped(kind: Literal["datasets", "recipes"]) -> Path:
    """The folder of shipped `kind`: inside an installed package, else at the top of the checkout."""
    packaged = _PACKAGE / "shipped" / kind
    return packaged if packaged.is_dir() else _PACKAGE.parent / kind
