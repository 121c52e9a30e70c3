"""Minimisers of convex problems, for R trials at once: damped Newton steps in double precision.

The objective is sum phi(z.w) + k/2 |w|^2 + b.w. The Hessian only shapes the step, so it is computed from at most
`_SAMPLE` of the rows where phi is curved. The gradient, which decides when the search ends, uses all rows.

The hinge has a kink, so it is smoothed (`HuberHinge`) less and less; each minimiser starts the next search. The slopes
of a smoothed hinge are a feasible point of the dual problem. Its value is a lower bound on the objective of any
weights. The gap between the two is the certificate; it falls with the square of the smoothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsgd_cli.engine.losses import Hinge, HuberHinge, MarginLoss
from dpsgd_cli.errors import ModelError, RunError
from dpsgd_cli.methods.risks.rows import SignedRows

_NEWTON_STEPS = 100
_SAMPLE = 40_000
_HALVINGS = 40
_WIDTHS = (0.5, 0.1, 0.02, 4e-3, 8e-4, 1.6e-4)
_TRACE = 1e-9
_TOLERANCE = 1e-7
_MOST_STEPS = 60


@dataclass(frozen=True)
class Minimum:
    """Weights (R, P) and the norm (R,) of the objective's gradient there, both float64."""

    values: Tensor
    gradient_norms: Tensor


@dataclass(frozen=True)
class Tilted:
    """Objective sum phi(z.w) + curvature / 2 |w|^2 + tilt.w of each trial: curvature (R,) > 0, tilt (R, P), float64."""

    rows: SignedRows
    loss: MarginLoss
    curvature: Tensor
    tilt: Tensor

    def objective(self, margins: Tensor, values: Tensor) -> Tensor:
        losses = self.loss.value(margins)
        if self.rows.weights is not None:
            losses = losses * self.rows.weights
        square = values.square().sum(dim=1)
        return losses.sum(dim=0) + self.curvature / 2 * square + (self.tilt * values).sum(dim=1)

    def gradient(self, z: Tensor, margins: Tensor, values: Tensor) -> Tensor:
        slopes = self.loss.slope(margins)
        if self.rows.weights is not None:
            slopes.mul_(self.rows.weights)
        return slopes.T @ z + self.curvature.unsqueeze(1) * values + self.tilt


def minimise(problem: Tilted, start: Tensor, tolerance: float | Tensor, most_steps: int) -> Minimum:
    """Take Newton steps with backtracking until each gradient norm is at most `tolerance`, at most `most_steps`.

    A search may stop early: the caller checks `Minimum.gradient_norms`.
    """
    z, values = problem.rows.z.double(), start.double().clone()
    margins = _margins(problem.rows, z, values)
    for _ in range(most_steps):
        gradient = problem.gradient(z, margins, values)
        norms = torch.linalg.vector_norm(gradient, dim=1)
        open_ = norms > tolerance
        if not bool(open_.any()):
            return Minimum(values, norms)
        step = torch.linalg.solve(_hessians(problem, margins), gradient) * open_.unsqueeze(1)
        along = z @ step.T
        lengths = _backtrack(problem, (margins, along), (values, step), (gradient * step).sum(dim=1))
        values -= lengths.unsqueeze(1) * step
        margins = _margins(problem.rows, z, values)
    return Minimum(values, torch.linalg.vector_norm(problem.gradient(z, margins, values), dim=1))


