"""Objective perturbation and output perturbation: perturbed weights of convex models, released once.

Objective perturbation: weights near the minimiser of the objective plus a random linear term, with a little noise.

Source: Kifer, Smith and Thakurta 2012, Algorithm 1 with Gaussian noise. Iyengar et al. 2019 ("Towards Practical
Differentially Private Convex Optimization", Algorithm 1) extend it to solvers that end near the minimiser.
In sums: J(w) = sum phi(z.w) + k/2 |w|^2 + b.w with k = max(N l2, 2 beta / eps1) and b ~ N(0, s^2 I),
s^2 = L^2 (8 log(2/delta1) + 4 eps1) / eps1^2; w' with |grad J(w')| <= g; released: w' + N(0, t^2 I), once.

Guarantee: (eps1 + eps2, delta1 + delta2)-DP under add-remove (N fixed and public). The released w' + noise is a
function of two releases, the second of which depends on the first (basic composition).

The minimiser w* is (eps1, delta1)-DP for linear models: w* determines b = -(gradient at w*), a bijection as J is
strongly convex. Consider one record more, of gradient h = phi'(z.w) z and Hessian phi'' z z^T of rank one. It changes
the Jacobian's determinant by a factor in [1, 1 + beta / k], which is at most e^(eps1/2). It also moves b by h, of norm
at most L and fixed direction z. The ratio of densities of b is therefore at most e^(eps1/2) unless
|b.z| / |z| > s sqrt(2 log(2/delta1)), which has probability at most delta1. Huber's phi'' jumps; the density formula
then holds almost everywhere, which is enough.

Given w*, hence b, the rest w' - w* is a function of the records, of norm at most g / k (J is k-strongly convex). For
two data sets it differs by at most 2 g / k, whichever solver found w'. So Gaussian noise of t = 2 g / k times the exact
multiplier for (eps2, delta2) makes it (eps2, delta2)-DP (Balle and Wang 2018). The published constant is g / k, half of
that.

Conditions, checked when the plan is made: a smooth loss (beta), public bounds on features, L = sup|phi'| B over ALL
weights (so no squared loss, and no ball), a linear model. The solver ends at g / 2. The other g / 2 allows for rounding
of the gradient (under a hundredth of g at 200,000 records: a test). In exact arithmetic the solver always ends, after
a number of steps known in advance (`methods/risks/newton.py`), so whether weights are released does not depend on the
records. No theorem covers a rounding error that keeps the solver from ending; no such case is known, and the error
message does not depend on the records.

Floats. The bijection is one of real numbers. b and the released weights are floats, whose grid depends on data, which
the proof does not cover (nor does `engine/digits.py`: b enters a solver). So a run without a seed is refused.

Output perturbation: gradient descent for a fixed number of steps, then Gaussian noise on its last iterate.
Released: w_T plus N(0, (z S)^2), once. Sensitivity: S = `moved_by_one`, the largest distance between two
runs on data sets that differ by one record more, for a step length at which steps do not expand; twice that under
replace-one (remove one, add one). Price: one Gaussian of noise multiplier z. Conditions, checked when the plan is made:
a smooth loss, public bounds on the features (enforced record by record). Source: Zhang, Zheng, Mou and Wang 2017,
Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.budget import EpsilonBudget, mu_squared_left
from dpsgd_cli.accounting.mechanism import ApproximateDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.common.sections import Count
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.dp_sgd.price import one_gaussian
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, Experiment, FullBatch
from dpsgd_cli.methods.risks.constants import Constants, problem_constants

if TYPE_CHECKING:
    from torch import Tensor

    from dpsgd_cli.methods.context import Context


OFF_GRID = "its random term enters a search, so no proof covers the floating-point grid of what it releases"


class ObjectivePerturbationMethod(FullBatch):
    """Objective perturbation with Gaussian noise (Kifer, Smith and Thakurta 2012).

    The inexactness of the minimum is paid for (Iyengar et al. 2019).
    """

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation:ObjectivePerturbation",
        planner="dpsgd_cli.methods.perturbation:objective_perturbation",
        privacy="needed",
        adjacencies=("add-remove",),
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["objective-perturbation"] = "objective-perturbation"


class OutputPerturbationMethod(FullBatch):
    """Output perturbation: noise on the last iterate of full-batch gradient descent, by its stability."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.perturbation:OutputPerturbation",
        planner="dpsgd_cli.methods.perturbation:output_perturbation",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["output-perturbation"] = "output-perturbation"
    steps: Count = Field(100, description="Gradient steps, at a rate for which they do not drift apart.")


