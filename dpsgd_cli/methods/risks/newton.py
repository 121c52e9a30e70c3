"""Minimisers of convex problems, for R trials at once: damped Newton steps in double precision.

The objective is sum phi(z.w) + k/2 |w|^2 + b.w. The Hessian only shapes the step, so it is computed from at most
`_SAMPLE` of the rows where phi is curved. The gradient, which decides when the search ends, uses all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsgd_cli.engine.losses import MarginLoss
from dpsgd_cli.errors import RunError
from dpsgd_cli.methods.risks.rows import SignedRows

_NEWTON_STEPS = 100
_SAMPLE = 40_000
_HALVINGS = 40


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


def _newton(problem: Tilted, tolerance: Tensor) -> Minimum:
    """Take at most `_NEWTON_STEPS` steps with backtracking from 0, until each gradient norm is at most `tolerance`."""
    z, values = problem.rows.z.double(), torch.zeros_like(problem.tilt)
    margins = _margins(problem.rows, z, values)
    for _ in range(_NEWTON_STEPS):
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
    found = _newton(problem, tolerance)
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