def minimise_surely(problem: Tilted, steepest: Tensor, tolerance: Tensor) -> Tensor:
    """Return weights (R, P) at which each trial's gradient norm is at most its `tolerance` (R,) > 0.

    `steepest` (R,) bounds the largest eigenvalue of the Hessian everywhere. Guarantee: in exact arithmetic such weights
    are always found. Newton's method nearly always succeeds; otherwise the accelerated gradient method does, after a
    number of steps that is known beforehand. Raises RunError if rounding prevents it; the message does not depend on
    the data.
    """
    found = minimise(problem, torch.zeros_like(problem.tilt), tolerance, _NEWTON_STEPS)
    there = found.gradient_norms <= tolerance
    values = found.values
    if not bool(there.all()):
        descended = _accelerated(problem, steepest, tolerance)
        there |= descended.gradient_norms <= tolerance
        values = torch.where((found.gradient_norms <= tolerance).unsqueeze(1), values, descended.values)
    if not bool(there.all()):
        raise RunError(
            "rounding kept the search for a minimiser from its end, so nothing is released: scale the features to a"
            " smaller bound, or raise model.l2"
        )
    return values


def _accelerated(problem: Tilted, steepest: Tensor, tolerance: Tensor) -> Minimum:
    """Run Nesterov's method from 0 for a k-strongly convex, M-smooth objective until every gradient is small enough.

    Let c = M / k and E_t = (1 - 1/sqrt(c))^t (f(0) - f* + k/2 |w*|^2). The bracket is at most |grad f(0)|^2 / k.
    Iterates have f(w_t) - f* <= E_t, hence |w_t - w*|^2 <= 2 E_t / k. Gradients are computed at the extrapolated points
    v_t, which lie within 3 sqrt(2 E_(t-1) / k) of w*: |grad f(v_t)|^2 <= 18 c^2 (1 - 1/sqrt(c))^(t-1) |grad f(0)|^2.
    So 1 + sqrt(c) log(18 c^2 |grad f(0)|^2 / tolerance^2) steps are enough. Source: Nesterov 2018, "Lectures on Convex
    Optimization", method 2.2.22.
    """
    z, root = problem.rows.z.double(), (steepest / problem.curvature).sqrt()
    carry = ((root - 1) / (root + 1)).unsqueeze(1)
    values = ahead = torch.zeros_like(problem.tilt)
    gradient = problem.gradient(z, _margins(problem.rows, z, ahead), ahead)
    norms = torch.linalg.vector_norm(gradient, dim=1)
    most = root * (18 * root**4 * (norms / tolerance).square().clamp_min(1.0)).log()
    for _ in range(1 + math.ceil(float(most.max()))):
        going = (norms > tolerance).unsqueeze(1)
        if not bool(going.any()):
            break
        after = ahead - gradient / steepest.unsqueeze(1)
        ahead, values = torch.where(going, after + carry * (after - values), ahead), after
        gradient = problem.gradient(z, _margins(problem.rows, z, ahead), ahead)
        norms = torch.linalg.vector_norm(gradient, dim=1)
    return Minimum(ahead, norms)


def minimise_on_ball(
    problem: Tilted, radii: Tensor, tolerance: float, most_steps: int = 100, start: Tensor | None = None
) -> Minimum:
    """Return each trial's minimiser over |w| <= radius; if the ball binds, by bisection on a multiplier of |w|^2 / 2.

    Lagrange: on the sphere, the minimiser is that of the objective plus m/2 |w|^2 for the unique m > 0 that puts it
    there, and its norm falls as m grows. The result lies inside the ball, to 1e-6 of its radius.
    """
    free = minimise(problem, torch.zeros_like(problem.tilt) if start is None else start, tolerance, most_steps)
    outside = torch.linalg.vector_norm(free.values, dim=1) > radii
    if not bool(outside.any()):
        return free
    low, high = torch.full_like(radii, -30.0), torch.full_like(radii, 30.0)
    found, best = free, free
    for _ in range(60):
        middle = (low + high) / 2
        extra = torch.where(outside, middle.exp(), 0.0)
        tilted = replace(problem, curvature=problem.curvature + extra)
        found = minimise(tilted, found.values, tolerance, most_steps)
        norms = torch.linalg.vector_norm(found.values, dim=1)
        inside = norms <= radii
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
        best = Minimum(torch.where(inside.unsqueeze(1), found.values, best.values), found.gradient_norms)
        if bool((~outside | (inside & (norms >= radii * (1 - 1e-6)))).all()):
            break
    return best


