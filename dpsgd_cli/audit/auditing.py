"""One audit, from a recipe to its document. Attacks are chosen in `attacks.py`; files are written in `report.py`."""

from __future__ import annotations

import time
from typing import Any

from dpsgd_cli import __version__, data
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.audit.attacks import by_kind
from dpsgd_cli.audit.findings import TIERS, UNSEEN, judged
from dpsgd_cli.audit.options import Options
from dpsgd_cli.audit.stage import without_folds
from dpsgd_cli.errors import UsageError
from dpsgd_cli.recipe.loading import SettledRecipe, recipe_hash
from dpsgd_cli.training.plans import plan_of


def audit(loaded: SettledRecipe, options: Options) -> dict[str, Any]:
    """Attack the privacy claim of a recipe, and return the document of findings.

    Raises UsageError for a recipe without a privacy claim, or without a known input shape; and the errors of training.
    """
    begun = time.perf_counter()
    recipe = loaded.recipe
    if recipe.privacy is None:
        raise UsageError(f"{loaded.source}: trains without privacy, so it claims nothing that an audit could refute")
    outline = data.outline(recipe.data, loaded.base)
    plan = plan_of(without_folds(loaded), outline)
    assert plan is not None
    stated = plan.guarantee()
    if outline.input_shape is None:
        raise UsageError(f"{loaded.source}: the shape of one input is not known, so no canary can be made")
    findings, told, left_out = by_kind(loaded, outline, plan, options)
    rows = judged(findings, options.confidence)
    refuted = [f"{row['tier']}: {row['name']}" for row in rows if row["refuted"]]
    return {
        "name": recipe.name,
        "recipe": loaded.source,
        "hash": recipe_hash(recipe),
        "claim": {
            "epsilon": stated.epsilon,
            "delta": stated.delta,
            "adjacency": None if stated.adjacency is None else adjacency_label(stated.adjacency, recipe.data.unit),
            "accountant": stated.accountant,
            "bound": stated.bound,
        },
        "confidence": options.confidence,
        "refuted": bool(refuted),
        "refuted_by": refuted,
        "lower_bounds": {
            tier: max(own)
            for tier in TIERS
            if (own := [r["epsilon"] for r in rows if r["tier"] == tier and "epsilon" in r])
        },
        "findings": rows,
        "not_audited": left_out,
        "cannot_see": {tier: UNSEEN[tier] for tier in options.tiers if any(row["tier"] == tier for row in rows)},
        **told,
        "seed": recipe.seed,
        "seconds": round(time.perf_counter() - begun, 1),
        "version": __version__,
    }
