"""What a plan judges to fit is what the ledger lets through; free numbers of a schedule spend it, and never more."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.stats import norm

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.budget import (
    Budget,
    EpsilonBudget,
    GaussianFilter,
    PlannedFilter,
    RhoBudget,
    RhoFilter,
    enforce,
    enforce_on_choices,
    format_budget,
    mu_squared_left,
    one_gaussian,
    over_budget,
    usual_delta,
)
from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.accounting.search import gap_of
from dpsgd_cli.errors import BudgetExceeded, InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.schedules.price import solve_schedule
from dpsgd_cli.schedules.settings import Schedule

GAUSSIAN = accountants.get("gaussian")
BUDGETS = st.one_of(
    st.builds(RhoBudget, rho=st.floats(0.01, 5)),
    st.builds(EpsilonBudget, epsilon=st.floats(0.1, 10), delta=st.floats(1e-9, 1e-3)),
)
# a few values that repeat, so that sums land on a budget exactly now and then
MULTIPLIERS = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 3.3, 7.7, 10.0]), max_size=30)


def releases(multipliers: list[float], batching: Any = "shuffle") -> list[Release]:
    return [Release(GaussianSum(z, "zero-out", batching)) for z in multipliers]


@given(BUDGETS | st.sampled_from([RhoBudget(rho=2.0), RhoBudget(rho=0.5)]), MULTIPLIERS)
def test_the_plan_and_the_ledger_judge_alike(budget: Budget, multipliers: list[float]) -> None:
    ledger = Ledger(enforce(budget, GAUSSIAN, ()))
    let_through = True
    try:
        for release in releases(multipliers):
            ledger.spend(release)
    except BudgetExceeded:
        let_through = False
    assert (over_budget(budget, GAUSSIAN, releases(multipliers)) <= 0) == let_through


def test_a_budget_that_is_met_exactly_is_not_passed() -> None:
    exactly = releases([1.0, 1.0, 2.0, 2.0])  # rho 1/2 + 1/2 + 1/8 + 1/8
    assert over_budget(RhoBudget(rho=1.25), GAUSSIAN, exactly) <= 0
    assert over_budget(RhoBudget(rho=1.25), GAUSSIAN, [*exactly, *releases([1e9])]) > 0


@pytest.mark.parametrize(
    ("budget", "accountant", "kind"),
    [
        (RhoBudget(rho=1), "gaussian", RhoFilter),
        (RhoBudget(rho=1), "zcdp", RhoFilter),
        (EpsilonBudget(epsilon=1, delta=1e-5), "gaussian", GaussianFilter),
        (EpsilonBudget(epsilon=1, delta=1e-5), "zcdp", PlannedFilter),
        (EpsilonBudget(epsilon=1, delta=1e-5), "pld", PlannedFilter),
        (None, "gaussian", PlannedFilter),
    ],
)
def test_only_what_has_a_theorem_is_filtered_adaptively(budget: Budget, accountant: str, kind: type) -> None:
    assert type(enforce(budget, accountants.get(accountant), releases([1.0]))) is kind


def test_no_budget_is_never_passed() -> None:
    assert over_budget(None, GAUSSIAN, releases([1e-3] * 100)) == -math.inf


def test_sampled_batches_have_no_rho() -> None:
    sampled = [Release(GaussianSum(1.0, "zero-out", "poisson", 0.1))]
    assert rho_of(sampled) is None
    assert rho_of(releases([1.0, 2.0])) == 0.625
    assert rho_of([Release(PureDP(1.0, "zero-out"))]) == 0.5
    assert rho_of([]) == 0
    with pytest.raises(PrivacyError, match="a budget in rho does not fit sampled batches"):
        over_budget(RhoBudget(rho=1), GAUSSIAN, sampled)


def test_what_is_left() -> None:
    spent = releases([2.0, 4.0])
    assert mu_squared_left(RhoBudget(rho=1), spent) == 2 - 0.25 - 0.0625
    epsilon = GAUSSIAN.epsilon(releases([1.0]), 1e-5)
    assert mu_squared_left(EpsilonBudget(epsilon=epsilon, delta=1e-5), spent) == pytest.approx(0.6875, rel=1e-9)


def test_budgets_in_words() -> None:
    assert format_budget(None) == "none"
    assert format_budget(RhoBudget(rho=0.78125)) == "rho 0.78125"
    assert format_budget(EpsilonBudget(epsilon=3, delta=1e-5)) == "epsilon 3 at delta 1e-05"


@given(BUDGETS)
def test_the_gaussian_that_a_budget_is_lies_within_it(budget: Any) -> None:
    """By exact fractions: mu^2 = 1 / z^2 of the cap is at most what the filter lets pass, and hardly less; twice as
    much would be a false statement, half of it a dear one."""
    cap = one_gaussian(budget, "gaussian", "add-remove")
    assert isinstance(cap, GaussianSum)
    most, taken = Fraction(mu_squared_left(budget, ())), 1 / Fraction(cap.noise_multiplier) ** 2
    assert most * (1 - Fraction(1, 10**12)) < taken
    assert 1 / cap.noise_multiplier**2 <= float(most)
    if isinstance(budget, RhoBudget):
        assert float(most) == pytest.approx(2 * budget.rho, rel=1e-15)  # Bun and Steinke 2016: rho = mu^2 / 2
    else:
        # the exact delta of mu-Gaussian-DP at epsilon (Balle and Wang 2018, Theorem 8), by SciPy's normal law
        mu = float(taken) ** 0.5
        a, b = mu / 2 - budget.epsilon / mu, -mu / 2 - budget.epsilon / mu
        assert norm.cdf(a) - np.exp(budget.epsilon + norm.logcdf(b)) == pytest.approx(budget.delta, rel=1e-5)


@pytest.mark.parametrize("source", ["pure", "exponential"])
def test_a_budget_on_choices_counts_the_gaussian_that_a_pure_release_is(source: Any) -> None:
    """To tell the two answers of eps = 1 apart takes a Gaussian of mu = 2 Phi^-1(e / (1 + e)) (Dong, Roth and Su 2022,
    Proposition 2.10): dearer than the eps^2 / 2 or eps^2 / 8 that rho alone asks for."""
    rho, pure = 2 * norm.ppf(np.e / (1 + np.e)) ** 2, [Release(PureDP(1.0, "add-remove", source))]
    for budget, admitted in ((rho * (1 - 1e-9), False), (rho * (1 + 1e-9), True)):
        assert Ledger(enforce_on_choices(RhoBudget(rho=budget))).admits(pure) is admitted
        assert Ledger(enforce(RhoBudget(rho=budget), GAUSSIAN, ())).admits(pure)
    for multiplier, admitted in ((1.0, True), (0.999, False)):
        assert Ledger(enforce_on_choices(RhoBudget(rho=0.5))).admits(releases([multiplier], "full")) is admitted


def test_what_was_planned_once_is_admitted_once() -> None:
    planned = releases([1.0, 2.0])
    policy = enforce(EpsilonBudget(epsilon=9, delta=1e-5), accountants.get("pld"), planned)
    for release in planned:
        policy.admit(release)
    for release in planned:
        with pytest.raises(BudgetExceeded, match="none left"):
            policy.admit(release)


def test_to_ask_whether_releases_fit_spends_nothing() -> None:
    for allowed in (RhoBudget(rho=0.7), EpsilonBudget(epsilon=6, delta=1e-5)):
        ledger = Ledger(enforce(allowed, GAUSSIAN, ()))
        one = releases([1.0])
        assert ledger.admits(one) and ledger.admits(one) and not ledger.entries
        ledger.spend(one[0])


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5])
def test_a_gaussian_budget_is_never_stated_above_itself(epsilon: float, delta: float) -> None:
    """The budget as one Gaussian costs its epsilon or hardly less, by Balle and Wang's formula in 40 digits."""
    cap = one_gaussian(EpsilonBudget(epsilon=epsilon, delta=delta), "gaussian", "add-remove")
    assert cap is not None
    with mpmath.workdps(40):
        mu = 1 / mpmath.mpf(cap.noise_multiplier)

        def spent(at: Any) -> Any:
            return mpmath.ncdf(mu / 2 - at / mu) - mpmath.exp(at) * mpmath.ncdf(-mu / 2 - at / mu)

        assert spent(mpmath.mpf(epsilon)) <= delta < spent(mpmath.mpf(epsilon) * (1 - mpmath.mpf(10) ** -9))


