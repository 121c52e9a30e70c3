"""The factor of all noise, against the accountant's own price on either side of it."""

from __future__ import annotations

import pytest

from dpsgd_cli.account.scaling import least_factor, scaled_schedule
from dpsgd_cli.errors import InfeasibleBudget
from dpsgd_cli.privacy import accountants, schedule
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.privacy.plan import Plan, Sampling
from dpsgd_cli.recipe.schema.schedule import (
    ExponentialDecay,
    Part,
    Piecewise,
    PolynomialDecay,
    Schedule,
    StepDecay,
    TimeDecay,
    Uniform,
)

PCA = Release(GaussianSum(20.0, "zero-out", "full"))


def made(factor: float, batching: str, before: tuple[Release, ...] = ()) -> Plan:
    """Ten epochs of falling noise, each multiplier times `factor`."""
    adjacency = "zero-out" if batching == "shuffle" else "add-remove"
    sampling = Sampling(batching, 1000, 100, adjacency)  # type: ignore[arg-type]
    noise = tuple(factor * (4 - 0.3 * epoch) for epoch in range(10))
    count = 10 if batching == "poisson" else 1
    epochs = tuple(
        (Release(GaussianSum(z, adjacency, batching, sampling.rate), count),)  # type: ignore[arg-type]
        for z in noise
    )
    name = "rdp" if batching == "poisson" else "gaussian"
    return Plan(sampling, noise, 1.0, 1, before, epochs, name, 1e-5, None, True)


@pytest.mark.parametrize("batching", ["shuffle", "poisson"])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 8.0])
def test_the_factor_meets_the_budget_and_hardly_less_would_not(batching: str, epsilon: float) -> None:
    before = (PCA,) if batching == "shuffle" else ()
    plan = made(1.0, batching, before)
    factor = least_factor(plan, epsilon, 1e-5)
    accountant = accountants.get(plan.accountant)
    assert accountant.epsilon(made(factor, batching, before).releases, 1e-5) <= epsilon
    assert accountant.epsilon(made(factor * (1 - 1e-5), batching, before).releases, 1e-5) > epsilon


def test_a_budget_that_is_spent_before_has_no_factor() -> None:
    with pytest.raises(InfeasibleBudget, match="factor of all noise multipliers"):
        least_factor(made(1.0, "shuffle", (PCA,)), 0.01, 1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        Uniform(initial=3),
        TimeDecay(initial=3, decay=0.2),
        ExponentialDecay(initial=3, decay=0.2),
        StepDecay(initial=3, decay=0.5, period=4),
        PolynomialDecay(initial=3, final=1, decay=2, period=6),
        Piecewise(
            parts=[
                Part(epochs=3, schedule=Uniform(initial=5)),
                Part(schedule=PolynomialDecay(initial=3, final=2, decay=1, period=4)),
            ]
        ),
    ],
)
def test_every_epoch_of_a_scaled_schedule_has_scaled_noise(kind: Schedule) -> None:
    scaled = scaled_schedule(kind, 2.5)
    found = [schedule.noise_multiplier(scaled, epoch) for epoch in range(12)]
    assert found == pytest.approx([2.5 * schedule.noise_multiplier(kind, epoch) for epoch in range(12)], rel=1e-14)
