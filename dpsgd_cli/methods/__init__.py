"""Training methods, one folder each. `Context`, `Method` and `create` are imported with torch, on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpsgd_cli.common.naming import named

if TYPE_CHECKING:
    from dpsgd_cli.engine.context import Context
    from dpsgd_cli.methods.base import Method
    from dpsgd_cli.methods.creation import create

__all__ = ["Context", "Method", "create"]

_HOMES = {
    "Context": "dpsgd_cli.engine.context",
    "Method": "dpsgd_cli.methods.base",
    "create": "dpsgd_cli.methods.creation",
}


def __getattr__(name: str) -> Any:
    """Return a public name, so that settings and prices are read without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return named(f"{_HOMES[name]}:{name}")