ADAPTER: TypeAdapter[Any] = TypeAdapter(Schedule)
RHO = 0.78125
LENGTHS = (30, 40, 50, 60, 70, 80, 90, 100)
# Yu et al. 2019, Table III, at rho 0.78125 from noise multiplier 10 on.
TABLE_3: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "time": ({}, (0.0760, 0.0441, 0.0281, 0.0190, 0.0132, 0.0093, 0.0067, 0.0048)),
    "step": ({"period": 10}, (0.5459, 0.7008, 0.7922, 0.8510, 0.8910, 0.9190, 0.9400, 0.9560)),
    "exponential": ({}, (0.0442, 0.0282, 0.0193, 0.0138, 0.0101, 0.0075, 0.0056, 0.0041)),
    "polynomial": ({"final": 2, "period": 100}, (6.2077, 3.5277, 2.1948, 1.4317, 0.9549, 0.6382, 0.4167, 0.1626)),
}


def schedule(**settings: Any) -> Any:
    return ADAPTER.validate_python(settings)


def rho(multipliers: list[float]) -> float:
    return math.fsum(0.5 / z**2 for z in multipliers)


def spent(solved: Any, epochs: int) -> float:
    return rho([solved.noise_multiplier(epoch) for epoch in range(epochs)])


def solve(settings: dict[str, Any], epochs: int, budget: float = RHO) -> Any:
    return solve_schedule(schedule(**settings), epochs, lambda z: gap_of(rho(z), budget))


