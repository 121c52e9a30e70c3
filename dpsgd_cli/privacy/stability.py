"""How far one record can move the result of full-batch gradient descent on a convex problem. Public numbers only.

Not here: the descent (`methods/output_perturbation.py`), or the noise on its result.
"""

from __future__ import annotations

import math

from dpsgd_cli.privacy.lipschitz import Constants, problem_constants
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.convex import OutputPerturbationMethod


def rate_of_descent(constants: Constants, records: int) -> float:
    """The step length: 1 / (beta (1 + 1/n) + lambda), for which steps do not drift apart with a record more."""
    return 1 / (constants.smoothness * (1 + 1 / records) + constants.strong_convexity)


def moved_by_one(constants: Constants, records: int, steps: int) -> float:
    """L2 distance of two runs of `steps` projected gradient steps from 0 that differ by one record more.

    The step is w - eta (1/n sum of gradients + lambda w), n fixed and public. Its map w - eta grad is
    (1 - eta lambda)-Lipschitz for eta <= 1 / (largest eigenvalue of the Hessian), and the extra record moves its
    result by at most eta L / n; projections do not expand. So d_(t+1) <= (1 - eta lambda) d_t + eta L / n, which gives
    L / (n lambda) (1 - (1 - eta lambda)^T), or eta L T / n at lambda = 0.

    Source: the argument of Zhang, Zheng, Mou and Wang 2017 (Lemmas 2 to 4), for one record more instead of replaced.
    """
    eta, pull = rate_of_descent(constants, records), constants.strong_convexity
    push = eta * constants.lipschitz / records
    if pull == 0:
        return push * steps
    return push * -math.expm1(steps * math.log1p(-eta * pull)) / (eta * pull)


def sensitivity_of_descent(recipe: Recipe, records: int, feature_bound: float | None) -> float:
    """`moved_by_one` of a recipe for output perturbation."""
    assert isinstance(recipe.method, OutputPerturbationMethod)
    return moved_by_one(problem_constants(recipe, feature_bound), records, recipe.method.steps)
