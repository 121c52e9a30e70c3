"""Losses of a convex model, by name, with the bounds that prices depend on.

To add a loss: its name in `Loss`, its record in `LOSSES`, and a subclass of
`dpsgd_cli.engine.losses.MarginLoss` with its values and derivatives. `tests/engine/test_loss_bounds.py` compares
each record with its class. Constants of a whole problem are in `methods/perturbation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Loss = Literal["logistic", "hinge", "huber-svm", "squared", "huber", "quantile"]


@dataclass(frozen=True)
class Region:
    """Public numbers that a bound may depend on.

    `reach`: bound on |t|, inf if the weights are unbounded. `width`: `model.huber_width`. `level`: `model.quantile`.
    """

    reach: float
    width: float
    level: float


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """Properties of a convex loss phi of one number t that prices, plans and metrics use. No field has a default.

    `runs`: `module:class` of the loss, imported when it is needed.
    `residual`: t is the residual w.x - y of a regression, whose targets are clamped. Otherwise it is the margin y w.x
    of two classes, y = -1 or 1.
    `slope`: a bound on |phi'(t)| for |t| <= reach; inf if there is none.
    `curvature`: a bound on phi''(t) in the same region; None states that phi is not smooth.
    `probabilities`: sigmoid(output) estimates the probability of the second class.
    """

    runs: str
    residual: bool
    slope: Callable[[Region], float]
    curvature: Callable[[Region], float] | None
    probabilities: bool

    def bounds(self, region: Region) -> tuple[float, float]:
        """Return bounds on |phi'| and on phi'' in `region`; inf if there is none.

        Raises ValueError for a bound that is negative or not a number.
        """
        slope = self.slope(region)
        curvature = math.inf if self.curvature is None else self.curvature(region)
        if not (slope >= 0 and curvature >= 0):
            raise ValueError(f"{self.runs}: bounds {slope:g} and {curvature:g} must be at least 0")
        return slope, curvature


LOSSES: dict[Loss, LossKind] = {
    "logistic": LossKind(
        runs="dpsgd_cli.engine.losses:Logistic",
        residual=False,
        slope=lambda region: 1.0,
        curvature=lambda region: 0.25,
        probabilities=True,
    ),
    "hinge": LossKind(
        runs="dpsgd_cli.engine.losses:Hinge",
        residual=False,
        slope=lambda region: 1.0,
        curvature=None,
        probabilities=False,
    ),
    "huber-svm": LossKind(
        runs="dpsgd_cli.engine.losses:HuberHinge",
        residual=False,
        slope=lambda region: 1.0,
        curvature=lambda region: 1 / (2 * region.width),
        probabilities=False,
    ),
    "squared": LossKind(
        runs="dpsgd_cli.engine.losses:Squared",
        residual=True,
        slope=lambda region: region.reach,
        curvature=lambda region: 1.0,
        probabilities=False,
    ),
    "huber": LossKind(
        runs="dpsgd_cli.engine.losses:Huber",
        residual=True,
        slope=lambda region: min(region.reach, region.width),
        curvature=lambda region: 1.0,
        probabilities=False,
    ),
    "quantile": LossKind(
        runs="dpsgd_cli.engine.losses:Quantile",
        residual=True,
        slope=lambda region: max(region.level, 1 - region.level),
        curvature=None,
        probabilities=False,
    ),
}