@pytest.mark.parametrize("kind", TABLE_3)
def test_table_3_each_published_rate_gives_its_number_of_epochs(kind: str) -> None:
    settings, rates = TABLE_3[kind]
    for epochs, rate in zip(LENGTHS, rates, strict=True):
        published = schedule(kind=kind, initial=10, decay=rate, **settings)
        assert spent(published, epochs) <= RHO < spent(published, epochs + 1)


@pytest.mark.parametrize("kind", TABLE_3)
@pytest.mark.parametrize("epochs", LENGTHS)
def test_a_solved_rate_spends_the_budget_fully_in_just_so_many_epochs(kind: str, epochs: int) -> None:
    settings, rates = TABLE_3[kind]
    solved = solve({"kind": kind, "initial": 10, "decay": "auto", **settings}, epochs)
    assert RHO * (1 - 1e-9) < spent(solved, epochs) <= RHO
    published = rates[LENGTHS.index(epochs)]
    # more decay than the published rate, which was searched in steps of 1e-4 among those that leave some budget
    assert solved.decay < published if kind == "step" else solved.decay > published - 1e-4


FREE: list[dict[str, Any]] = [
    {"kind": "uniform", "initial": "auto"},
    {"kind": "time", "initial": "auto", "decay": 0.05},
    {"kind": "time", "initial": 10, "decay": "auto", "period": 7},
    {"kind": "exponential", "initial": "auto", "decay": 0.01, "period": 5},
    {"kind": "exponential", "initial": 10, "decay": "auto", "period": 3},
    {"kind": "step", "initial": "auto", "decay": 0.6},
    {"kind": "step", "initial": 10, "decay": "auto"},
    {"kind": "polynomial", "initial": "auto", "final": 2, "decay": 3},
    {"kind": "polynomial", "initial": 10, "final": "auto", "decay": 2, "period": 20},
    {"kind": "polynomial", "initial": 10, "final": 2, "decay": "auto", "every": 4},
    {
        "kind": "piecewise",
        "parts": [
            {"epochs": 10, "schedule": {"kind": "uniform", "initial": 12}},
            {"schedule": {"kind": "exponential", "initial": 12, "decay": "auto"}},
        ],
    },
]


@pytest.mark.parametrize("settings", FREE, ids=lambda s: f"{s['kind']}-{schedule(**s).free_numbers()[0]}")
def test_every_number_can_be_solved_for_and_its_neighbour_would_overspend(settings: dict[str, Any]) -> None:
    free = schedule(**settings)
    path = free.free_numbers()[0]
    solved = solve(settings, 40)
    assert solved.free_numbers() == []
    assert RHO * (1 - 1e-6) < spent(solved, 40) <= RHO
    here = solved.parts[1].schedule.decay if solved.kind == "piecewise" else getattr(solved, path)
    costs = [spent(free.with_number(path, here * factor), 40) for factor in (1 - 1e-6, 1 + 1e-6)]
    assert min(costs) <= RHO < max(costs)


def test_a_period_is_the_least_whole_number_that_fits() -> None:
    step = {"kind": "step", "initial": 10, "decay": 0.6, "period": "auto"}
    solved = solve(step, 31)
    assert solved.period == next(p for p in range(1, 99) if spent(schedule(**step | {"period": p}), 31) <= RHO)
    polynomial = {"kind": "polynomial", "initial": 10, "final": 2, "decay": 3, "period": "auto"}
    wanted = next(p for p in range(1, 999) if spent(schedule(**polynomial | {"period": p}), 44) <= RHO)
    assert solve(polynomial, 44).period == wanted


