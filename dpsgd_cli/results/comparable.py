"""May one result be subtracted from another? Only on the same test records, at equal budgets, for one adjacency.

Budgets are equal where both recipes name the same one (and release the same outside of it), otherwise where the stated
epsilons agree to 1% at one delta. Without privacy there is no budget: such a result is compared at every one.
Not here: which records those are (`data/evaluated.py`), how a difference is judged (`differences.py`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from dpsgd_cli.data.evaluated import Evaluated, evaluated_on, identities_in
from dpsgd_cli.recipe.schema.data import PREPROCESS
from dpsgd_cli.recipe.tree import CoreLoader
from dpsgd_cli.results.result import Row

AGREEMENT = 0.01
# sections are found in the text of a resolved recipe, because thousands of them are read at once
_DATA = re.compile(r"^data:.*\n(?:[ \n].*\n?)*", re.MULTILINE)
_FOLDS = re.compile(r"^folds: (\d+)$", re.MULTILINE)


def folds_in(recipe_text: str) -> int | None:
    """K of a cross-validation, from the text of a resolved recipe."""
    found = _FOLDS.search(recipe_text)
    return int(found[1]) if found else None


def evaluated_in(recipe_text: str, provenance: Row) -> Evaluated:
    """What a result was tested on, from the text of its resolved recipe and the hashes of the files that were read."""
    return evaluated_on(data_in(recipe_text), folds_in(recipe_text), identities_in(provenance))


def data_in(recipe_text: str) -> Mapping[str, Any]:
    """The `data:` section of a resolved recipe."""
    section = _DATA.search(recipe_text)
    return _parsed(section[0]) if section else {}


@functools.lru_cache(maxsize=256)
def _parsed(section: str) -> Mapping[str, Any]:
    found = yaml.load(section, Loader=CoreLoader)["data"]
    return dict(found)


def reasons(ours: tuple[Evaluated, Row], theirs: tuple[Evaluated, Row]) -> list[str]:
    """Why the two, each what it was tested on and its `privacy`, are not compared; empty where they are."""
    (tested, privacy), (base, base_privacy) = ours, theirs
    found = []
    if tested.source != base.source:
        found.append("different data")
    elif tested.records != base.records:
        found.append("different test records")
    if "none" in (_adjacency(privacy), _adjacency(base_privacy)):
        return found
    if _adjacency(privacy) != _adjacency(base_privacy):
        found.append(f"{_adjacency(privacy)} and {_adjacency(base_privacy)} are different guarantees")
    elif not equal_budgets(privacy, base_privacy):
        found.append("different budgets")
    return found


def _adjacency(privacy: Row) -> str:
    return str(privacy["adjacency"] or "none")


def equal_budgets(a: Row, b: Row) -> bool:
    """Whether two private results might spend the same; who left some of a budget was free to spend it."""
    if a.get("budget") and _terms(a) == _terms(b):
        return True
    if a["epsilon"] is None or b["epsilon"] is None:
        return bool(a["epsilon"] is b["epsilon"])
    return a["delta"] == b["delta"] and math.isclose(a["epsilon"], b["epsilon"], rel_tol=AGREEMENT)


def _terms(privacy: Row) -> tuple[Any, ...]:
    """The budget that a recipe names, and what it releases besides."""
    covers = privacy.get("budget_covers", "total")
    # of a method that chooses what it releases, parts are what it spent; preprocessing is fixed for it, too
    parts = privacy.get("parts") or (privacy.get("spent") or {}).get("parts", {})
    before = {label: part for label, part in parts.items() if label in PREPROCESS}
    return privacy.get("budget"), covers, before if covers == "training" else {}
