"""Full-batch gradient descent, with Gaussian noise (DP-GD) or without.

Source: Lecture 15, Algorithm 2; Lecture 9, section 4.

Released at each step: the sum over all records of clipped loss gradients, plus noise N(0, s^2) on every coordinate.
If the public bounds give a Lipschitz constant no larger than the clip norm, no gradient is ever clipped.

Sensitivity: at most C under add-remove and zero-out, 2 C under replace-one (the lectures' 2 L / n, for means). The
divisor N is public; the L2 term, the projection and the averaging read no data.

Price: s = z S is a Gaussian mechanism of noise multiplier z; T of them are exactly one of multiplier z / sqrt(T)
(Dong, Roth and Su 2022, Corollary 2). The accountant named by `privacy.accountant` chooses z; the final statement is
computed from the ledger.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.clipping.run import Diagnostics, at_most
from dpsgd_cli.engine.settings import ConvexModel, LinearModel
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.methods.dp_sgd.run import DpSgd, GradientMethod, WithoutPrivacy
from dpsgd_cli.methods.dp_sgd.settings import AllIterates, SgdSettings, section_of
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.methods.lectures import Claim, excess_risk_of_average, problem_of, report
from dpsgd_cli.methods.risks.affine import AffineRisk
from dpsgd_cli.methods.risks.constants import constants_of
from dpsgd_cli.methods.risks.problem import linear_risk
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.preconditioning.run import Preconditioning
from dpsgd_cli.schedules.learning_rate import rate_at
from dpsgd_cli.users.run import UnitTable


class FullBatchMethod(GradientMethod):
    """Gradient descent that uses every record in every step.

    For models of one dense layer, two matrix products serve all trials. Other models, per-trial rows, and users with
    several rows are computed as in `methods/dp_sgd/run.py`.
    """

    preconditioning: Preconditioning | None = None

    @property
    def of_users(self) -> bool:
        """True if an example is a user, so that all rows of the user are clipped together."""
        return isinstance(self.context.table, UnitTable)

    @cached_property
    def risk(self) -> LinearRisk | None:
        """Fast path for convex models on unchanged rows; None where it does not apply.

        It supports only the clipping factors `at_most` and reports no gradient norms.
        """
        context, clipping = self.context, self.clipping
        fast = isinstance(context.recipes[0].model, ConvexModel) and self.preconditioning is None
        fast = fast and context.recipes[0].data.weights is None
        fast = fast and (clipping is None or (clipping.factors is at_most and clipping.on_norms is None))
        return linear_risk(context) if fast and not (context.table.per_trial or self.of_users) else None

    @cached_property
    def affine(self) -> AffineRisk | None:
        """Path for one dense layer with several outputs, preconditioned rows or other factors; None if not applicable.

        With a preconditioner, use it only after the preconditioner was released.
        """
        context, model = self.context, self.context.recipes[0].model
        if not isinstance(model, LinearModel | ConvexModel) or context.table.per_trial or self.of_users:
            return None
        if len(context.pack.spans) > 1 + model.has_bias:
            return None  # an audit added canary coordinates to the layer, which this path does not support
        table = self.rows_for_output(context.table)
        lengths = None if self.preconditioning is None else self.preconditioning.ready.lengths(context.table)
        return AffineRisk(table, context.loss, model.has_bias, lengths)

    @cached_property
    def merged(self) -> LinearRisk:
        """Risk with equal sums from fewer rows, for steps without diagnostics."""
        assert self.risk is not None
        return LinearRisk(self.risk.rows.merged(), self.risk.loss)

    def add_sums(self, epoch: int, step: int, seen: Diagnostics) -> None:
        pack, clipping = self.context.pack, self.clipping
        if self.risk is not None:
            norms = clipping.norms[0] if clipping is not None else pack.values.new_full((pack.trials,), math.inf)
            wanted = (epoch + 1) % self.context.recipes[0].runtime.evaluate_every == 0 or epoch + 1 == self.epochs
            sums = self.risk.gradient_sums_at(pack.values, norms, seen) if wanted else None
            pack.sums.copy_(self.merged.gradient_sums_at(pack.values, norms) if sums is None else sums)
        elif self.affine is None:
            super().add_sums(epoch, step, seen)
        elif self.preconditioning is None:
            self.affine.add_sums(pack.values, pack.sums, clipping, seen)
        else:
            sums = torch.zeros_like(pack.sums)
            self.affine.add_sums(self.preconditioning.through(pack.values), sums, clipping, seen)
            pack.sums.copy_(self.preconditioning.back(sums))

    def findings(self) -> Findings | None:
        """Return the bounds of Lecture 9, Theorem 1, for the average of all iterates.

        The learning rate must be constant, and the optimizer SGD without momentum and weight decay.
        """
        if self.risk is None:
            return None
        return report(self.context, self.output, [self._claim(trial) for trial in range(self.context.trials)])

    def _claim(self, trial: int) -> Claim | None:
        settings, clipping = section_of(self.context.recipes[trial]), self.clipping
        clip = math.inf if clipping is None else clipping.sensitivities[trial]
        problem = problem_of(self.context, trial, clip)
        plain = isinstance(settings.optimizer, SgdSettings) and settings.optimizer.momentum_value == 0
        averaged = isinstance(settings.average, AllIterates)
        if problem is None or self.rate_changes or not plain or not averaged or settings.weight_decay:
            return None
        steps, rate = self.lengths[trial], float(self.learning_rate[trial])
        bound = excess_risk_of_average(problem, self.noise_of_mean(trial), steps, rate)
        return Claim("Lecture 9, Theorem 1", bound)

    def noise_of_mean(self, trial: int) -> float:
        """Return the largest standard deviation of the noise on a coordinate of the mean gradient."""
        plan = self.context.plans[trial]
        if plan is None:
            return 0.0
        return max(plan.noise_multipliers) * plan.sensitivity / len(self.context.table)

    def theorem_rates(self, epoch: float, second_moments: list[float]) -> list[float]:
        """Return each trial's learning rate in `epoch`, from `method.learning_rate`; for `theorem`, R / (B sqrt T).

        Lecture 9, Theorem 1, with E|z|^2 <= B^2, B^2 from `second_moments`, and the ball's radius R.
        Raises RecipeError if `theorem` is set without a convex model in a ball or without bounded gradients.
        """
        rates = []
        for recipe, length, moment in zip(self.context.recipes, self.lengths, second_moments, strict=True):
            rate, model = section_of(recipe).rate, recipe.model
            if rate == "theorem":
                if not isinstance(model, ConvexModel) or model.radius is None or not moment < math.inf:
                    raise RecipeError(
                        "method.learning_rate: theorem needs model.kind: convex with a radius and bounded gradients"
                        " (privacy.clipping, or a loss and features with public bounds); give a number"
                    )
                rate = model.radius / math.sqrt(moment * length * self.steps)
            rates.append(rate_at(rate, epoch, length))
        return rates


class Gd(FullBatchMethod, WithoutPrivacy):
    """Method `gd`: projected gradient descent without noise (Lecture 15, Algorithm 1; Lecture 9, section 4)."""

    def learning_rates(self, epoch: float) -> list[float]:
        return self.theorem_rates(epoch, [self._second_moment(recipe) for recipe in self.context.recipes])

    def _second_moment(self, recipe: Experiment) -> float:
        """Return the squared Lipschitz constant of the whole objective on its ball; inf without a bound."""
        model, bound = recipe.model, self.context.feature_bound
        if not isinstance(model, ConvexModel) or bound is None:
            return math.inf
        known = constants_of(model, bound)
        return (known.lipschitz + model.l2 * (model.radius or math.inf)) ** 2 if model.radius else math.inf


class DpGd(FullBatchMethod, DpSgd):
    """Method `dp-sgd` with full batches; on convex models a step costs two matrix products."""

    def noise_of_mean(self, trial: int) -> float:
        unit = self.bounds.unit
        return super().noise_of_mean(trial) * (1.0 if unit is None else float(unit[trial]))

    def learning_rates(self, epoch: float) -> list[float]:
        moments = []
        for recipe, plan in zip(self.context.recipes, self.context.plans, strict=True):
            assert plan is not None and recipe.privacy is not None
            norm = plan.sensitivity / replace_factor(plan.sampling.adjacency)
            pull = recipe.model.l2 * (recipe.model.radius or 0.0) if isinstance(recipe.model, ConvexModel) else 0
            noise = plan.noise_multipliers[0] * plan.sensitivity / len(self.context.table)
            moments.append((norm + pull) ** 2 + self.context.pack.size * noise**2)
        return self.theorem_rates(epoch, moments)
