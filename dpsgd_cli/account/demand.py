"""What Lecture 9 asks of a recipe's problem for a wanted error. Public numbers only; no data, no torch.

Not here: the theorem (`lectures.py`).
"""

from __future__ import annotations

import math
from typing import Any

from dpsgd_cli import data
from dpsgd_cli.errors import PrivacyError, UsageError
from dpsgd_cli.joint import feature_bound, training_records
from dpsgd_cli.privacy.convex import constants_of
from dpsgd_cli.privacy.lectures import PublicProblem, lecture_9_demand
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.recipe.schema.model import ConvexModel
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget


def demand_of(loaded: LoadedRecipe, error: float) -> dict[str, Any]:
    """Steps T and records n at which the expected excess risk of Lecture 9's algorithm is at most `error`.

    Raises UsageError for a recipe that is no convex problem in a ball, PrivacyError without bounds or budget.
    """
    recipe, model = loaded.recipe, loaded.recipe.model
    if not isinstance(model, ConvexModel) or model.radius is None:
        raise UsageError(f"{recipe.name}: Lecture 9 is about model.kind: convex with a radius; give model.radius=R")
    budget = recipe.privacy.budget if recipe.privacy is not None else None
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"{recipe.name}: Lecture 9 is about a budget of epsilon and delta; give privacy.budget")
    outline = data.outline(recipe.data, loaded.base)
    bound = feature_bound(recipe, outline)
    if bound is None:
        raise PrivacyError(f"{recipe.name}: nothing public bounds the features; scale by bounds, or add unit-norm")
    assert outline.input_shape is not None
    lipschitz = constants_of(model, bound).lipschitz
    weights = math.prod(outline.input_shape) + model.bias
    records = training_records(recipe, outline)
    problem = PublicProblem(records, weights, lipschitz, model.radius, model.l2)
    demand = lecture_9_demand(problem, error, budget.epsilon, budget.delta)
    return {
        "recipe": recipe.name,
        "excess_risk": error,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "lipschitz": lipschitz,
        "weights": weights,
        "steps": demand.steps,
        "records": demand.records,
        "records_available": records,
    }
