"""Theory beside practice: what a theorem says of a lecture method's excess risk, and what was measured.

NON-PRIVATE: the measurement compares with the optimum on the training records. Not here: the theorems
(`privacy/lectures.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.problems.build import l2_of, linear_risk, radii_of
from dpsgd_cli.core.problems.newton import Tilted, minimise_on_ball
from dpsgd_cli.methods.base import Context
from dpsgd_cli.privacy.lectures import Problem
from dpsgd_cli.privacy.lipschitz import constants_of
from dpsgd_cli.recipe import schema

_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Claim:
    """One trial's theorem: its name, and the bound on the expected excess risk of what the method publishes."""

    theorem: str
    bound: float


def problem_of(context: Context, trial: int, clip: float) -> Problem | None:
    """The public numbers that the theorems take; None where no theorem covers the recipe.

    They need a ball, public bounds that make the loss Lipschitz, and no gradient that clipping changes.
    """
    model, bound = context.recipes[trial].model, context.feature_bound
    if not isinstance(model, schema.ConvexModel) or model.radius is None or bound is None:
        return None
    known = constants_of(model, bound)
    if not known.lipschitz <= clip * (1 + 1e-6):
        return None
    return Problem(len(context.table), context.pack.size, known.lipschitz, model.radius, model.l2)


def report(context: Context, output: Tensor, claims: list[Claim | None]) -> list[dict[str, Any]] | None:
    """A row a trial: theorem, bound, and the measured excess risk over the optimum in the ball; None without claims."""
    if not any(claims):
        return None
    measured = _measured(context, output)
    return [
        {"theorem": claim.theorem, "excess_risk_bound": claim.bound, "nonprivate_excess_risk": measured[trial]}
        if claim is not None
        else {"theorem": None, "excess_risk_bound": None, "nonprivate_excess_risk": measured[trial]}
        for trial, claim in enumerate(claims)
    ]


def _measured(context: Context, output: Tensor) -> list[float | None]:
    model = context.recipes[0].model
    if not isinstance(model, schema.ConvexModel) or model.loss == "hinge":
        return [None] * context.trials
    risk, records = linear_risk(context), len(context.table)
    l2 = context.column([l2_of(recipe) for recipe in context.recipes]).squeeze(1).double()
    # a trace of strong convexity, so that Newton's step exists where l2 is 0; it moves the optimum by next to nothing
    curvature = records * l2.clamp_min(1e-9)
    problem = Tilted(risk.rows, risk.loss, curvature, torch.zeros_like(context.pack.values, dtype=torch.float64))
    radii = context.column(radii_of(context.recipes)).squeeze(1).double()
    best = minimise_on_ball(problem, radii, _TOLERANCE * records).values

    def objective(values: Tensor) -> Tensor:
        values = values.to(risk.rows.z)
        return risk.loss_sums(values) / records + l2 / 2 * values.double().square().sum(dim=1)

    return [float(gap) for gap in objective(output) - objective(best)]
