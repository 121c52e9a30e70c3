"""Private least squares as recipes give it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpsgd_cli.common.sections import Fraction
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch


class LeastSquaresMethod(FullBatch):
    """Least squares by noisy X^T X and X^T Y and a ridge (Mehta et al. 2022): one release, no learning rate."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.least_squares.run:DpLeastSquares",
        planner="dpsgd_cli.methods.least_squares.price:least_squares",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=False,
        by_unit=True,
        may_differ=(*ITS_BUDGET, "method.share"),
    )
    kind: Literal["dp-least-squares"] = "dp-least-squares"
    share: Fraction = Field(0.5, description="Share of the budget's mu^2 that X^T X gets; X^T Y gets the rest.")
