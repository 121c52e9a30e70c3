"""Data: cards, readers, preprocessing and splits, behind three functions. Only feature extractors use tensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd_cli.data.dataset import Dataset, Outline, Rows
    from dpsgd_cli.data.preparation import outline, prepare, private_releases

__all__ = ["Dataset", "Outline", "Rows", "outline", "prepare", "private_releases"]

_MODULES = ("dataset", "preparation")


def __getattr__(name: str) -> Any:
    """Import `name` when it is first used: settings must load without NumPy."""
    if name in __all__:
        for module in _MODULES:
            found = importlib.import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
