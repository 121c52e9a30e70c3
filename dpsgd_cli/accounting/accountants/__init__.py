"""Table of all accountants by name. An accountant's module loads on first use.

To add one: a file beside this one (its interface is in `base.py`) and a line here. Nothing else lists them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from dpsgd_cli.accounting.accountants.base import Accountant, Guarantee
from dpsgd_cli.errors import UsageError

__all__ = ["ACCOUNTANTS", "NAMES", "USUAL", "Accountant", "AccountantEntry", "Guarantee", "get"]


@dataclass(frozen=True, kw_only=True)
class AccountantEntry:
    """Entry of an accountant in the table. No field has a default.

    `runs`: `module:class` in this folder, imported when it is needed. The class states the direction of
    its bound, and the mechanisms and adjacencies that it is proved for. `usual`: True if it answers a query that names
    no accountant; the others are variants and looser noise levels. `in_recipes`: True if a recipe may name it. Only
    upper bounds may be named, and no variants that are looser (but `rdp-markov`, by which papers chose their noise).
    """

    runs: str
    usual: bool
    in_recipes: bool


ACCOUNTANTS: dict[str, AccountantEntry] = {
    "basic-composition": AccountantEntry(runs="composition:BasicComposition", usual=True, in_recipes=True),
    "advanced-composition": AccountantEntry(runs="composition:AdvancedComposition", usual=True, in_recipes=True),
    "strong-composition": AccountantEntry(runs="composition:StrongComposition", usual=True, in_recipes=True),
    "zcdp": AccountantEntry(runs="zcdp:Zcdp", usual=True, in_recipes=True),
    "zcdp-rs": AccountantEntry(runs="zcdp:ZcdpRs", usual=True, in_recipes=False),
    "moments": AccountantEntry(runs="rdp:Moments", usual=True, in_recipes=True),
    "rdp": AccountantEntry(runs="rdp:Rdp", usual=True, in_recipes=True),
    "pld": AccountantEntry(runs="pld:Pld", usual=True, in_recipes=True),
    "gaussian": AccountantEntry(runs="gaussian:Gaussian", usual=True, in_recipes=True),
    "zcdp-tight": AccountantEntry(runs="zcdp:TightZcdp", usual=False, in_recipes=True),
    "rdp-markov": AccountantEntry(runs="rdp:MarkovRdp", usual=False, in_recipes=True),
    "strong-composition-published": AccountantEntry(
        runs="composition:PublishedStrongComposition", usual=False, in_recipes=False
    ),
    "lemma-15.1": AccountantEntry(runs="lecture_noise:Lemma151", usual=False, in_recipes=True),
    "lemma-15.5": AccountantEntry(runs="lecture_noise:Lemma155", usual=False, in_recipes=True),
    "nikolov": AccountantEntry(runs="lecture_noise:Nikolov", usual=False, in_recipes=True),
}

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
