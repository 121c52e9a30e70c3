"""Free numbers of a schedule: the published ones, never over the budget, and as much of it as they allow."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.privacy.budget import solve_schedule
from dpsgd_cli.privacy.plan import Facts, plan_for
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.schedule import Schedule
from dpsgd_cli.search import gap_of

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
    from dpsgd_cli.privacy.mechanism import GaussianSum, Release

    method = {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 100}
    privacy = {"schedule": {"kind": "time", "initial": 10, "decay": "auto"}, "budget": budget, "delta": 1e-4}
    recipe = Recipe.model_validate(RECIPE | {"method": method, "privacy": privacy, "epochs": 20})
    before = [Release(GaussianSum(8, "zero-out", label="pca"))]
    plan = plan_for(recipe, Facts(1000, before))
    guarantee, limit = plan.guarantee(), budget.get("epsilon")
    found = plan.rho() if limit is None else guarantee.epsilon
    assert found is not None
    assert (1 - 1e-9) * (limit or 0.5) < found <= (limit or 0.5)