_BELOW = 1 - 1e-9


def rate_of_descent(constants: Constants, records: int) -> float:
    """Return the step length 1 / (beta (1 + 1/n) + lambda), at which steps do not drift apart with one record more."""
    return 1 / (constants.smoothness * (1 + 1 / records) + constants.strong_convexity)


def moved_by_one(constants: Constants, records: int, steps: int) -> float:
    """Return the L2 distance of two runs of `steps` projected gradient steps from 0 that differ by one record more.

    The step is w - eta (1/n sum of gradients + lambda w), n fixed and public. Its map w - eta grad is
    (1 - eta lambda)-Lipschitz for eta <= 1 / (largest eigenvalue of the Hessian), and the extra record moves its
    result by at most eta L / n; projections do not expand. So d_(t+1) <= (1 - eta lambda) d_t + eta L / n, which gives
    L / (n lambda) (1 - (1 - eta lambda)^T), or eta L T / n at lambda = 0.

    Source: the argument of Zhang, Zheng, Mou and Wang 2017 (Lemmas 2 to 4), for one record more instead of replaced.
    """
    eta, pull = rate_of_descent(constants, records), constants.strong_convexity
    push = eta * constants.lipschitz / records
    if pull == 0:
        return push * steps
    return push * -math.expm1(steps * math.log1p(-eta * pull)) / (eta * pull)


