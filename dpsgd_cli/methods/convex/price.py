"""Convex problems: constants from public bounds, how far one record moves a descent, and plans that rest on them.

Settings that a theorem needs are computed before any data are read, and theory-driven runs need no clipping. Plans here
spend their whole budget in a single release; each method's docstring says what it releases and which theorem prices it.
Notation: B bounds the norm of one record's features (constant column included), R the norm of w, Y the size of a
regression target. Not here: where B comes from (`data/preprocess.py`), methods (`methods/`), prices (`accountants/`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dpsgd_cli.accounting.adjacency import moves_of_a_sum
from dpsgd_cli.accounting.mechanism import ApproximateDP, PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan, Sampling
from dpsgd_cli.accounting.settings import EpsilonBudget
from dpsgd_cli.accounting.statement import Least
from dpsgd_cli.clipping.settings import FlatClipping
from dpsgd_cli.engine.loss_bounds import LOSSES, Region
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.convex.settings import LeastSquaresMethod, OutputPerturbationMethod, PrivGeneMethod
from dpsgd_cli.methods.dp_agd.price import AdaptivePlan, adaptive_plan
from dpsgd_cli.methods.dp_sgd.price import gradient
from dpsgd_cli.preconditioning.price import joint_sensitivity, weight_of
from dpsgd_cli.schedules.settings import Uniform

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe

_BELOW = 1 - 1e-9


@dataclass(frozen=True)
class Constants:
    """What holds for every record that the public bounds allow and every w that the constraint allows.

    `lipschitz` bounds the norm of one record's loss gradient (the L2 term left out: it reads no data); `smoothness` is
    the largest eigenvalue of one record's loss Hessian, of rank one; `strong_convexity` is that of the L2 term.
    inf stands for "no bound".
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float
    feature_bound: float


def constants_of(model: ConvexModel, feature_bound: float) -> Constants:
    """L = sup|phi'| B and beta = sup(phi'') B^2 of a loss phi of the margin, by the bounds of its record.

    The margin is at most R B on the ball of radius R, and a residual at most R B + Y; without a radius, nothing bounds
    them. logistic: sup|phi'| = 1, sup(phi'') = 1/4. hinge: 1 and no bound. huber-svm of half-width h: 1 and 1/(2h).
    squared: R B + Y and 1.

    >>> from dpsgd_cli.engine.settings import ConvexModel
    >>> constants_of(ConvexModel(loss="logistic", l2=0.1), feature_bound=2.0)
    Constants(lipschitz=2.0, smoothness=1.0, strong_convexity=0.1, feature_bound=2.0)
    """
    reach = math.inf if model.radius is None else model.radius * feature_bound
    reach += model.target_bound if model.known.residual else 0.0
    slope, curvature = model.known.bounds(Region(reach, model.huber_width))
    return Constants(slope * feature_bound, curvature * feature_bound**2, model.l2, feature_bound)


def problem_constants(recipe: Recipe, feature_bound: float | None, in_ball: bool = True) -> Constants:
    """Constants of a recipe's smooth convex problem; PrivacyError that names the condition which fails.

    `in_ball`: whether the method keeps all weights that it meets in the ball of `model.radius`. One that does not needs
    constants that hold everywhere, and may not be given a radius.
    """
    kind, model = recipe.method.kind, recipe.model
    if not isinstance(model, ConvexModel):
        raise PrivacyError(f"method {kind} is proved for model.kind: convex, not {model.kind}")
    if feature_bound is None:
        raise PrivacyError(
            f"method {kind} needs a public bound on the norm of a record's features: scale by bounds, or add unit-norm"
            " to data.preprocess"
        )
    constants = constants_of(model if in_ball else model.model_copy(update={"radius": None}), feature_bound)
    if not constants.lipschitz < math.inf:
        where = (
            "give model.radius, or" if in_ball else "it looks for weights everywhere, so model.radius is no help: use"
        )
        raise PrivacyError(f"method {kind} needs bounded gradients; {where} a loss other than {model.loss}")
    if not constants.smoothness < math.inf:
        smooth = " or ".join(name for name, known in LOSSES.items() if known.curvature and not known.residual)
        raise PrivacyError(f"method {kind} needs a smooth loss, which {model.loss} is not; use {smooth}")
    if not in_ball and model.radius is not None:
        raise PrivacyError(
            f"method {kind} is proved for the minimiser among all weights, so model.radius {model.radius:g} would not"
            " be kept: leave it out"
        )
    return constants


