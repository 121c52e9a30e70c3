"""Excess risk of lecture methods: the bound of a theorem, and the measured value.

NON-PRIVATE: the measurement compares with the optimum on the training records. The theorems are in
`methods/lectures/price.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.methods.lectures.price import PublicProblem
from dpsgd_cli.methods.risks.constants import constants_of
from dpsgd_cli.methods.risks.optimum import Tilted, minimise_hinge, minimise_on_ball, require_hinge
from dpsgd_cli.methods.risks.problem import l2_of, linear_risk, radii_of

_TOLERANCE = 1e-7
# of a mean loss: the gap at which smoothing stops, and the largest gap with which a measurement is reported
_CERTIFIED = 1e-6
_LEAST_CERTAIN = 1e-4


@dataclass(frozen=True)
class Claim:
    """Name of a trial's theorem, and its bound on the expected excess risk of the published weights."""

    theorem: str
    bound: float


def problem_of(context: Context, trial: int, clip: float) -> PublicProblem | None:
    """Return the public numbers that the theorems need; None if no theorem covers the recipe.

    The theorems need a ball, public bounds that make the loss Lipschitz, and a clip norm that changes no gradient.
    """
    model, bound = context.recipes[trial].model, context.feature_bound
    if not isinstance(model, ConvexModel) or model.radius is None or bound is None:
        return None
    known = constants_of(model, bound)
    if not known.lipschitz <= clip * (1 + 1e-6):
        return None
    return PublicProblem(len(context.table), context.pack.size, known.lipschitz, model.radius, model.l2)


def report(context: Context, output: Tensor, claims: list[Claim | None]) -> Findings | None:
    """Return each trial's theorem and bound, and the measured excess risk over the optimum in the ball.

    None without claims. For the hinge loss, `optimum_gap` bounds how far the true optimum is below the one found. If
    the gap makes a measurement too uncertain, the measurement is null, with the `reason`.
    """
    if not any(claims):
        return None
    claimed = [
        {
            "theorem": None if claim is None else claim.theorem,
            "excess_risk_bound": None if claim is None else claim.bound,
        }
        for claim in claims
    ]
    return Findings(claimed, _measured(context, output))


def _measured(context: Context, output: Tensor) -> list[dict[str, Any]]:
    model = context.recipes[0].model
    if not isinstance(model, ConvexModel):
        return [{"excess_risk": None, "reason": "the model is not convex"}] * context.trials
    risk, records = linear_risk(context), len(context.table)
    l2 = context.column([l2_of(recipe) for recipe in context.recipes]).squeeze(1).double()
    radii = context.column(radii_of(context.recipes)).squeeze(1).double()

    def objective(values: Tensor) -> Tensor:
        values = values.to(risk.rows.z)
        return risk.loss_sums(values) / records + l2 / 2 * values.double().square().sum(dim=1)

    if model.known.curvature is None:
        require_hinge(risk.loss)
        found = minimise_hinge(risk.rows, records * l2, radii, _CERTIFIED * records)
        gaps = (objective(output) - found.objective / records, found.gap / records)
        return [_certified(float(excess), float(gap)) for excess, gap in zip(*gaps, strict=True)]
    # minimal strong convexity, so that Newton's step exists if l2 is 0; it hardly moves the optimum
    curvature = records * l2.clamp_min(1e-9)
    problem = Tilted(risk.rows, risk.loss, curvature, torch.zeros_like(context.pack.values, dtype=torch.float64))
    best = minimise_on_ball(problem, radii, _TOLERANCE * records).values
    return [{"excess_risk": float(gap)} for gap in objective(output) - objective(best)]


def _certified(excess: float, gap: float) -> dict[str, Any]:
    if gap <= _LEAST_CERTAIN:
        return {"excess_risk": excess, "optimum_gap": gap}
    reason = "the optimum of the hinge loss is not known exactly enough; raise model.l2 or set model.radius"
    return {"excess_risk": None, "optimum_gap": None, "reason": reason}
