"""Convex problems: constants from public bounds, how far one record moves a descent, and plans that rest on them.

Settings that a theorem needs are computed before any data are read, and theory-driven runs need no clipping. Plans here
spend their whole budget in a single release; each method's docstring names its release and the theorem that prices it.
Notation: B bounds the norm of one record's features (constant column included; see `data/preprocess.py`), R the norm
of w, Y the absolute value of a regression target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.privacy.gradient_plan import gradient
from dpsgd_cli.privacy.mechanism import ApproximateDP, PureDP, Release
from dpsgd_cli.privacy.plan import Facts, Plan, Sampling, adjacency_of, delta_of, privacy_of
from dpsgd_cli.privacy.second_moments import joint_sensitivity, weight_of
from dpsgd_cli.privacy.statement import Least
from dpsgd_cli.recipe.batching import moves_of_a_sum
from dpsgd_cli.recipe.losses import LOSSES, Region
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.clipping import FlatClipping
from dpsgd_cli.recipe.schema.convex import LeastSquaresMethod, OutputPerturbationMethod
from dpsgd_cli.recipe.schema.model import ConvexModel
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget
from dpsgd_cli.recipe.schema.schedule import Uniform

_BELOW = 1 - 1e-9


@dataclass(frozen=True)
class Constants:
    """Constants that hold for every record that the public bounds allow and every w that the constraint allows.

    `lipschitz` bounds the norm of one record's loss gradient, without the L2 term, which reads no data. `smoothness` is
    the largest eigenvalue of one record's loss Hessian, of rank one. `strong_convexity` is that of the L2 term.
    inf means "no bound".
    """

    lipschitz: float
    smoothness: float
    strong_convexity: float
    feature_bound: float


def constants_of(model: ConvexModel, feature_bound: float) -> Constants:
    """Return L = sup|phi'| B and beta = sup(phi'') B^2 of a loss phi of the margin, by the bounds in its record.

    The margin is at most R B on the ball of radius R, and a residual at most R B + Y; without a radius, nothing bounds
    them. logistic: sup|phi'| = 1, sup(phi'') = 1/4. hinge: 1 and no bound. huber-svm of half-width h: 1 and 1/(2h).
    squared: R B + Y and 1.

    >>> from dpsgd_cli.recipe.schema.model import ConvexModel
    >>> constants_of(ConvexModel(loss="logistic", l2=0.1), feature_bound=2.0)
    Constants(lipschitz=2.0, smoothness=1.0, strong_convexity=0.1, feature_bound=2.0)
    """
    reach = math.inf if model.radius is None else model.radius * feature_bound
    reach += model.target_bound if model.known.residual else 0.0
    slope, curvature = model.known.bounds(Region(reach, model.huber_width))
    return Constants(slope * feature_bound, curvature * feature_bound**2, model.l2, feature_bound)


def problem_constants(recipe: Recipe, feature_bound: float | None, in_ball: bool = True) -> Constants:
    """Return the constants of a recipe's smooth convex problem. Raises PrivacyError that names the failing condition.

    `in_ball`: whether the method keeps all its weights in the ball of `model.radius`. A method that does not needs
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


def output_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on the last iterate. Its sensitivity is `moved_by_one` of the public constants."""
    assert isinstance(recipe.method, OutputPerturbationMethod)
    constants = problem_constants(recipe, facts.feature_bound)
    clipping = FlatClipping(norm=moved_by_one(constants, facts.records, recipe.method.steps))
    whole = privacy_of(recipe).model_copy(update={"clipping": clipping, "schedule": Uniform()})
    return gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)


def least_squares(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on second moments and products with the targets, of their joint sensitivity."""
    assert isinstance(recipe.method, LeastSquaresMethod)
    if facts.feature_bound is None:
        raise PrivacyError(
            f"method {recipe.method.kind} needs a public bound on the norm of a record's features: scale by bounds, or"
            " add unit-norm to data.preprocess"
        )
    adjacency = adjacency_of(recipe)
    bound = joint_sensitivity(adjacency, weight_of(recipe.method.share)) / moves_of_a_sum(adjacency)
    whole = privacy_of(recipe).model_copy(update={"clipping": FlatClipping(norm=bound), "schedule": Uniform()})
    plan = gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)
    (release,), *_ = plan.epochs
    named = replace(release, mechanism=replace(release.mechanism, label="least-squares"))
    return replace(plan, epochs=((named,),))


def objective_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one (epsilon, delta)-DP release of the whole budget."""
    epsilon, delta = _epsilon_delta(recipe)
    problem_constants(recipe, facts.feature_bound, in_ball=False)
    return _one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, adjacency_of(recipe))))


def majority(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of one count with Laplace noise."""
    epsilon, _ = _epsilon_delta(recipe)
    return _one_release(recipe, facts, Release(PureDP(epsilon, adjacency_of(recipe), "laplace", "count")))


def _one_release(recipe: Recipe, facts: Facts, release: Release) -> Plan:
    """Return a plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = privacy_of(recipe)
    if facts.before:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    sampling = Sampling("full", facts.records, facts.records, release.mechanism.adjacency)
    delta = delta_of(privacy)
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
    budget = privacy_of(recipe).budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta
