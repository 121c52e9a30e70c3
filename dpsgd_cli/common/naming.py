"""Late imports of `module:name`, so that the schema can name code that it may not import."""

from __future__ import annotations

import importlib
from typing import Any


def named(name: str) -> Any:
    """Return the attribute `name` of `module`, given as `module:name`; import the module."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
