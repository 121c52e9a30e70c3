"""Plans of methods that spend their whole budget in a single (epsilon, delta)-DP release.

Each method's docstring says what it releases and which theorem prices it. Not here: prices (`accountants/`).
"""

from __future__ import annotations

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.privacy.lipschitz import problem_constants
from dpsgd_cli.privacy.mechanism import ApproximateDP, PureDP, Release
from dpsgd_cli.privacy.plan import Facts, Plan, Sampling, delta_of, privacy_of
from dpsgd_cli.privacy.statement import Least
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget

_BELOW = 1 - 1e-9


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
    privacy = privacy_of(recipe)
    if facts.before:
        raise PrivacyError(f"method {recipe.method.kind} spends its whole budget at once; use no private preprocessing")
    sampling = Sampling("full", facts.records, facts.records, release.mechanism.adjacency)
    delta = delta_of(privacy)
    _, accountant = Least().best([release], delta)
    return Plan(sampling, (), 1.0, 1, (), ((release,),), accountant, delta, privacy.budget, True)


def _epsilon_delta(recipe: Recipe) -> tuple[float, float]:
    budget = privacy_of(recipe).budget
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"method {recipe.method.kind} is (epsilon, delta)-DP: give privacy.budget with both")
    return budget.epsilon, budget.delta


def _add_remove(recipe: Recipe) -> Adjacency:
    """Methods that are proved for one record more or less."""
    stated = privacy_of(recipe).adjacency or "add-remove"
    if stated != "add-remove":
        raise PrivacyError(f"method {recipe.method.kind} is proved for privacy.adjacency: add-remove, not {stated}")
    return "add-remove"
