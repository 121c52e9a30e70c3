"""Histogram of gradient norms, released before training: its sensitivity and its share of a budget.

The counts and their noise are in `clipping/bounds.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.budget import multiplier_of_share
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.plan import Plan

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe

LABEL = "norm-histogram"
"""Label of the release that a clip bound is read from."""


def sensitivity(adjacency: Adjacency) -> float:
    """Return the L2 bound on how far one record moves the counts: 1, or sqrt(2) if it is replaced. Both are reached.

    - add-remove, zero-out: one record adds 1 to one count, or takes it away (a null record is counted nowhere).
    - replace-one: one count loses 1 and another one gains it, or nothing changes.
    """
    return math.sqrt(2) if NEIGHBOURS[adjacency].replaced else 1.0


def with_histogram(recipe: Recipe, before: Sequence[Release]) -> tuple[Release, ...]:
    """Return `before`, followed by the recipe's histogram, if it has one: a Gaussian with its share of the rest.

    The noise of the steps is solved for with the whole list.

    Raises InfeasibleBudget if `before` leaves nothing.
    """
    privacy = recipe.required_privacy
    share, budget = privacy.clipping.share_before, privacy.budget
    if share is None or budget is None:
        return tuple(before)
    adjacency = recipe.adjacency
    multiplier = multiplier_of_share(budget, before, share)
    return (*before, Release(GaussianSum(multiplier, adjacency, sensitivity=sensitivity(adjacency), label=LABEL)))


def released_histogram(plan: Plan) -> GaussianSum:
    """Return the mechanism that the plan has for the histogram."""
    return next(
        m
        for m in (one.mechanism for one in plan.preprocessing_releases)
        if isinstance(m, GaussianSum) and m.label == LABEL
    )
