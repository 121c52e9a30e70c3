"""The release from which predictions of numbers are calibrated: its sensitivity, its price, its share of a budget.

Why. A squared loss whose residuals are clipped is a Huber loss: its predictions tend to a conditional median, not to
the mean. Two numbers correct most of that: the mean of the residuals, and their slope on the prediction (`run.py`).

Notation: y is a record's target and p its prediction by the trained model, both in units in which the target's public
bounds are -1 and 1. c, s > 0 and b, with 0 < b <= 1, are functions of public numbers and of earlier releases. clamp(t)
is t moved into [-1, 1].

    z = clamp((p - c) / s),    r = clamp((clamp(y) - clamp(p)) / b)

Release. Together, once, after the last step, with noise of one scale on all entries:

    sum r,    sum r z,    WEIGHT * sum z,    WEIGHT * sum z^2

Sensitivity. A record's part has squared norm r^2 (1 + z^2) + WEIGHT^2 (z^2 + z^4) <= 2 + 2 WEIGHT^2. A record that
comes or goes moves the release by at most the root of that, and so does one that becomes a null record, which adds
nothing. A record whose prediction or target is not finite adds nothing. A replaced record moves it by at most twice as
much.

Price. It is one Gaussian mechanism on all training records (with folds: those that a trial trains on), whatever batches
the steps use. The weights behind p are an earlier release, so it composes with the steps (adaptive composition). Its
noise multiplier z solves 1 / z^2 = share * mu^2, where mu^2 is left of the budget after the preconditioner; the budget
of the steps is solved for with it. The correction, and the weights that it changes, are post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Adjacency, replace_factor
from dpsgd_cli.accounting.budget import released_before
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.sections import Fraction, Section

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


class Calibration(Section):
    """Correction of a squared loss's predictions by a mean and a slope, for what clipping took from residuals."""

    share: Fraction = Field(
        0.05, description="Share of the mu^2 (or rho) left after the preconditioner that the correction gets."
    )


LABEL = "calibration"
WEIGHT = 0.5


def sensitivity(adjacency: Adjacency) -> float:
    """Return the L2 bound on how far one record moves the release: sqrt(2.5), or twice that if records are replaced."""
    return replace_factor(adjacency) * math.sqrt(2 + 2 * WEIGHT**2)


def with_calibration(recipe: Recipe, before: Sequence[Release]) -> tuple[Release, ...]:
    """Return `before`, followed by the release, if the recipe asks for it (`released_before`)."""
    settings = recipe.calibration
    if settings is None:
        return tuple(before)
    made = GaussianSum(1.0, recipe.adjacency, sensitivity=sensitivity(recipe.adjacency), label=LABEL)
    return released_before(recipe.required_privacy.budget, before, [settings.share], made)