def rate_of_descent(constants: Constants, records: int) -> float:
    """The step length: 1 / (beta (1 + 1/n) + lambda), for which steps do not drift apart with a record more."""
    return 1 / (constants.smoothness * (1 + 1 / records) + constants.strong_convexity)


def moved_by_one(constants: Constants, records: int, steps: int) -> float:
    """L2 distance of two runs of `steps` projected gradient steps from 0 that differ by one record more.

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


def output_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """One Gaussian on the last iterate, of the sensitivity `moved_by_one` of the problem's public constants."""
    assert isinstance(recipe.method, OutputPerturbationMethod)
    constants = problem_constants(recipe, facts.feature_bound)
    clipping = FlatClipping(norm=moved_by_one(constants, facts.records, recipe.method.steps))
    whole = recipe.required_privacy.model_copy(update={"clipping": clipping, "schedule": Uniform()})
    return gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)


def least_squares(recipe: Recipe, facts: Facts) -> Plan:
    """One Gaussian on second moments and products with the targets, of their joint sensitivity."""
    assert isinstance(recipe.method, LeastSquaresMethod)
    if facts.feature_bound is None:
        raise PrivacyError(
            f"method {recipe.method.kind} needs a public bound on the norm of a record's features: scale by bounds, or"
            " add unit-norm to data.preprocess"
        )
    adjacency = recipe.adjacency
    bound = joint_sensitivity(adjacency, weight_of(recipe.method.share)) / moves_of_a_sum(adjacency)
    whole = recipe.required_privacy.model_copy(update={"clipping": FlatClipping(norm=bound), "schedule": Uniform()})
    plan = gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)
    (release,), *_ = plan.epochs
    named = replace(release, mechanism=replace(release.mechanism, label="least-squares"))
    return replace(plan, epochs=((named,),))


def objective_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """One (epsilon, delta)-DP release of the whole budget."""
    epsilon, delta = _epsilon_delta(recipe)
    problem_constants(recipe, facts.feature_bound, in_ball=False)
    return _one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, recipe.adjacency)))


def majority(recipe: Recipe, facts: Facts) -> Plan:
    """One Laplace count."""
    epsilon, _ = _epsilon_delta(recipe)
    return _one_release(recipe, facts, Release(PureDP(epsilon, recipe.adjacency, "laplace", "count")))


def _one_release(recipe: Recipe, facts: Facts, release: Release) -> Plan:
    """A plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = recipe.required_privacy
    if facts.before:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    sampling = Sampling("full", facts.records, facts.records, release.mechanism.adjacency)
    delta = privacy.stated_delta
    _, accountant = Least().best([release], delta)
    return Plan(
        sampling=sampling,
        noise_multipliers=(),
        sensitivity=1.0,
        groups=1,
        before=(),
        epochs=((release,),),
        accountant=accountant,
        delta=delta,
        budget=privacy.budget,
        covers_before=True,
        chooses=False,
    )


def _epsilon_delta(recipe: Recipe) -> tuple[float, float]:
    budget = recipe.required_privacy.budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta


def equal_choices(plan: AdaptivePlan, choices: int) -> PureDP:
    """One of so many uses of the exponential mechanism, eps^2/8-zCDP each, that share the budget equally."""
    # below an equal share by more than the rounding of their sum
    epsilon = math.sqrt(8 * plan.rho_for_training / choices) * (1 - 1e-9)
    return PureDP(epsilon, plan.sampling.adjacency, "exponential", "parent")


def privgene(recipe: Recipe, facts: Facts) -> Plan:
    """Equal parts, as many as there are choices: nothing that is spent depends on a choice."""
    assert isinstance(recipe.method, PrivGeneMethod)
    plan, choices = adaptive_plan(recipe, facts), recipe.method.choices
    return replace(plan, chooses=False, epochs=((Release(equal_choices(plan, choices), choices),),))
