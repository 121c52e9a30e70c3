"""Method `dp-sgd` with `batching: fixed`: one record per step (Lecture 15, Algorithm 3).

Released at each step: the clipped gradient of one record drawn uniformly, plus noise N(0, s^2). Sensitivity 2 C under
replace-one, s = z 2 C. Price: a Gaussian on a batch of fixed size 1 of n, by Renyi DP without replacement (Wang, Balle
and Kasiviswanathan 2019; accountant rdp), or by Lemma 15.5 where its proof holds (accountant lemma-15.5).

The mini-batch Algorithm 4 of the same lecture is `batching: poisson`. Its noise 4 s^2 C^2 is relative to C and to
replace-one; here a noise multiplier is relative to the sensitivity, which is C under add-remove.
"""

from __future__ import annotations

import math

import torch

from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.dp_sgd.settings import section_of
from dpsgd_cli.methods.lectures import Claim, excess_risk_of_last, problem_of, report
from dpsgd_cli.methods.risks.problem import l2_of


class LectureSgd(DpSgd):
    """Lecture DP-SGD: the learning rates of Lemmas 15.6 and 15.7, and their bounds on the excess risk."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        theory = [section_of(recipe).rate == "theorem" for recipe in context.recipes]
        self.any_by_theorem = any(theory)
        self.by_theorem = torch.tensor(theory, device=context.pack.values.device).unsqueeze(1)
        self.leads = context.column([self._lead(trial) for trial in range(context.trials)])
        self.powers = context.column([0.5 if l2_of(recipe) == 0 else 1.0 for recipe in context.recipes])

    def learning_rates(self, epoch: float) -> list[float]:
        constant = [section_of(recipe).rate == "theorem" for recipe in self.context.recipes]
        return [1.0] * len(constant) if all(constant) else super().learning_rates(epoch)

    def _lead(self, trial: int) -> float:
        """Return the rates' leading factor: 2R/G, over sqrt(t) (Lemma 15.6), or 1/lambda, over t (Lemma 15.7).

        Returns 0 if the rate is not `theorem`; raises RecipeError if there is neither a radius nor an L2 term.
        """
        recipe = self.context.recipes[trial]
        if section_of(recipe).rate != "theorem":
            return 0.0
        if l2_of(recipe) > 0:
            return 1 / l2_of(recipe)
        model = recipe.model
        if not isinstance(model, ConvexModel) or model.radius is None:
            raise RecipeError("method.learning_rate: theorem needs model.radius, or model.l2 above 0; give a number")
        return 2 * model.radius / math.sqrt(self.second_moment(trial))

    def second_moment(self, trial: int) -> float:
        """Return the bound on E|z_t|^2 of a noisy gradient: C^2 + P s^2 (equation 15.5)."""
        plan = self.plans[trial]
        noise = plan.noise_multipliers[0] * plan.sensitivity
        return (plan.sensitivity / 2) ** 2 + self.context.pack.size * noise**2

    def step(self, epoch: int, step: int, seen: Diagnostics) -> None:
        if self.any_by_theorem:
            rate = self.leads / (step + 1) ** self.powers
            self.learning_rate = torch.where(self.by_theorem, rate, self.learning_rate)
        super().step(epoch, step, seen)

    def findings(self) -> Findings | None:
        """Return the bounds of Lemmas 15.6 and 15.7 for the last iterate at their learning rates."""
        return report(self.context, self.output, [self._claim(trial) for trial in range(self.context.trials)])

    def _claim(self, trial: int) -> Claim | None:
        settings, plan = section_of(self.context.recipes[trial]), self.plans[trial]
        problem = problem_of(self.context, trial, plan.sensitivity / 2)
        if problem is None or settings.rate != "theorem" or settings.average is not None:
            return None
        noise = plan.noise_multipliers[0] * plan.sensitivity
        lemma = "Lecture 15, Lemma 15.7" if problem.strong_convexity > 0 else "Lecture 15, Lemma 15.6"
        return Claim(lemma, excess_risk_of_last(problem, noise, self.lengths[trial] * self.steps))
