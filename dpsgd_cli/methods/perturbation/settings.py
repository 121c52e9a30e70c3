"""Objective and output perturbation as recipes give them, and their plans: the whole budget in a single release.

Each function's docstring says what is released and which theorem prices it. Notation: n records, eta the step length,
L the Lipschitz constant of one record's loss, lambda the L2 coefficient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.budget import EpsilonBudget
from dpsgd_cli.accounting.mechanism import ApproximateDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.common.sections import Count
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, FullBatch
from dpsgd_cli.methods.dp_sgd.price import one_gaussian
from dpsgd_cli.methods.risks.constants import Constants, problem_constants

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe

OFF_GRID = "its random term enters a search, so no proof covers the floating-point grid of what it releases"


class ObjectivePerturbationMethod(FullBatch):
    """Objective perturbation with Gaussian noise (Kifer, Smith and Thakurta 2012).

    The inexactness of the minimum is paid for (Iyengar et al. 2019).
    """

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation.run:ObjectivePerturbation",
        planner="dpsgd_cli.methods.perturbation.settings:objective_perturbation",
        privacy="needed",
        adjacencies=("add-remove",),
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["objective-perturbation"] = "objective-perturbation"


class OutputPerturbationMethod(FullBatch):
    """Output perturbation: noise on the last iterate of full-batch gradient descent, by its stability."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation.run:OutputPerturbation",
        planner="dpsgd_cli.methods.perturbation.settings:output_perturbation",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["output-perturbation"] = "output-perturbation"
    steps: Count = Field(100, description="Gradient steps, at a rate for which they do not drift apart.")


_BELOW = 1 - 1e-9


def rate_of_descent(constants: Constants, records: int) -> float:
    """Return the step length 1 / (beta (1 + 1/n) + lambda), at which steps do not drift apart with one record more."""
    return 1 / (constants.smoothness * (1 + 1 / records) + constants.strong_convexity)


def moved_by_one(constants: Constants, records: int, steps: int) -> float:
    """Return the L2 distance of two runs of `steps` projected gradient steps from 0 that differ by one record more.

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


def output_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on the last iterate. Its sensitivity is `moved_by_one` of the public constants."""
    assert isinstance(recipe.method, OutputPerturbationMethod)
    constants = problem_constants(recipe, facts.feature_bound)
    return one_gaussian(recipe, facts, moved_by_one(constants, facts.records, recipe.method.steps))


def objective_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one (epsilon, delta)-DP release of the whole budget."""
    epsilon, delta = epsilon_delta(recipe)
    problem_constants(recipe, facts.feature_bound, in_ball=False)
    return one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, recipe.adjacency)))


def one_release(recipe: Recipe, facts: Facts, release: Release) -> Plan:
    """A plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = recipe.required_privacy
    if facts.preprocessing_releases:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    _, accountant = BestAccountant().best([release], privacy.stated_delta)
    return Plan.of(recipe, facts, epochs=((release,),), accountant=accountant, covers_before=True)


def epsilon_delta(recipe: Recipe) -> tuple[float, float]:
    budget = recipe.required_privacy.budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta
