"""Objective perturbation: the exact minimiser of the objective plus a random linear term.

Kifer, Smith and Thakurta 2012, Algorithm 1 with Gaussian noise, in sums: minimise sum phi(z.w) + (N l2 + D)/2 |w|^2 +
b.w with b ~ N(0, s^2 I), s^2 = L^2 (8 log(2/delta) + 4 eps) / eps^2, and N l2 + D >= 2 beta / eps.

Released: the minimiser, once. Guarantee: (eps, delta)-DP under add-remove (N fixed and public). Proof for linear
models: w determines b = -(gradient at w), a bijection as the objective is strongly convex. One record more, of gradient
g = phi'(z.w) z and Hessian phi'' z z^T of rank one, changes the Jacobian's determinant by a factor in [1, 1 + beta /
(N l2 + D)], which is at most e^(eps/2); and it moves b by g, of norm at most L and fixed direction z, so that
the ratio of densities of b is at most e^(eps/2) unless |b.z| / |z| > s sqrt(2 log(2/delta)), which has probability at
most delta. Conditions, all checked: a smooth loss (beta), public bounds on features (L = sup|phi'| B), a linear
model, and a minimiser that was reached: the theorem says nothing of other points, so a search that ends early is an
error. Huber's phi'' jumps; the density formula then holds almost everywhere, which is enough.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpsgd_cli.core.problems.build import linear_risk
from dpsgd_cli.core.problems.newton import Tilted, minimise
from dpsgd_cli.errors import PrivacyError, RunError
from dpsgd_cli.methods.base import Context
from dpsgd_cli.methods.one_shot import OneShot
from dpsgd_cli.privacy.lipschitz import Constants, problem_constants
from dpsgd_cli.privacy.mechanism import ApproximateDP
from dpsgd_cli.recipe import schema


def noise_scale(constants: Constants, epsilon: float, delta: float) -> float:
    """Standard deviation of b: L sqrt(8 log(2/delta) + 4 eps) / eps."""
    return constants.lipschitz * math.sqrt(8 * math.log(2 / delta) + 4 * epsilon) / epsilon


class ObjectivePerturbation(OneShot):
    """All trials are solved together; budgets and L2 terms may differ."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.constants = [problem_constants(recipe, context.feature_bound) for recipe in context.recipes]
        risk = linear_risk(context)
        self.loss, self.rows = risk.loss, risk.rows.shrunk(self.constants[0].feature_bound)
        self.promised = [self._promised(trial) for trial in range(context.trials)]

    def _promised(self, trial: int) -> ApproximateDP:
        plan = self.context.plans[trial]
        mechanism = plan.epochs[0][0].mechanism if plan is not None else None
        if not isinstance(mechanism, ApproximateDP):
            raise PrivacyError("objective-perturbation was started without a plan")
        return mechanism

    def solve(self) -> None:
        context, settings = self.context, self.context.recipes[0].method
        assert isinstance(settings, schema.ObjectivePerturbationMethod)
        self.charge()
        trials, device = range(context.trials), self.rows.z.device
        curvature = torch.tensor([self._curvature(trial) for trial in trials], dtype=torch.float64, device=device)
        tilt = torch.stack([self._tilt(trial) for trial in trials]).to(device)
        problem = Tilted(self.rows, self.loss, curvature, tilt)
        records = len(context.table)
        found = minimise(problem, torch.zeros_like(tilt), settings.tolerance * records, settings.most_steps)
        worst = float(found.gradient_norms.max()) / records
        if not worst <= settings.tolerance:
            raise RunError(
                f"objective-perturbation: after {settings.most_steps} steps the mean gradient has norm {worst:.3g},"
                f" over method.tolerance {settings.tolerance:g}; the guarantee is for the exact minimiser, so nothing"
                " is released: raise method.most_steps"
            )
        context.pack.values.copy_(found.values)

    def _curvature(self, trial: int) -> float:
        """N l2 + D, at least 2 beta / eps."""
        known = self.constants[trial]
        return max(
            len(self.context.table) * known.strong_convexity, 2 * known.smoothness / self.promised[trial].epsilon
        )

    def _tilt(self, trial: int) -> Tensor:
        promised = self.promised[trial]
        scale = noise_scale(self.constants[trial], promised.epsilon, promised.delta)
        empty = torch.empty(self.context.pack.size, dtype=torch.float64)
        return self.context.streams[trial].normal("objective", 0, empty) * scale