def output_perturbation(recipe: Experiment, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on the last iterate. Its sensitivity is `moved_by_one` of the public constants."""
    assert isinstance(recipe.method, OutputPerturbationMethod)
    constants = problem_constants(recipe, facts.feature_bound)
    return one_gaussian(recipe, facts, moved_by_one(constants, facts.records, recipe.method.steps))


def objective_perturbation(recipe: Experiment, facts: Facts) -> Plan:
    """Return a plan of one (epsilon, delta)-DP release of the whole budget."""
    epsilon, delta = epsilon_delta(recipe)
    problem_constants(recipe, facts.feature_bound, in_ball=False)
    return one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, recipe.adjacency)))


def one_release(recipe: Experiment, facts: Facts, release: Release) -> Plan:
    """A plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = recipe.required_privacy
    if facts.preprocessing_releases:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    _, accountant = BestAccountant().best([release], privacy.stated_delta)
    return recipe.planned(Plan, facts, epochs=((release,),), accountant=accountant, covers_before=True)


def epsilon_delta(recipe: Experiment) -> tuple[float, float]:
    budget = recipe.required_privacy.budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta


_NEAR = 1e-6  # g, in units of L
_SHARE = 1e-3  # of epsilon and delta, for the distance to the minimiser


@dataclass(frozen=True)
class NoiseLevels:
    """Constants of objective perturbation: L2 coefficient k, scale s of b, gradient norm g, scale t of the noise."""

    curvature: float
    tilt: float
    gradient: float
    output: float


def noise_of(constants: Constants, records: int, weights: int, epsilon: float, delta: float) -> NoiseLevels:
    """Return the constants of the module's docstring for a total budget of (`epsilon`, `delta`).

    Raises InfeasibleBudget if doubles cannot resolve a gradient at the solver's end. Each of its `weights` coordinates
    is a sum of terms as large as k w, b and the `records` slopes, rounded a few times.
    """
    for_rest = EpsilonBudget(epsilon=_SHARE * epsilon, delta=_SHARE * delta)
    first, first_delta = epsilon - for_rest.epsilon, delta - for_rest.delta
    curvature = max(records * constants.strong_convexity, 2 * constants.smoothness / first)
    tilt = constants.lipschitz * math.sqrt(8 * math.log(2 / first_delta) + 4 * first) / first
    gradient = _NEAR * constants.lipschitz
    terms = tilt * math.sqrt(weights) + records * constants.lipschitz
    if 4 * 2.0**-53 * terms * math.sqrt(weights) > gradient / 2:
        raise InfeasibleBudget(
            f"objective-perturbation: at epsilon {epsilon:g} its random term is so large that rounding a gradient hides"
            " how far the minimiser is; raise epsilon, or use another method"
        )
    multiplier = mu_squared_left(for_rest, ()) ** -0.5
    return NoiseLevels(curvature, tilt, gradient, 2 * gradient / curvature * multiplier)


class ObjectivePerturbation(OneShot):
    """Objective perturbation for R trials, solved together; budgets and L2 terms may differ."""

    def __init__(self, context: Context) -> None:
        from dpsgd_cli.methods.risks.problem import linear_risk
        from dpsgd_cli.noise.run import is_secure

        super().__init__(context)
        if is_secure(context.streams):
            raise PrivacyError(f"method objective-perturbation needs a seed: {OFF_GRID}")
        self.constants = [problem_constants(recipe, context.feature_bound, False) for recipe in context.recipes]
        risk = linear_risk(context)
        # converted to float64 before they are scaled, so that float32 rounding makes no row longer than its bound
        exact = replace(risk.rows, z=risk.rows.z.double(), norms=risk.rows.norms.double())
        self.loss, self.rows = risk.loss, exact.shrunk(self.constants[0].feature_bound)
        self.promised = [self._promised(trial) for trial in range(context.trials)]

    def _promised(self, trial: int) -> ApproximateDP:
        mechanism = self.context.plans_of(Plan)[trial].epochs[0][0].mechanism
        assert isinstance(mechanism, ApproximateDP)
        return mechanism

    def solve(self) -> None:
        import torch

        from dpsgd_cli.methods.risks.newton import Tilted, minimise_surely

        self.charge()
        device, records = self.rows.z.device, len(self.context.table)
        noise = [
            noise_of(known, records, self.context.pack.size, promised.epsilon, promised.delta)
            for known, promised in zip(self.constants, self.promised, strict=True)
        ]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        tilt = self._normal("objective") * column([one.tilt for one in noise]).unsqueeze(1)
        problem = Tilted(self.rows, self.loss, column([one.curvature for one in noise]), tilt)
        steepest = problem.curvature + len(self.rows) * column([known.smoothness for known in self.constants])
        found = minimise_surely(problem, steepest, column([one.gradient / 2 for one in noise]))
        rest = self._normal("objective-rest") * column([one.output for one in noise]).unsqueeze(1)
        self.context.pack.values.copy_(found + rest)

    def _normal(self, purpose: str) -> Tensor:
        """Draw standard normals (R, P), float64."""
        import torch

        size, streams = self.context.pack.size, self.context.streams
        drawn = [stream.normal(purpose, 0, torch.empty(size, dtype=torch.float64)) for stream in streams]
        return torch.stack(drawn).to(self.rows.z.device)


class OutputPerturbation(OneShot):
    """Output perturbation for R trials with the same number of steps."""

    def __init__(self, context: Context) -> None:
        from dpsgd_cli.methods.risks.problem import merged_risk
        from dpsgd_cli.methods.risks.risk import LinearRisk

        super().__init__(context)
        self.constants = [problem_constants(recipe, context.feature_bound) for recipe in context.recipes]
        risk = merged_risk(context)
        self.risk = LinearRisk(risk.rows.exact().shrunk(self.constants[0].feature_bound), risk.loss)

    def solve(self) -> None:
        import torch

        from dpsgd_cli.methods.dp_sgd.optimizers import project_to_ball
        from dpsgd_cli.methods.risks.problem import penalty_of, radii_of
        from dpsgd_cli.noise.run import Grid, NoiseSource

        context, settings = self.context, self.context.recipes[0].method
        assert isinstance(settings, OutputPerturbationMethod)
        self.charge()
        # a step is far smaller than the weights: float32 rounding would separate two runs by more than the proof allows
        values, records = torch.zeros_like(context.pack.values, dtype=torch.float64), len(context.table)
        rates = context.column([rate_of_descent(known, records) / records for known in self.constants]).double()
        bounds = context.column([known.lipschitz for known in self.constants]).squeeze(1).double()
        radii, penalty = context.column(radii_of(context.recipes)).double(), penalty_of(context).double()
        for _ in range(settings.steps):
            gradient = self.risk.gradient_sums_at(values, bounds) + penalty * values
            project_to_ball(values.sub_(gradient * rates), radii)
        scale = context.column([self._scale(trial) for trial in range(context.trials)], torch.float64)
        exact, pack = values.clone(), context.pack
        noise = NoiseSource(context.streams, pack.size, values.device, pack.values.dtype)
        multipliers = [plan.noise_multipliers[0] for plan in context.plans_of(Plan)]
        noise.add(values, 0, scale, Grid.of(pack.size, context.table.summed, multipliers) if noise.secure else None)
        if context.watcher is not None:
            context.watcher.measured(range(context.trials), exact, values)
        context.pack.values.copy_(project_to_ball(values, radii))

    def _scale(self, trial: int) -> float:
        plan = self.context.plans_of(Plan)[trial]
        return plan.noise_multipliers[0] * plan.sensitivity
