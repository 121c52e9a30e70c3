"""The release from which intervals of a logistic model are computed: its sensitivity, its price, its share of a budget.

Notation: u is a record's row over its public bound R (with the constant of the model's own bias), scaled down to norm 1
if longer. theta is a public or released vector, p = 1 / (1 + exp(-<theta, u>)), y is 0 or 1, and r = p - y.

Release. Together, in each of three rounds, with noise of one scale on all entries:

    CURVATURE * sum p (1 - p) u u^T,    sum r u,    SQUARES * sum r^2 u u^T

Symmetric matrices are their upper triangles with the entries off the diagonal times sqrt(2), so that the L2 norm of a
vector is the Frobenius norm of the matrix. theta of the first round is the trained model. Those of the next rounds are
functions of the rounds before (`run.py`).

Sensitivity. As p (1 - p) = |r| (1 - |r|), a record's part has squared norm at most f(|r|), where

    f(r) = (3.4 r (1 - r))^2 + r^2 + 0.16 r^4,    0 <= r <= 1.

f(1) - f(r) = (1 - r) ((1 + r) (1.16 + 0.16 r^2) - 11.56 r^2 (1 - r)). The last term is at most 1.713 (at r = 2/3), at
most 1.445 below r = .5 and at most .73 below .3. The one before it is at least 1.16, 1.52 from .3 on, and 1.8 from .5
on. So f(r) <= f(1) = 1.16. A record that comes or goes, or becomes a null record (which adds nothing), moves the
release by at most sqrt(1.16); a replaced record by at most twice that.

Price. Each round is a Gaussian mechanism on all training records. `ROUNDS` divides the share's mu^2 between them, and
Gaussian mechanisms compose by adding mu^2, also adaptively (Dong, Roth and Su 2022, Corollary 2). The budget that
remains for training is solved for with all three. The intervals are post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Adjacency, replace_factor
from dpsgd_cli.accounting.budget import released_before
from dpsgd_cli.accounting.mechanism import GaussianSum, Release

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


Inference = Literal["intervals"]
INFERENCE = Field(
    None, description="intervals: release what 95% intervals of coefficients and shapes need, from the same budget."
)


LABEL = "intervals"
CURVATURE, SQUARES = 3.4, 0.4
ROUNDS = (0.2, 0.3, 0.5)
"""Shares of the release's mu^2. The first two rounds bring theta near the optimum, the last one is used."""


def sensitivity(adjacency: Adjacency) -> float:
    """Return the L2 bound on how far one record moves a round: sqrt(1.16), or twice that if records are replaced."""
    return replace_factor(adjacency) * math.sqrt(1 + SQUARES**2)


def with_intervals(recipe: Recipe, before: Sequence[Release]) -> tuple[Release, ...]:
    """Return `before`, followed by the three rounds, if the recipe asks for intervals (`released_before`)."""
    share = recipe.inference_share
    if share is None:
        return tuple(before)
    made = GaussianSum(1.0, recipe.adjacency, sensitivity=sensitivity(recipe.adjacency), label=LABEL)
    return released_before(recipe.required_privacy.budget, before, [share * part for part in ROUNDS], made)
