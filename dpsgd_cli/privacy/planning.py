"""Which plan a method gets: the gradient plan of `plan.py`, one of its variants, or a budget for adaptive methods.

Guarantee: whatever is planned here, the ledger that `Plan.ledger()` gives refuses what the budget does not cover. Each
method's docstring says what it releases and which theorem prices it. Not here: prices (`accountants/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.privacy.accountants import Accountant
from dpsgd_cli.privacy.adaptive import AdaptivePlan, agd_rates, equal_choices, largest_rho
from dpsgd_cli.privacy.least import Least
from dpsgd_cli.privacy.lipschitz import problem_constants
from dpsgd_cli.privacy.mechanism import Adjacency, ApproximateDP, PureDP, Release
from dpsgd_cli.privacy.plan import Plan, Sampling, make_plan
from dpsgd_cli.privacy.stability import sensitivity_of_descent
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.convex import DpAgdMethod, PrivGeneMethod
from dpsgd_cli.recipe.schema.descriptor import named
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget, FlatClipping, Privacy, RhoBudget
from dpsgd_cli.recipe.schema.schedule import Uniform

_BELOW = 1 - 1e-9


@dataclass(frozen=True)
class Facts:
    """What is public about the data: training records, releases of preprocessing, layers, and the feature bound.

    `feature_bound` covers the model's constant column; None where nothing bounds a record's features. `judge` is who
    prices a gradient plan's budget where somebody else than the recipe's accountant is asked.
    """

    records: int
    before: Sequence[Release] = ()
    groups: int | None = None
    feature_bound: float | None = None
    judge: Accountant | None = None


def plan_for(recipe: Recipe, facts: Facts) -> Plan:
    """The plan of a private recipe. Raises PrivacyError for what has no guarantee, InfeasibleBudget for no fit."""
    planner: Callable[[Recipe, Facts], Plan] = named(recipe.method.described.planner)
    return planner(recipe, facts)


def gradient(recipe: Recipe, facts: Facts) -> Plan:
    """The plan of `plan.py`: a release a step or epoch, of the schedule's noise."""
    return make_plan(recipe, facts.records, facts.before, facts.groups, facts.judge)


def by_moments(recipe: Recipe, facts: Facts) -> Plan:
    """The least noise by the moments accountant.

    At all orders: its 32 integers state no epsilon below log(1/delta)/32.
    """
    return _by_accountant("rdp-markov", recipe, facts)


def by_advanced_composition(recipe: Recipe, facts: Facts) -> Plan:
    """The least noise by advanced composition of amplified Gaussian mechanisms."""
    return _by_accountant("strong-composition", recipe, facts)


def _by_accountant(name: str, recipe: Recipe, facts: Facts) -> Plan:
    """The gradient plan with the least noise that accountant `name` allows, unless the recipe names another."""
    assert recipe.privacy is not None
    if recipe.privacy.accountant == "auto":
        privacy = recipe.privacy.model_copy(update={"accountant": name})
        recipe = recipe.model_copy(update={"privacy": privacy})
    return gradient(recipe, facts)


def _adaptive(recipe: Recipe, facts: Facts) -> AdaptivePlan:
    """A budget in zCDP, for methods that choose while they run what to release next."""
    privacy = _privacy(recipe)
    budget, delta = privacy.budget, _delta(privacy)
    if budget is None:
        raise PrivacyError(f"method {recipe.method.kind} spends a budget: give privacy.budget")
    accountant = "zcdp-tight" if privacy.accountant == "auto" else privacy.accountant
    if accountant not in ("zcdp", "zcdp-tight"):
        raise PrivacyError(
            f"method {recipe.method.kind} chooses what to release as it goes, which the budget of accountant"
            f" {accountant} does not cover; use zcdp or zcdp-tight"
        )
    rho = budget.rho if isinstance(budget, RhoBudget) else largest_rho(budget.epsilon, delta, accountant)
    sampling = Sampling("full", facts.records, facts.records, privacy.adjacency or "add-remove")
    covers = privacy.budget_covers == "total"
    return AdaptivePlan(
        sampling, (), 1.0, 1, tuple(facts.before), (), accountant, delta, budget, covers, rho_total=rho
    )  # fmt: skip


def privgene(recipe: Recipe, facts: Facts) -> Plan:
    """Equal parts, as many as there are choices: nothing that is spent depends on a choice."""
    assert isinstance(recipe.method, PrivGeneMethod)
    plan, choices = _adaptive(recipe, facts), recipe.method.choices
    return replace(plan, chooses=False, epochs=((Release(equal_choices(plan, choices), choices),),))


def of_own_code(recipe: Recipe, facts: Facts) -> Plan:
    """The gradient plan, for code that may choose what to release, and when to stop, as it likes."""
    return replace(gradient(recipe, facts), chooses=True)


def dp_agd(recipe: Recipe, facts: Facts) -> Plan:
    """A budget in zCDP whose parts `methods/dp_agd.py` chooses as it goes."""
    assert isinstance(recipe.method, DpAgdMethod)
    plan = _adaptive(recipe, facts)
    agd_rates(recipe.method, plan)
    return plan


def objective_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """One (epsilon, delta)-DP release of the whole budget."""
    epsilon, delta = _epsilon_delta(recipe)
    problem_constants(recipe, facts.feature_bound, in_ball=False)
    return _one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, _add_remove(recipe))))


def majority(recipe: Recipe, facts: Facts) -> Plan:
    """One Laplace count."""
    epsilon, _ = _epsilon_delta(recipe)
    return _one_release(recipe, facts, Release(PureDP(epsilon, _add_remove(recipe), "laplace", "count")))


def _one_release(recipe: Recipe, facts: Facts, release: Release) -> Plan:
    """A plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = _privacy(recipe)
    if facts.before:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    sampling = Sampling("full", facts.records, facts.records, release.mechanism.adjacency)
    delta = _delta(privacy)
    _, accountant = Least().best([release], delta)
    return Plan(sampling, (), 1.0, 1, (), ((release,),), accountant, delta, privacy.budget, True)


def output_perturbation(recipe: Recipe, facts: Facts) -> Plan:
    """One Gaussian on the last iterate, of sensitivity that the problem's public constants give."""
    privacy = _privacy(recipe)
    sensitivity = sensitivity_of_descent(recipe, facts.records, facts.feature_bound)
    whole = privacy.model_copy(update={"clipping": FlatClipping(norm=sensitivity), "schedule": Uniform()})
    return gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)


def _privacy(recipe: Recipe) -> Privacy:
    if recipe.privacy is None:
        raise PrivacyError(f"method {recipe.method.kind} needs a privacy section")
    return recipe.privacy


def _delta(privacy: Privacy) -> float:
    stated = privacy.budget.delta if isinstance(privacy.budget, EpsilonBudget) else None
    if stated is not None and privacy.delta not in (None, stated):
        raise PrivacyError(f"privacy.delta is {privacy.delta}, but privacy.budget.delta is {stated}; give one")
    delta = stated or privacy.delta
    if delta is None:
        raise PrivacyError("no delta: give privacy.delta (smaller than 1 / number of records, say 1.0e-5)")
    return delta


def _epsilon_delta(recipe: Recipe) -> tuple[float, float]:
    budget = _privacy(recipe).budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta


def _add_remove(recipe: Recipe) -> Adjacency:
    """Methods that are proved for one record more or less."""
    stated = _privacy(recipe).adjacency or "add-remove"
    if stated != "add-remove":
        raise PrivacyError(f"method {recipe.method.kind} is proved for privacy.adjacency: add-remove, not {stated}")
    return "add-remove"
