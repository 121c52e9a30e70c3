"""Lipschitz and smoothness constants of a convex problem, from public bounds only.

Notation: B bounds the norm of one record's features (constant column included), R the norm of w, Y the size of a
regression target. Not here: where B comes from (`data/bounds.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpsgd_cli.core.problems.losses import MarginLoss


@dataclass(frozen=True)
class Constants:
    """What holds for every record that the public bounds allow and every w that the constraint allows.

    `lipschitz` bounds the norm of one record's loss gradient (the L2 term left out: it reads no data); `smoothness` is
    the largest eigenvalue of one record's loss Hessian, of rank one; `strong_convexity` is that of the L2 term.
    inf stands for "no bound".
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float
    feature_bound: float


def constants_of(
    loss: MarginLoss, feature_bound: float, l2: float = 0.0, radius: float | None = None, target_bound: float = 1.0
) -> Constants:
    """L = sup|phi'| B and beta = sup(phi'') B^2; the squared loss has sup|phi'| = R B + Y on the ball.

    >>> from dpsgd_cli.core.problems.losses import margin_loss
    >>> constants_of(margin_loss("logistic"), feature_bound=2.0)
    Constants(lipschitz=2.0, smoothness=1.0, strong_convexity=0.0, feature_bound=2.0)
    """
    slope = loss.lipschitz
    if math.isinf(slope) and radius is not None:
        slope = radius * feature_bound + target_bound
    return Constants(slope * feature_bound, loss.smoothness * feature_bound**2, l2, feature_bound)
