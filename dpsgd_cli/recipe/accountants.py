"""Every accountant by name. Adding one is a file in `privacy/accountants/` and a line here; nothing else lists them.

Not here: what an accountant offers (`privacy/accountants/base.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """`runs` is `module:class` in `privacy/accountants/`, imported when it is needed.

    `usual`: whether it answers a query that names none; the others are variants and looser noise levels.
    `in_recipes`: whether a recipe may name it; estimates and looser variants state nothing of a training.
    """

    runs: str
    usual: bool = True
    in_recipes: bool = True


ACCOUNTANTS: dict[str, Listed] = {
    "basic-composition": Listed("composition:BasicComposition"),
    "advanced-composition": Listed("composition:AdvancedComposition"),
    "strong-composition": Listed("composition:StrongComposition"),
    "zcdp": Listed("zcdp:Zcdp"),
    "zcdp-rs": Listed("zcdp:ZcdpRs", in_recipes=False),
    "moments": Listed("rdp:Moments"),
    "rdp": Listed("rdp:Rdp"),
    "pld": Listed("pld:Pld"),
    "gaussian": Listed("gaussian:Gaussian"),
    "zcdp-tight": Listed("zcdp:TightZcdp", usual=False),
    "rdp-markov": Listed("rdp:MarkovRdp", usual=False, in_recipes=False),
    "strong-composition-published": Listed("composition:PublishedStrongComposition", usual=False, in_recipes=False),
    "lemma-15.1": Listed("lecture_noise:Lemma151", usual=False),
    "lemma-15.5": Listed("lecture_noise:Lemma155", usual=False),
    "nikolov": Listed("lecture_noise:Nikolov", usual=False),
}
