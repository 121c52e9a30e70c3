"""Plans of every method: what is refused, what is spent, and budgets that are never passed (Hypothesis)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.conversions import bun_steinke_epsilon, tight_zcdp_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.methods.dp_agd import AdaptivePlan, largest_rho
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.schema import Recipe

FACTS = Facts(records=1000, feature_bound=2.0)


def recipe(kind: str, privacy: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "planned",
        "data": {"path": "d.csv", "target": "y"},
        "model": {"kind": "convex", "l2": 0.01},
        "method": {"kind": kind, **changes.pop("method", {})},
        "privacy": {"budget": {"epsilon": 1.0, "delta": 1e-6}, **(privacy or {})},
        "seed": 1,
    }
    if kind in ("dp-gd", "dp-sgd"):
        base["epochs"] = 4
    if kind == "dp-sgd":
        base["method"]["batch_size"] = 100
    return Recipe.model_validate(base | changes)


@given(st.floats(1e-3, 100), st.floats(1e-12, 0.4), st.sampled_from(["zcdp", "zcdp-tight"]))
def test_the_largest_rho_meets_epsilon_and_hardly_more_does_not(epsilon: float, delta: float, accountant: str) -> None:
    convert = bun_steinke_epsilon if accountant == "zcdp" else tight_zcdp_epsilon
    rho = largest_rho(epsilon, delta, accountant)
    assert convert(rho, delta) <= epsilon
    if rho < epsilon * (1 - 1e-9):
        assert convert(rho * (1 + 1e-6) + 1e-12, delta) > epsilon * (1 - 1e-6)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["dp-gd", "output-perturbation", "objective-perturbation", "majority"]),
    epsilon=st.floats(0.05, 8),
)
def test_planned_methods_stay_within_the_budget_by_their_own_accountant(kind: str, epsilon: float) -> None:
    plan = plan_for(recipe(kind, {"budget": {"epsilon": epsilon, "delta": 1e-6}}), FACTS)
    assert accountants.get(plan.accountant).epsilon(plan.releases, 1e-6) <= epsilon
    ledger = plan.ledger()
    for releases in plan.epochs:
        for release in releases:
            ledger.spend(release)


@pytest.mark.parametrize("accountant", ["rdp-markov", "strong-composition"])
@settings(max_examples=12)
@given(epsilon=st.floats(0.05, 8))
def test_dp_sgd_has_the_noise_of_the_accountant_it_names(accountant: str, epsilon: float) -> None:
    plan = plan_for(recipe("dp-sgd", {"budget": {"epsilon": epsilon, "delta": 1e-6}, "accountant": accountant}), FACTS)
    assert plan.accountant == accountant
    assert 0.98 * epsilon <= accountants.get(accountant).epsilon(plan.releases, 1e-6) <= epsilon


@pytest.mark.parametrize("kind", ["dp-agd", "privgene"])
@pytest.mark.parametrize("accountant", ["auto", "zcdp"])
def test_adaptive_methods_get_a_filter_of_the_whole_budget(kind: str, accountant: str) -> None:
    plan = plan_for(recipe(kind, {"accountant": accountant}), FACTS)
    assert isinstance(plan, AdaptivePlan)
    name = "zcdp-tight" if accountant == "auto" else "zcdp"
    assert (plan.accountant, plan.rho_total) == (name, largest_rho(1.0, 1e-6, name))
    ledger = plan.ledger()
    half = Release(GaussianSum(plan.rho_total**-0.5 * (1 + 1e-9), "add-remove"))
    ledger.spend(half)
    ledger.spend(half)
    with pytest.raises(Exception, match="rho"):
        ledger.spend(half)


@pytest.mark.parametrize("accountant", ["zcdp", "auto"])
def test_an_adaptive_plan_states_the_whole_budget(accountant: str) -> None:
    plan = plan_for(recipe("dp-agd", {"accountant": accountant}), FACTS)
    assert plan.guarantee().epsilon == pytest.approx(1.0)
    assert plan.guarantee().epsilon <= 1.0
    before = (Release(GaussianSum(30.0, "add-remove", label="pca")),)
    outside = plan_for(recipe("dp-agd", {"budget_covers": "training"}), Facts(1000, before, feature_bound=1.0))
    rho = outside.rho()
    assert rho is not None
    assert rho == pytest.approx(largest_rho(1.0, 1e-6, "zcdp-tight") + 1 / 1800)
    assert outside.guarantee().epsilon > 1.0


def test_what_preprocessing_spends_is_not_there_for_training() -> None:
    """A Gaussian of noise multiplier z is 1/(2 z^2)-zCDP (Bun and Steinke 2016, Proposition 1.6)."""
    before = (Release(GaussianSum(5.0, "add-remove", label="pca")),)
    privacy = {"budget": {"rho": 0.1}, "delta": 1e-6}
    for covers, left in (("total", 0.1 - 1 / 50), ("training", 0.1)):
        plan = plan_for(recipe("privgene", privacy | {"budget_covers": covers}), Facts(1000, before, feature_bound=1.0))
        assert isinstance(plan, AdaptivePlan)
        (choices,) = plan.epochs[0]
        assert isinstance(choices.mechanism, PureDP)
        # the exponential mechanism is eps^2/8-zCDP (Cesar and Rogers 2021, Lemma 3.2)
        assert choices.count * choices.mechanism.epsilon**2 / 8 == pytest.approx(left, rel=1e-6)
        assert choices.count * choices.mechanism.epsilon**2 / 8 <= left


def test_a_method_of_ones_own_costs_its_budget_and_the_preprocessing_beside_it() -> None:
    """Where the budget does not cover it, 1/(2 z^2) of it comes on top (Bun and Steinke 2016, Proposition 1.6)."""
    before = (Release(GaussianSum(4.0, "add-remove", label="pca")),)
    own = {"file": "own.py", "batching": "full"}
    for covers, rho in (("total", 0.1), ("training", 0.1 + 1 / 32)):
        privacy = {"budget": {"rho": 0.1}, "delta": 1e-6, "budget_covers": covers}
        plan = plan_for(recipe("python", privacy, method=own, epochs=4), Facts(1000, before, feature_bound=1.0))
        assert plan.rho() == pytest.approx(rho, rel=1e-9)
