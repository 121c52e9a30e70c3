"""Private least squares as recipes give it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Fraction
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.intervals.settings import INFERENCE, Inference
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.methods.dp_sgd.price import one_gaussian
from dpsgd_cli.preconditioning.price import joint_sensitivity, weight_of

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe

SQUARES = 0.2
"""Weight of the sum of squared targets, which only intervals need: 2% of the release's mu^2 at a share of .5."""


class LeastSquaresMethod(FullBatch):
    """Least squares by noisy X^T X and X^T Y and a ridge (Mehta et al. 2022): one release, no learning rate."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.least_squares.run:DpLeastSquares",
        planner="dpsgd_cli.methods.least_squares.settings:least_squares",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="names",
        only_convex=False,
        by_unit=True,
        per_trial_keys=(*ITS_BUDGET, "method.share"),
    )
    kind: Literal["dp-least-squares"] = "dp-least-squares"
    share: Fraction = Field(0.5, description="Share of the budget's mu^2 that X^T X gets; X^T Y gets the rest.")
    inference: Inference | None = INFERENCE

    @property
    def squares(self) -> float:
        """Return the weight of the released sum of squared targets: `SQUARES` if intervals are asked for, else 0."""
        return 0.0 if self.inference is None else SQUARES


def least_squares(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on second moments and products with the targets, of their joint sensitivity."""
    assert isinstance(recipe.method, LeastSquaresMethod)
    if facts.feature_bound is None:
        raise PrivacyError(
            f"method {recipe.method.kind} needs a public bound on the norm of a record's features: scale by bounds, or"
            " add unit-norm to data.preprocess"
        )
    adjacency = recipe.adjacency
    moved = joint_sensitivity(adjacency, weight_of(recipe.method.share), recipe.method.squares)
    return one_gaussian(recipe, facts, moved / replace_factor(adjacency), "least-squares")
