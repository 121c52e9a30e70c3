"""Full-batch steps on a convex problem: two matrix products for all trials, whatever is done with the sum.

Mixed into `gd` and `dp-gd`. Other models take the packed path of `gradient.py`. Not here: noise, prices.
"""

from __future__ import annotations

import math
from functools import cached_property

from dpsgd_cli.core.clipping import Diagnostics
from dpsgd_cli.core.problems.linear import LinearRisk
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Theory
from dpsgd_cli.methods.excess_risk import Claim, problem_of, report
from dpsgd_cli.methods.gradient import GradientMethod, section_of
from dpsgd_cli.methods.problem import linear_risk
from dpsgd_cli.privacy.lectures import excess_risk_of_average
from dpsgd_cli.recipe.schema.learning_rate import rate_at
from dpsgd_cli.recipe.schema.method import AllIterates, SgdSettings
from dpsgd_cli.recipe.schema.model import ConvexModel


class FullBatchMethod(GradientMethod):
    """Descent that sees every record in every step."""

    @cached_property
    def risk(self) -> LinearRisk | None:
        """The fast path, for convex models whose rows all trials share."""
        context = self.context
        convex = isinstance(context.recipes[0].model, ConvexModel)
        return linear_risk(context) if convex and not context.table.per_trial else None

    @cached_property
    def merged(self) -> LinearRisk:
        """The same sums from fewer rows, for steps that nothing is told of."""
        assert self.risk is not None
        return LinearRisk(self.risk.rows.merged(), self.risk.loss)

    def add_sums(self, epoch: int, step: int, seen: Diagnostics) -> None:
        if self.risk is None:
            super().add_sums(epoch, step, seen)
            return
        pack, clipping = self.context.pack, self.clipping()
        norms = clipping.norms[0] if clipping is not None else pack.values.new_full((pack.trials,), math.inf)
        wanted = (epoch + 1) % self.context.recipes[0].runtime.evaluate_every == 0 or epoch + 1 == self.epochs
        sums = self.risk.gradient_sums_at(pack.values, norms, seen) if wanted else None
        pack.sums.copy_(self.merged.gradient_sums_at(pack.values, norms) if sums is None else sums)

    def theory(self) -> Theory | None:
        """Lecture 9, Theorem 1 for the average of all iterates, at any constant rate without momentum."""
        if self.risk is None:
            return None
        return report(self.context, self.output, [self._claim(trial) for trial in range(self.context.trials)])

    def _claim(self, trial: int) -> Claim | None:
        settings, clipping = section_of(self.context.recipes[trial]), self.clipping()
        clip = math.inf if clipping is None else clipping.sensitivities[trial]
        problem = problem_of(self.context, trial, clip)
        plain = isinstance(settings.optimizer, SgdSettings) and settings.optimizer.momentum == 0
        averaged = isinstance(settings.averaging, AllIterates)
        if problem is None or self.rate_changes or not plain or not averaged or settings.weight_decay:
            return None
        steps, rate = self.lengths[trial], float(self.learning_rate[trial])
        bound = excess_risk_of_average(problem, self.noise_of_mean(trial), steps, rate)
        return Claim("Lecture 9, Theorem 1", bound)

    def noise_of_mean(self, trial: int) -> float:
        """Largest standard deviation of the noise on the mean gradient, per coordinate."""
        plan = self.context.plans[trial]
        if plan is None:
            return 0.0
        return max(plan.noise_multipliers) * plan.sensitivity / len(self.context.table)

    def theorem_rates(self, epoch: int, second_moments: list[float]) -> list[float]:
        """What `method.learning_rate` says of `epoch`; for `theorem`, R / (B sqrt T).

        Lecture 9, Theorem 1, with E|z|^2 <= B^2 and the ball's radius R.
        """
        rates = []
        for recipe, length, moment in zip(self.context.recipes, self.lengths, second_moments, strict=True):
            rate, model = section_of(recipe).learning_rate, recipe.model
            if rate == "theorem":
                if not isinstance(model, ConvexModel) or model.radius is None or not moment < math.inf:
                    raise RecipeError(
                        "method.learning_rate: theorem needs model.kind: convex with a radius and bounded gradients"
                        " (privacy.clipping, or a loss and features with public bounds); give a number"
                    )
                rate = model.radius / math.sqrt(moment * length * self.steps)
            rates.append(rate_at(rate, epoch, length))
        return rates
