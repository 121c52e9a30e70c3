"""Every accountant by name. Adding one is one file here and one line in `_WHERE`.

Accountants load on first use, so that a command pays for the imports of those it asks for.
"""

from __future__ import annotations

import importlib

from dpsgd_cli.errors import UsageError
from dpsgd_cli.privacy.accountants.base import Accountant, Guarantee

__all__ = ["NAMES", "Accountant", "Guarantee", "get"]

_WHERE: dict[str, tuple[str, str]] = {
    "zcdp": ("zcdp", "Zcdp"),
    "zcdp-tight": ("zcdp", "TightZcdp"),
    "rdp": ("rdp", "Rdp"),
    "pld": ("pld", "Pld"),
    "gaussian": ("gaussian", "Gaussian"),
}
NAMES: tuple[str, ...] = tuple(_WHERE)


def get(name: str) -> Accountant:
    """The accountant called `name`.

    Raises UsageError, listing every name, for one that does not exist.
    """
    if name not in _WHERE:
        raise UsageError(f"unknown accountant {name!r}; known: {', '.join(NAMES)}")
    module, symbol = _WHERE[name]
    accountant = getattr(importlib.import_module(f"{__name__}.{module}"), symbol)()
    assert isinstance(accountant, Accountant)
    return accountant