def _margins(rows: SignedRows, z: Tensor, values: Tensor) -> Tensor:
    margins = z @ values.T
    return margins if rows.offset is None else margins.add_(rows.offset.double().unsqueeze(1))


def _hessians(problem: Tilted, margins: Tensor) -> Tensor:
    """Estimate Hessians (R, P, P) from evenly spaced rows among those with curvature, scaled to all of these."""
    rows, curvature = problem.rows, problem.loss.curvature(margins)
    if rows.weights is not None:
        curvature = curvature * rows.weights
    stacked = torch.stack([_hessian(rows.z, column.to(rows.z.dtype)) for column in curvature.T])
    return stacked + torch.diag_embed(problem.curvature.unsqueeze(1).expand(-1, rows.z.shape[1]))


def _hessian(z: Tensor, curvature: Tensor) -> Tensor:
    curved = curvature.nonzero().squeeze(1)
    stride = max(1, -(-len(curved) // _SAMPLE))
    if stride > 1 or len(curved) < len(z):
        z, curvature = z[curved[::stride]], curvature[curved[::stride]]
    return ((z * curvature.unsqueeze(1)).T @ z).double() * stride


def _backtrack(
    problem: Tilted, line: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], decrease: Tensor
) -> Tensor:
    """Halve each trial's step length from 1 until the objective falls by 1e-4 of the linear prediction."""
    (margins, along), (values, step) = line, weights
    before = problem.objective(margins, values)
    lengths = torch.ones_like(before)
    for _ in range(_HALVINGS):
        after = problem.objective(margins - along * lengths, values - lengths.unsqueeze(1) * step)
        # near the minimum rounding hides the decrease: accept a step whose increase is within rounding
        bad = after > before - 1e-4 * lengths * decrease + 1e-12 * before.abs()
        if not bool(bad.any()):
            break
        lengths = torch.where(bad, lengths / 2, lengths)
    return lengths


@dataclass(frozen=True)
class Optimum:
    """Weights (R, P) in the ball, their objective (R,), and a bound on how far it is from the minimum: gap (R,)."""

    values: Tensor
    objective: Tensor
    gap: Tensor


def require_hinge(loss: MarginLoss) -> None:
    """Raise ModelError for a loss with a kink that `minimise_hinge` does not solve."""
    if type(loss) is not Hinge:
        raise ModelError(f"no solver here finds the optimum of {type(loss).__name__}, which is not smooth")


def minimise_hinge(rows: SignedRows, curvature: Tensor, radii: Tensor, wanted: float) -> Optimum:
    """Minimise sum max(0, 1 - z.w) + curvature / 2 |w|^2 over |w| <= radius, to a gap of `wanted` if possible.

    Guarantee: no weights in the ball have an objective below `objective - gap`, to rounding. The gap is infinite if
    neither the curvature nor the radius bounds the weights.

    Args:
        rows: N classification records of R trials.
        curvature: k >= 0 of each trial, (R,), float64: records times the L2 coefficient.
        radii: radius of each trial's ball, (R,), float64; inf for none.
        wanted: gap of the sum at which smoothing stops.

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
    """Return a lower bound (R,) on the objective, from any `shares` a (N, R) in [0, 1].

    max(0, 1 - t) >= a (1 - t), so the objective is at least sum a + min over the ball of k/2 |w|^2 - v.w, with
    v = sum a z. The minimum is at |w| = min(radius, |v| / k) along v.
    """
    if rows.weights is not None:
        shares = shares * rows.weights
    pull = torch.linalg.vector_norm(shares.T @ rows.z.double(), dim=1)
    # if v = 0 (no record inside the margin), the minimum is at 0: 0 / 0 is 0 here
    length = torch.minimum(radii, (pull / curvature).nan_to_num(nan=0.0, posinf=torch.inf))
    least = curvature / 2 * length.square() - pull * length
    return shares.sum(dim=0) + torch.where(length.isfinite(), least, -torch.inf)