@given(
    epochs=st.integers(1, 60),
    budget=st.floats(0.01, 50),
    kind=st.sampled_from(["time", "exponential", "step"]),
    initial=st.floats(1, 40),
)
def test_a_solution_never_overspends(epochs: int, budget: float, kind: str, initial: float) -> None:
    settings = {"kind": kind, "initial": initial, "decay": "auto"}
    try:
        solved = solve(settings, epochs, budget)
    except InfeasibleBudget:
        # even without any decay
        assert epochs / (2 * initial**2) > budget * (1 - 1e-6)
        return
    assert spent(solved, epochs) <= budget


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(PrivacyError, match="initial and decay are auto, but only one"):
        solve({"kind": "time", "initial": "auto", "decay": "auto"}, 10)
    with pytest.raises(InfeasibleBudget, match=r"no value of privacy\.schedule\.decay lets 400 epochs"):
        solve({"kind": "exponential", "initial": 10, "decay": "auto"}, 400)
    with pytest.raises(PrivacyError, match="final is above initial"):
        solve({"kind": "polynomial", "initial": 2, "final": 10, "decay": 1, "period": "auto"}, 10)


def test_a_climbing_polynomial_is_solved_the_other_way_round() -> None:
    solved = solve({"kind": "polynomial", "initial": 4, "final": 12, "decay": "auto", "period": 40}, 40)
    assert RHO * (1 - 1e-9) < spent(solved, 40) <= RHO


@pytest.mark.parametrize("settings", [*FREE, {"kind": "polynomial", "initial": 4, "final": 12, "decay": "auto"}])
def test_more_of_a_number_is_more_noise_where_it_says_so(settings: dict[str, Any]) -> None:
    free = schedule(**settings)
    path = free.free_numbers()[0]
    values = (0.2, 0.4) if path.endswith("decay") else (5.0, 6.0)
    less, more = (spent(free.with_number(path, value), 20) for value in values)
    assert (more < less) == free.numbers()[path].increasing


RECIPE: dict[str, Any] = {
    "name": "t",
    "data": {"name": "digits"},
    "model": {"kind": "linear"},
    "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 100},
    "privacy": {
        "schedule": {"kind": "exponential", "initial": 3, "decay": "auto"},
        "budget": {"epsilon": 2, "delta": 1e-4},
    },
    "epochs": 4,
}


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_schedule_is_solved_on_poisson_batches_too(accountant: str) -> None:
    privacy = RECIPE["privacy"] | {"accountant": accountant}
    plan = plan_for(Recipe.model_validate(RECIPE | {"privacy": privacy}), Facts(1000))
    epsilon = plan.guarantee().epsilon
    assert 2 * (1 - 1e-3) < epsilon <= 2
    assert plan.noise_multipliers[0] == 3
    assert len(set(plan.noise_multipliers)) == 4


@pytest.mark.parametrize("budget", [{"rho": 0.5}, {"epsilon": 2, "delta": 1e-4}])
def test_a_plan_solves_within_what_preprocessing_leaves(budget: dict[str, float]) -> None:
    method = {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 100}
    privacy = {"schedule": {"kind": "time", "initial": 10, "decay": "auto"}, "budget": budget, "delta": 1e-4}
    recipe = Recipe.model_validate(RECIPE | {"method": method, "privacy": privacy, "epochs": 20})
    before = [Release(GaussianSum(8, "zero-out", label="pca"))]
    plan = plan_for(recipe, Facts(1000, before))
    guarantee, limit = plan.guarantee(), budget.get("epsilon")
    found = plan.rho() if limit is None else guarantee.epsilon
    assert found is not None
    assert (1 - 1e-9) * (limit or 0.5) < found <= (limit or 0.5)


@pytest.mark.parametrize(
    ("records", "delta"),
    [(1, 1e-5), (9_999, 1e-5), (10_000, 1e-5), (10_001, 1e-6), (48_842, 1e-6), (100_000, 1e-6), (10**7, 1e-8)],
)
def test_the_usual_delta_is_small_beside_one_in_the_number_of_records(records: int, delta: float) -> None:
    assert usual_delta(records) == pytest.approx(delta, rel=1e-12)
    assert usual_delta(records) * records <= 0.1 * (1 + 1e-12)
