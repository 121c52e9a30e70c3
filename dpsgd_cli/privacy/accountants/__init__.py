"""Every accountant by name. Adding one is one file here and one line in `_WHERE`.

Accountants load on first use, so that a command pays for the imports of those it asks for.
"""

from __future__ import annotations

import importlib

from dpsgd_cli.errors import UsageError
from dpsgd_cli.privacy.accountants.base import Accountant, Guarantee

__all__ = ["NAMES", "USUAL", "Accountant", "Guarantee", "get"]

_WHERE: dict[str, tuple[str, str]] = {
    "basic-composition": ("basic_composition", "BasicComposition"),
    "advanced-composition": ("advanced_composition", "AdvancedComposition"),
    "strong-composition": ("strong_composition", "StrongComposition"),
    "zcdp": ("zcdp", "Zcdp"),
    "zcdp-rs": ("zcdp_rs", "ZcdpRs"),
    "moments": ("moments", "Moments"),
    "rdp": ("rdp", "Rdp"),
    "pld": ("pld", "Pld"),
    "gaussian": ("gaussian", "Gaussian"),
    "zcdp-tight": ("zcdp", "TightZcdp"),
    "rdp-markov": ("rdp", "MarkovRdp"),
    "strong-composition-published": ("strong_composition", "PublishedStrongComposition"),
    "lemma-15.1": ("lecture_noise", "Lemma151"),
    "lemma-15.5": ("lecture_noise", "Lemma155"),
    "nikolov": ("lecture_noise", "Nikolov"),
}
NAMES: tuple[str, ...] = tuple(_WHERE)
USUAL: tuple[str, ...] = NAMES[: NAMES.index("zcdp-tight")]
"""What a query that names none is answered with; the others are variants and looser noise levels."""


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
