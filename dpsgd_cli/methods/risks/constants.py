"""Constants of a convex problem, from public bounds.

Notation: B bounds the norm of one record's features (constant column included), R the norm of w, Y the size of a
regression target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpsgd_cli.engine.loss_bounds import LOSSES, Region
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.experiment import Experiment


@dataclass(frozen=True)
class Constants:
    """Constants that hold for every record that the public bounds allow and every w that the constraint allows.

    `lipschitz` bounds the norm of one record's loss gradient, without the L2 term, which reads no data. `smoothness` is
    the largest eigenvalue of one record's loss Hessian, of rank one. `strong_convexity` is that of the L2 term.
    inf means "no bound".
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float
    feature_bound: float


def constants_of(model: ConvexModel, feature_bound: float) -> Constants:
    """Return L = sup|phi'| B and beta = sup(phi'') B^2 of a loss phi of the margin, by the bounds in its record.

    The margin is at most R B on the ball of radius R, and a residual at most R B + Y; without a radius, nothing bounds
    them. logistic: sup|phi'| = 1, sup(phi'') = 1/4. hinge: 1 and no bound. huber-svm of half-width h: 1 and 1/(2h).
    squared: R B + Y and 1. huber of width h: min(h, R B + Y) and 1. quantile of level q: max(q, 1 - q) and no bound.

    >>> from dpsgd_cli.engine.settings import ConvexModel
    >>> constants_of(ConvexModel(loss="logistic", l2=0.1), feature_bound=2.0)
    Constants(lipschitz=2.0, smoothness=1.0, strong_convexity=0.1, feature_bound=2.0)
    """
    reach = math.inf if model.radius is None else model.radius * feature_bound
    reach += model.target_bound if model.known.residual else 0.0
    slope, curvature = model.known.bounds(Region(reach, model.huber_width, model.quantile))
    return Constants(slope * feature_bound, curvature * feature_bound**2, model.l2, feature_bound)


def problem_constants(recipe: Experiment, feature_bound: float | None, in_ball: bool = True) -> Constants:
    """Return the constants of a recipe's smooth convex problem. Raises PrivacyError that names the failing condition.

    `in_ball`: whether the method keeps all its weights in the ball of `model.radius`. A method that does not needs
    constants that hold everywhere, and may not be given a radius.
    """
    kind, model = recipe.method.kind, recipe.model
    if not isinstance(model, ConvexModel):
        raise PrivacyError(f"method {kind} is proved for model.kind: convex, not {model.kind}")
    if feature_bound is None:
        raise PrivacyError(
            f"method {kind} needs a public bound on the norm of a record's features: scale by bounds, or add unit-norm"
            " to data.preprocess"
        )
    constants = constants_of(model if in_ball else model.changed(radius=None), feature_bound)
    if not constants.lipschitz < math.inf:
        where = (
            "give model.radius, or" if in_ball else "it looks for weights everywhere, so model.radius is no help: use"
        )
        raise PrivacyError(f"method {kind} needs bounded gradients; {where} a loss other than {model.loss}")
    if not constants.smoothness < math.inf:
        smooth = " or ".join(name for name, known in LOSSES.items() if known.curvature and not known.residual)
        raise PrivacyError(f"method {kind} needs a smooth loss, which {model.loss} is not; use {smooth}")
    if not in_ball and model.radius is not None:
        raise PrivacyError(
            f"method {kind} is proved for the minimiser among all weights, so model.radius {model.radius:g} would not"
            " be kept: leave it out"
        )
    return constants
