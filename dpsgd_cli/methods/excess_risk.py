"""Theory beside practice: what a theorem says of a lecture method's excess risk, and what was measured.

NON-PRIVATE: the measurement compares with the optimum on the training records. Not here: the theorems
(`privacy/lectures.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.core.problems.optimum import Tilted, minimise_hinge, minimise_on_ball, require_hinge
from dpsgd_cli.methods.base import Context, Findings
from dpsgd_cli.methods.problem import l2_of, linear_risk, radii_of
from dpsgd_cli.privacy.convex import constants_of
from dpsgd_cli.privacy.lectures import PublicProblem
from dpsgd_cli.recipe.schema.model import ConvexModel

_TOLERANCE = 1e-7
# what smoothing stops at, and what is still told, of a mean loss
_CERTIFIED = 1e-6
_LEAST_CERTAIN = 1e-4


@dataclass(frozen=True)
class Claim:
    """One trial's theorem: its name, and the bound on the expected excess risk of what the method publishes."""

    theorem: str
    bound: float


def problem_of(context: Context, trial: int, clip: float) -> PublicProblem | None:
    """The public numbers that the theorems take; None where no theorem covers the recipe.

    They need a ball, public bounds that make the loss Lipschitz, and no gradient that clipping changes.
    """
    model, bound = context.recipes[trial].model, context.feature_bound
    if not isinstance(model, ConvexModel) or model.radius is None or bound is None:
        return None
    known = constants_of(model, bound)
    if not known.lipschitz <= clip * (1 + 1e-6):
        return None
    return PublicProblem(len(context.table), context.pack.size, known.lipschitz, model.radius, model.l2)


def report(context: Context, output: Tensor, claims: list[Claim | None]) -> Findings | None:
    """Theorem and bound a trial, and the measured excess risk over the optimum in the ball; None without claims.

    For the hinge loss, `optimum_gap` says how far below the optimum that was found the true one can lie. A measurement
    that this leaves uncertain is null, with the `reason`.
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
    # a trace of strong convexity, so that Newton's step exists where l2 is 0; it moves the optimum by next to nothing
    curvature = records * l2.clamp_min(1e-9)
    problem = Tilted(risk.rows, risk.loss, curvature, torch.zeros_like(context.pack.values, dtype=torch.float64))
    best = minimise_on_ball(problem, radii, _TOLERANCE * records).values
    return [{"excess_risk": float(gap)} for gap in objective(output) - objective(best)]


def _certified(excess: float, gap: float) -> dict[str, Any]:
    if gap <= _LEAST_CERTAIN:
        return {"excess_risk": excess, "optimum_gap": gap}
    reason = "the optimum of the hinge loss is not known exactly enough; raise model.l2 or set model.radius"
    return {"excess_risk": None, "optimum_gap": None, "reason": reason}
