"""The optimum of the hinge loss on a ball, with a proof of how good it is, for R trials at once.

The hinge has a kink, so it is smoothed (`HuberHinge`) by less and less, each minimiser the start of the next search.
The slopes of a smoothed hinge are a feasible point of the dual problem, whose value no weights can go below: the
distance between the two is the certificate, and falls with the square of the smoothing.

Not here: the search itself (`newton.py`), what the optimum is for (`methods/excess_risk.py`, `methods/baselines.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsgd_cli.core.problems.losses import Hinge, HuberHinge
from dpsgd_cli.core.problems.newton import Tilted, minimise_on_ball
from dpsgd_cli.core.problems.rows import SignedRows

_WIDTHS = (0.5, 0.1, 0.02, 4e-3, 8e-4, 1.6e-4)
_TRACE = 1e-9
_TOLERANCE = 1e-7
_MOST_STEPS = 60


@dataclass(frozen=True)
class Optimum:
    """Weights (R, P) in the ball, their objective (R,), and how much lower any others in it could be: gap (R,)."""

    values: Tensor
    objective: Tensor
    gap: Tensor


def minimise_hinge(rows: SignedRows, curvature: Tensor, radii: Tensor, wanted: float) -> Optimum:
    """Minimise sum max(0, 1 - z.w) + curvature / 2 |w|^2 over |w| <= radius, to a gap of `wanted` where it gets there.

    Guarantee: no weights of the ball have an objective below `objective - gap`, to rounding; the gap is infinite
    where neither the curvature nor the radius bounds the weights.

    Args:
        rows: N classification records of R trials.
        curvature: k >= 0 of each trial, (R,), float64: records times the L2 coefficient.
        radii: radius of each trial's ball, (R,), float64; inf for none.
        wanted: gap of the sum at which smoothing need go no further.

    Source: Boyd and Vandenberghe 2004, section 5.2 (weak duality).
    """
    values = torch.zeros(len(radii), rows.z.shape[1], dtype=torch.float64, device=rows.z.device)
    tilt, trace = torch.zeros_like(values), _TRACE * len(rows)
    best = torch.full_like(radii, torch.inf)
    bound, kept = -best, values
    for width in _WIDTHS:
        problem = Tilted(rows, HuberHinge(width), curvature.clamp_min(trace), tilt)
        values = minimise_on_ball(problem, radii, _TOLERANCE * len(rows), _MOST_STEPS, values).values
        margins = rows.z.double() @ values.T
        reached = Tilted(rows, Hinge(), curvature, tilt).objective(margins, values)
        bound = torch.maximum(bound, _dual(rows, -problem.loss.slope(margins), curvature, radii))
        kept = torch.where((reached < best).unsqueeze(1), values, kept)
        best = torch.minimum(best, reached)
        if bool((best - bound <= wanted).all()):
            break
    return Optimum(kept, best, best - bound)


def _dual(rows: SignedRows, shares: Tensor, curvature: Tensor, radii: Tensor) -> Tensor:
    """A lower bound (R,) on the objective, from any `shares` a (N, R) in [0, 1].

    max(0, 1 - t) >= a (1 - t), so the objective is at least sum a + min over the ball of k/2 |w|^2 - v.w, with
    v = sum a z: the minimum lies at |w| = min(radius, |v| / k) along v.
    """
    if rows.weights is not None:
        shares = shares * rows.weights
    pull = torch.linalg.vector_norm(shares.T @ rows.z.double(), dim=1)
    # without a pull (no record inside the margin) nothing is gained by moving: 0 / 0 is 0 here
    length = torch.minimum(radii, (pull / curvature).nan_to_num(nan=0.0, posinf=torch.inf))
    least = curvature / 2 * length.square() - pull * length
    return shares.sum(dim=0) + torch.where(length.isfinite(), least, -torch.inf)
