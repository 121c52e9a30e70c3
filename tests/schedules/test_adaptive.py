"""The schedule that follows validation accuracy, against the paper's equations written out, and its filter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.errors import BudgetExceeded
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.schedules.price import AdaptiveNoise, AdaptiveSchedulePlan
from dpsgd_cli.schedules.settings import Validation

SCHEDULE: dict[str, Any] = {"kind": "validation", "initial": 10, "decay": 0.7, "threshold": 0.01, "period": 2}
RECIPE: dict[str, Any] = {
    "name": "t",
    "data": {"name": "digits", "validation": {"records": 100, "public": True}},
    "model": {"kind": "linear"},
    "method": {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 100},
    "privacy": {"schedule": SCHEDULE, "budget": {"rho": 0.1}, "delta": 1e-4},
}


def slowly(settings: Validation, accuracies: list[float]) -> list[float]:
    """Equations 8 to 10, validation by validation: the multiplier after each."""
    found, sigma = [], settings.initial
    for e in range(1, len(accuracies) + 1):
        if e % settings.period == 0:
            now = sum(accuracies[e - settings.average : e]) / settings.average
            before = e - settings.period
            last = sum(accuracies[before - settings.average : before]) / settings.average if before else 0.0
            if now - last <= settings.threshold:
                sigma = settings.decay * sigma
        found.append(sigma)
    return found


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 5), st.integers(0, 4))
def test_a_pace_follows_the_equations(hits: list[int], average: int, more: int) -> None:
    settings = Validation(initial=10, decay=0.7, threshold=0.05, period=average + more, average=average)
    pace, found = AdaptiveNoise(settings, settings.initial), []
    for hit in hits:
        pace.observe(hit / 20)
        found.append(pace.multiplier)
    assert found == pytest.approx(slowly(settings, [hit / 20 for hit in hits]))


def plan(**changes: Any) -> AdaptiveSchedulePlan:
    found = plan_for(Recipe.model_validate(RECIPE | changes), Facts(1000))
    assert isinstance(found, AdaptiveSchedulePlan)
    return found


def test_the_plan_knows_the_most_epochs_and_what_they_may_cost() -> None:
    made = plan()
    assert made.most_epochs == 20  # 0.1 / (0.5 / 10^2)
    assert made.rho() == pytest.approx(0.1)
    assert plan(epochs=7).most_epochs == 7
    charged = plan(data={"name": "digits", "validation": {"records": 100, "noise_multiplier": 5}})
    assert charged.look is not None
    assert [len(charged.releases_of(charged.noise(), epoch)) for epoch in range(2)] == [2, 2]


def test_the_ledger_stops_a_pace_before_the_budget_is_passed() -> None:
    made = plan()
    ledger, pace = made.ledger(), made.noise()
    epochs = 0
    while ledger.admits(made.releases_of(pace, epochs)):
        for release in made.releases_of(pace, epochs):
            ledger.spend(release, epochs)
        pace.observe(0.5)
        epochs += 1
    with pytest.raises(BudgetExceeded):
        ledger.spend(made.releases_of(pace, epochs)[0])
    assert len(ledger.entries) == epochs < 20
