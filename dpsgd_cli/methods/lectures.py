"""Error bounds that the lectures state, as functions of public numbers, and the error that a run measures beside them.

Noise is given as a noise multiplier: standard deviation over the L2 sensitivity of the release. Theorems are stated
for MEAN losses of n records, L-Lipschitz in w, over a ball of radius R in P dimensions. The noise of Lemmas 15.1 and
15.5 is in `accountants/composition.py`; the real cost of a run is the accountant's price of its ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.methods.risks.constants import constants_of

if TYPE_CHECKING:
    from torch import Tensor

    from dpsgd_cli.methods.context import Context


@dataclass(frozen=True)
class PublicProblem:
    """Public numbers of a constrained problem: n, P, Lipschitz constant L, radius R, strong convexity lambda."""

    records: int
    weights: int
    lipschitz: float
    radius: float
    strong_convexity: float = 0.0


def second_moment(problem: PublicProblem, noise: float) -> float:
    """Return the bound B^2 on E|z_t|^2 of a noisy mean gradient: (L + lambda R)^2 + P noise^2. Lecture 9, section 7.

    `noise` is the standard deviation of the noise on the MEAN gradient, per coordinate.
    """
    whole = problem.lipschitz + problem.strong_convexity * problem.radius
    return whole**2 + problem.weights * noise**2


def excess_risk_of_average(problem: PublicProblem, noise: float, steps: int, rate: float) -> float:
    """Return a bound on the expected excess risk of the averaged iterates: R^2 / (2 T rate) + rate B^2 / 2.

    Guarantee: for projected descent from 0, convex losses and any constant rate; least at rate = R / (B sqrt T), where
    it is R B / sqrt T. Source: Lecture 9, Theorem 1 and its proof.
    """
    moment = second_moment(problem, noise)
    return problem.radius**2 / (2 * steps * rate) + rate * moment / 2


def excess_risk_of_last(problem: PublicProblem, noise: float, steps: int) -> float:
    """Return a bound on the expected excess risk of the last iterate at the rates of Lecture 15.

    2R (rate D/(G sqrt t), D = 2 R): D G (2 + log T) / sqrt T, and with strong convexity alpha (rate 1/(alpha t)):
    17 G^2 (1 + log T) / (alpha T), where G^2 bounds E|z_t|^2. Constants: Shamir and Zhang 2013, Theorems 2 and 1;
    Lemmas 15.6 and 15.7 give their orders.
    """
    moment = second_moment(problem, noise)
    if problem.strong_convexity > 0:
        return 17 * moment * (1 + math.log(steps)) / (problem.strong_convexity * steps)
    return 2 * problem.radius * math.sqrt(moment) * (2 + math.log(steps)) / math.sqrt(steps)


def lecture_9_demand(problem: PublicProblem, error: float, epsilon: float, delta: float) -> tuple[int, int]:
    """Return the steps and the records that Lecture 9 requires for a given error.

    T >= 4 R^2 L^2 / error^2 and n >= 2 R L s sqrt(P) / error, where s = sqrt(2 log(1.25/delta)) / epsilon is the noise
    multiplier of one step (section 5, with the mechanism of Lecture 15, Lemma 15.3, for epsilon < 1).
    Guarantee: with them the expected excess risk of Lecture 9's algorithm is at most `error`. Source: Lecture 9,
    section 7.
    """
    if not error > 0:
        raise PrivacyError(f"the wanted error is {error:g}, but must be positive")
    reach = problem.radius * problem.lipschitz
    if not 0 < epsilon < 1:
        raise PrivacyError(
            f"Lecture 9 is proved for epsilon below 1, not {epsilon:g}; lower it, or take privacy.accountant: gaussian"
        )
    scale = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return math.ceil(4 * (reach / error) ** 2), math.ceil(2 * reach * scale * math.sqrt(problem.weights) / error)


_LEAST_CERTAIN = 1e-4
"""The largest gap, of a mean loss, with which a measurement is reported."""


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
    from dpsgd_cli.engine.losses import Hinge
    from dpsgd_cli.methods.risks.optimum import Optimum, objective, optimum
    from dpsgd_cli.methods.risks.problem import l2_of, linear_risk, radii_of
    from dpsgd_cli.methods.risks.risk import LinearRisk

    if not isinstance(context.recipes[0].model, ConvexModel):
        return [{"excess_risk": None, "reason": "the model is not convex"}] * context.trials
    risk, radii = linear_risk(context), radii_of(context.recipes)
    found, known = list[dict[str, Any]](), dict[tuple[float, float, bytes], Optimum]()
    for trial, recipe in enumerate(context.recipes):
        l2, rows = l2_of(recipe), risk.rows.of_trial(trial).exact()
        key = l2, radii[trial], b"" if rows.weights is None else rows.weights.cpu().numpy().tobytes()
        own = LinearRisk(rows, risk.loss)
        if key not in known:
            known[key] = optimum(own, l2, radii[trial])
        excess = objective(own, l2, output[trial].double().cpu().numpy()) - known[key].objective
        found.append(_certified(excess, known[key].gap) if isinstance(risk.loss, Hinge) else {"excess_risk": excess})
    return found


def _certified(excess: float, gap: float) -> dict[str, Any]:
    if gap <= _LEAST_CERTAIN:
        return {"excess_risk": excess, "optimum_gap": gap}
    reason = "the optimum of the hinge loss is not known exactly enough; raise model.l2 or set model.radius"
    return {"excess_risk": None, "optimum_gap": None, "reason": reason}
