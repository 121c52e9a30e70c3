"""What `module:name` names, imported when it is needed: so the schema owns what it may not import."""

from __future__ import annotations

import importlib
from typing import Any


def named(name: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
