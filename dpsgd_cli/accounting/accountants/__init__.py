"""Accountants by name; `accounting/names.py` lists them and the modules that hold them.

They load on first use, so that a command pays only for the imports of those that it asks for.
"""

from __future__ import annotations

import importlib

from dpsgd_cli.accounting.accountants.base import Accountant, Guarantee
from dpsgd_cli.accounting.names import ACCOUNTANTS
from dpsgd_cli.errors import UsageError

__all__ = ["NAMES", "USUAL", "Accountant", "Guarantee", "get"]

NAMES = tuple(ACCOUNTANTS)
USUAL = tuple(name for name, listed in ACCOUNTANTS.items() if listed.usual)
"""Accountants that answer a query which names none; the others are variants and looser noise levels."""


def get(name: str) -> Accountant:
    """Return the accountant called `name`.

    Raises UsageError, listing every name, for one that does not exist. Raises TypeError for an entry that is not an
    accountant of its name, or that recipes may name though its class states no upper bound.
    """
    if name not in ACCOUNTANTS:
        raise UsageError(f"unknown accountant {name!r}; known: {', '.join(NAMES)}")
    listed = ACCOUNTANTS[name]
    module, _, symbol = listed.runs.partition(":")
    accountant = getattr(importlib.import_module(f"{__name__}.{module}"), symbol)()
    if not isinstance(accountant, Accountant) or accountant.name != name:
        raise TypeError(f"accountant {name}: {listed.runs} is no accountant of that name")
    if listed.in_recipes and accountant.bound != "upper":
        raise TypeError(
            f"accountant {name}: its bound is {accountant.bound!r}, so no recipe may state an epsilon by it"
        )
    return accountant
