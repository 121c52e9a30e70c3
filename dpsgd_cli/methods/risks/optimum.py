"""Optima without privacy, with which results are compared: L-BFGS (Liu and Nocedal 1989), one trial at a time.

The hinge has a kink, so it is smoothed (`HuberHinge`) less and less; each minimiser starts the next search. The slopes
of a smoothed hinge are a feasible point of the dual problem. Its value is a lower bound on the objective of any
weights. The gap between the two is the certificate; it falls with the square of the smoothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq, minimize

from dpsgd_cli.engine.losses import Hinge, HuberHinge, Quantile
from dpsgd_cli.errors import ModelError
from dpsgd_cli.methods.risks.risk import LinearRisk

_WIDTHS = (0.5, 0.1, 0.02, 4e-3, 8e-4, 1.6e-4)
_CERTIFIED = 1e-6


@dataclass(frozen=True)
class Optimum:
    """Weights (P,) in the ball, their objective, and a bound on how far it is above the minimum: `gap`.

    `gap` is 0 for a smooth loss, where no certificate is computed, and infinite if nothing bounds the weights.
    """

    values: np.ndarray
    objective: float
    gap: float = 0.0


def optimum(risk: LinearRisk, l2: float, radius: float = math.inf, most_steps: int = 5000) -> Optimum:
    """Minimise the mean loss + l2 / 2 |w|^2 over |w| <= radius on one trial's records, with P weights. NON-PRIVATE.

    Guarantee: for the hinge, no weights in the ball have an objective below `objective - gap`, to rounding.

    Args:
        risk: records of one trial (`SignedRows.of_trial`).
        l2: coefficient, at least 0.
        most_steps: of each search, after which the best weights found so far count.

    Raises ModelError for any other loss with a kink. Source of the gap: Boyd and Vandenberghe 2004, section 5.2 (weak
    duality).
    """
    if isinstance(risk.loss, Quantile):
        raise ModelError("no solver here finds the optimum of Quantile, which is not smooth")
    values = np.zeros(risk.rows.z.shape[1])
    if not isinstance(risk.loss, Hinge):
        values = _in_ball(risk, l2, radius, most_steps, values)
        return Optimum(values, objective(risk, l2, values))
    best, bound = Optimum(values, math.inf), -math.inf
    for width in _WIDTHS:
        smooth = LinearRisk(risk.rows, HuberHinge(width))
        # minimal strong convexity, so that the smoothed hinge has a minimiser
        values = _in_ball(smooth, max(l2, 1e-9), radius, most_steps, values)
        reached, bound = objective(risk, l2, values), max(bound, _dual(smooth, values, l2, radius))
        best = best if best.objective < reached else Optimum(values, reached)
        if best.objective - bound <= _CERTIFIED:
            break
    return Optimum(best.values, best.objective, best.objective - bound)


def _in_ball(risk: LinearRisk, l2: float, radius: float, most_steps: int, start: np.ndarray) -> np.ndarray:
    """Return the minimiser in the ball for a smooth loss; if the ball binds, by the multiplier m of |w|^2 / 2.

    On the sphere, the minimiser is that of the objective plus m / 2 |w|^2 for the unique m > 0 that puts it there, and
    its norm falls as m grows (Lagrange).
    """

    def solved(extra: float) -> np.ndarray:
        nonlocal start

        def both(w: np.ndarray) -> tuple[float, np.ndarray]:
            return objective(risk, l2 + extra, w), _gradient(risk, l2 + extra, w)

        options = {"maxiter": most_steps, "maxfun": 4 * most_steps, "ftol": 1e-15, "gtol": 1e-8}
        start = minimize(both, start, jac=True, method="L-BFGS-B", options=options).x
        return start

    found = solved(0.0)
    if np.linalg.norm(found) > radius:
        found = solved(math.exp(brentq(lambda m: np.linalg.norm(solved(math.exp(m))) - radius, -40, 30, xtol=1e-8)))
    return found * min(1.0, radius / max(float(np.linalg.norm(found)), 1e-300))


def objective(risk: LinearRisk, l2: float, w: np.ndarray) -> float:
    """Return the mean loss + l2 / 2 |w|^2 of one trial's records at weights w (P,). NON-PRIVATE."""
    values = torch.from_numpy(w).to(risk.rows.z).unsqueeze(0)
    return float(risk.loss_sums(values)[0]) / int(risk.rows.counts) + l2 / 2 * float(w @ w)


def _gradient(risk: LinearRisk, l2: float, w: np.ndarray) -> np.ndarray:
    z = risk.rows.z
    sums = risk.gradient_sums_at(torch.from_numpy(w).to(z).unsqueeze(0), z.new_full((1,), torch.inf))
    return np.asarray(sums[0].double().cpu().numpy() / int(risk.rows.counts) + l2 * w)


def _dual(smooth: LinearRisk, values: np.ndarray, l2: float, radius: float) -> float:
    """Return a lower bound on the hinge's objective, from minus the smoothed slopes at `values`: a (N,) in [0, 1].

    max(0, 1 - t) >= a (1 - t), so the objective is at least mean a + min over the ball of l2/2 |w|^2 - v.w, with
    v = mean a z. The minimum is at |w| = min(radius, |v| / l2) along v.
    """
    rows = smooth.rows
    shares = -smooth.loss.slope(rows.z.double() @ torch.from_numpy(values).to(rows.z.device))
    if rows.weights is not None:
        shares = shares * rows.weights[:, 0]
    pull = float(torch.linalg.vector_norm(shares @ rows.z.double())) / int(rows.counts)
    length = min(radius, pull / l2 if l2 else math.inf if pull else 0.0)
    return (
        float(shares.sum()) / int(rows.counts) + (l2 / 2 * length - pull) * length if length < math.inf else -math.inf
    )
