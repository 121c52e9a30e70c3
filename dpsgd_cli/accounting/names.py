"""Table of all accountants by name.

To add one: a file in `accounting/accountants/` (its interface is in `base.py` there) and a line here. Nothing else
lists them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Entry of an accountant in the table. No field has a default.

    `runs`: `module:class` in `accounting/accountants/`, imported when it is needed. The class states the direction of
    its bound, and the mechanisms and adjacencies that it is proved for. `usual`: True if it answers a query that names
    no accountant; the others are variants and looser noise levels. `in_recipes`: True if a recipe may name it. Only
    upper bounds may be named, and no variants that are looser (but `rdp-markov`, by which papers chose their noise).
    """

    runs: str
    usual: bool
    in_recipes: bool


ACCOUNTANTS: dict[str, Listed] = {
    "basic-composition": Listed(runs="composition:BasicComposition", usual=True, in_recipes=True),
    "advanced-composition": Listed(runs="composition:AdvancedComposition", usual=True, in_recipes=True),
    "strong-composition": Listed(runs="composition:StrongComposition", usual=True, in_recipes=True),
    "zcdp": Listed(runs="zcdp:Zcdp", usual=True, in_recipes=True),
    "zcdp-rs": Listed(runs="zcdp:ZcdpRs", usual=True, in_recipes=False),
    "moments": Listed(runs="rdp:Moments", usual=True, in_recipes=True),
    "rdp": Listed(runs="rdp:Rdp", usual=True, in_recipes=True),
    "pld": Listed(runs="pld:Pld", usual=True, in_recipes=True),
    "gaussian": Listed(runs="gaussian:Gaussian", usual=True, in_recipes=True),
    "zcdp-tight": Listed(runs="zcdp:TightZcdp", usual=False, in_recipes=True),
    "rdp-markov": Listed(runs="rdp:MarkovRdp", usual=False, in_recipes=True),
    "strong-composition-published": Listed(
        runs="composition:PublishedStrongComposition", usual=False, in_recipes=False
    ),
    "lemma-15.1": Listed(runs="lecture_noise:Lemma151", usual=False, in_recipes=True),
    "lemma-15.5": Listed(runs="lecture_noise:Lemma155", usual=False, in_recipes=True),
    "nikolov": Listed(runs="lecture_noise:Nikolov", usual=False, in_recipes=True),
}
