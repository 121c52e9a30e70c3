"""Output perturbation: gradient descent for a fixed number of steps, then Gaussian noise on its last iterate.

Released: w_T plus N(0, (z S)^2), once. Sensitivity: S = `privacy/convex.py`, the distance that one record more can
drive two runs apart, for a step length at which steps do not expand; twice that under replace-one (remove one, add
one). Price: one Gaussian of noise multiplier z. Conditions, checked when the plan is made: a smooth loss, public
bounds on the features (enforced record by record). Source: Zhang, Zheng, Mou and Wang 2017, Algorithm 1.
"""

from __future__ import annotations

import torch

from dpsgd_cli.core.noise import NoiseSource, add_noise, noise_precision
from dpsgd_cli.core.problems.linear import LinearRisk
from dpsgd_cli.core.updates import project_to_ball
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import Context, OneShot
from dpsgd_cli.methods.problem import merged_risk, penalty_of, radii_of
from dpsgd_cli.privacy.convex import problem_constants, rate_of_descent
from dpsgd_cli.recipe.schema.convex import OutputPerturbationMethod


class OutputPerturbation(OneShot):
    """All trials share the number of steps."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.constants = [problem_constants(recipe, context.feature_bound) for recipe in context.recipes]
        risk = merged_risk(context)
        self.risk = LinearRisk(risk.rows.exact().shrunk(self.constants[0].feature_bound), risk.loss)

    def solve(self) -> None:
        context, settings = self.context, self.context.recipes[0].method
        assert isinstance(settings, OutputPerturbationMethod)
        self.charge()
        # a step is far smaller than the weights: in float32 rounding would drive two runs further apart than the proof
        values, records = torch.zeros_like(context.pack.values, dtype=torch.float64), len(context.table)
        rates = context.column([rate_of_descent(known, records) / records for known in self.constants]).double()
        bounds = context.column([known.lipschitz for known in self.constants]).squeeze(1).double()
        radii, penalty = context.column(radii_of(context.recipes)).double(), penalty_of(context).double()
        for _ in range(settings.steps):
            gradient = self.risk.gradient_sums_at(values, bounds) + penalty * values
            project_to_ball(values.sub_(gradient * rates), radii)
        scale = context.column([self._scale(trial) for trial in range(context.trials)])
        precision = noise_precision(context.streams, context.pack.values.dtype)
        add_noise(values, NoiseSource(context.streams, context.pack.size, values.device, precision).draw(0), scale)
        context.pack.values.copy_(project_to_ball(values, radii))

    def _scale(self, trial: int) -> float:
        plan = self.context.plans[trial]
        if plan is None:
            raise PrivacyError("output-perturbation was started without a plan")
        return plan.noise_multipliers[0] * plan.sensitivity
