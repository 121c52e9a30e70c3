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
from dpsgd_cli.privacy.candidates import plan_selection
from dpsgd_cli.privacy.mechanism import Adjacency, ApproximateDP, PureDP, Release
from dpsgd_cli.privacy.plan import Plan, Sampling, make_plan
from dpsgd_cli.privacy.stability import sensitivity_of_descent
from dpsgd_cli.recipe import schema

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


def plan_for(recipe: schema.Recipe, facts: Facts) -> Plan:
    """The plan of a private recipe. Raises PrivacyError for what has no guarantee, InfeasibleBudget for no fit."""
    return PLANNERS.get(recipe.method.kind, _gradient)(recipe, facts)


def _gradient(recipe: schema.Recipe, facts: Facts) -> Plan:
    return make_plan(recipe, facts.records, facts.before, facts.groups, facts.judge)


def _by_accountant(name: str) -> Callable[[schema.Recipe, Facts], Plan]:
    """The gradient plan with the least noise that accountant `name` allows, unless the recipe names another."""

    def plan(recipe: schema.Recipe, facts: Facts) -> Plan:
        assert recipe.privacy is not None
        if recipe.privacy.accountant == "auto":
            privacy = recipe.privacy.model_copy(update={"accountant": name})
            recipe = recipe.model_copy(update={"privacy": privacy})
        return _gradient(recipe, facts)

    return plan


def _adaptive(recipe: schema.Recipe, facts: Facts) -> AdaptivePlan:
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
    rho = budget.rho if isinstance(budget, schema.RhoBudget) else largest_rho(budget.epsilon, delta, accountant)
    sampling = Sampling("full", facts.records, facts.records, privacy.adjacency or "add-remove")
    covers = privacy.budget_covers == "total"
    return AdaptivePlan(
        sampling, (), 1.0, 1, tuple(facts.before), (), accountant, delta, budget, covers, rho_total=rho
    )  # fmt: skip


def _privgene(recipe: schema.Recipe, facts: Facts) -> Plan:
    """Equal parts, as many as there are choices: nothing that is spent depends on a choice."""
    assert isinstance(recipe.method, schema.PrivGeneMethod)
    plan, choices = _adaptive(recipe, facts), recipe.method.choices
    return replace(plan, chooses=False, epochs=((Release(equal_choices(plan, choices), choices),),))


def _python(recipe: schema.Recipe, facts: Facts) -> Plan:
    """The gradient plan, for code that may choose what to release, and when to stop, as it likes."""
    return replace(_gradient(recipe, facts), chooses=True)


def _dp_agd(recipe: schema.Recipe, facts: Facts) -> Plan:
    assert isinstance(recipe.method, schema.DpAgdMethod)
    plan = _adaptive(recipe, facts)
    agd_rates(recipe.method, plan)
    return plan


def _objective_perturbation(recipe: schema.Recipe, facts: Facts) -> Plan:
    epsilon, delta = _epsilon_delta(recipe)
    return _one_release(recipe, facts, Release(ApproximateDP(epsilon, delta * _BELOW, _add_remove(recipe))))


def _majority(recipe: schema.Recipe, facts: Facts) -> Plan:
    epsilon, _ = _epsilon_delta(recipe)
    return _one_release(recipe, facts, Release(PureDP(epsilon, _add_remove(recipe), "laplace", "count")))


def _one_release(recipe: schema.Recipe, facts: Facts, release: Release) -> Plan:
    """A plan of a single (epsilon, delta)-DP release that spends the whole budget."""
    privacy = _privacy(recipe)
    if facts.before:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    sampling = Sampling("full", facts.records, facts.records, release.mechanism.adjacency)
    return Plan(
        sampling, (), 1.0, 1, (), ((release,),), "basic-composition", _delta(privacy), privacy.budget, True
    )  # fmt: skip


def _private_selection(recipe: schema.Recipe, facts: Facts) -> Plan:
    return plan_selection(recipe, facts.records, facts.before, facts.groups)


def _output_perturbation(recipe: schema.Recipe, facts: Facts) -> Plan:
    """One Gaussian on the last iterate, of sensitivity that the problem's public constants give."""
    privacy = _privacy(recipe)
    sensitivity = sensitivity_of_descent(recipe, facts.records, facts.feature_bound)
    whole = privacy.model_copy(update={"clipping": schema.FlatClipping(norm=sensitivity), "schedule": schema.Uniform()})
    return _gradient(recipe.model_copy(update={"privacy": whole, "epochs": 1}), facts)


PLANNERS: dict[str, Callable[[schema.Recipe, Facts], Plan]] = {
    "dp-agd": _dp_agd,
    "privgene": _privgene,
    "python": _python,
    "objective-perturbation": _objective_perturbation,
    "output-perturbation": _output_perturbation,
    "majority": _majority,
    "private-selection": _private_selection,
    # the moments accountant at all orders: its 32 integers cannot state an epsilon below log(1/delta)/32
    "sgd-ma": _by_accountant("rdp-markov"),
    "sgd-adv": _by_accountant("strong-composition"),
}


def _privacy(recipe: schema.Recipe) -> schema.Privacy:
    if recipe.privacy is None:
        raise PrivacyError(f"method {recipe.method.kind} needs a privacy section")
    return recipe.privacy


def _delta(privacy: schema.Privacy) -> float:
    stated = privacy.budget.delta if isinstance(privacy.budget, schema.EpsilonBudget) else None
    if stated is not None and privacy.delta not in (None, stated):
        raise PrivacyError(f"privacy.delta is {privacy.delta}, but privacy.budget.delta is {stated}; give one")
    delta = stated or privacy.delta
    if delta is None:
        raise PrivacyError("no delta: give privacy.delta (smaller than 1 / number of records, say 1.0e-5)")
    return delta


def _epsilon_delta(recipe: schema.Recipe) -> tuple[float, float]:
    budget = _privacy(recipe).budget
    if not isinstance(budget, schema.EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta


def _add_remove(recipe: schema.Recipe) -> Adjacency:
    """Methods that are proved for one record more or less."""
    stated = _privacy(recipe).adjacency or "add-remove"
    if stated != "add-remove":
        raise PrivacyError(f"method {recipe.method.kind} is proved for privacy.adjacency: add-remove, not {stated}")
    return "add-remove"
