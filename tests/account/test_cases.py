"""Cases, and solutions that spend the budget and never pass it."""

from __future__ import annotations

import dataclasses

import pytest

from dpsgd_cli.account.cases import Case, Numbers, Target
from dpsgd_cli.account.recipes import RepeatedAccountant
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.groups import ForGroup
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.plan import Plan, Sampling
from dpsgd_cli.errors import InfeasibleBudget, UsageError
from dpsgd_cli.sweep.matching import least_factor

POISSON = Numbers("poisson", "add-remove", 1e-5, noise_multiplier=4.0, sampling_rate=0.01, steps=250)
CASE = POISSON.case()


def only(case: Case) -> Release:
    """The release of a case with one trial, one part and one mechanism."""
    ((((release,),),)) = case.composition.trials
    return release


def test_shuffled_batches_count_epochs() -> None:
    case = Numbers("shuffle", "zero-out", 1e-5, 4.0, 0.01, steps=250)
    assert case.uses == 3
    assert case.release(case.uses).mechanism.adjacency == "zero-out"
    with pytest.raises(UsageError, match="counted by epochs"):
        _ = dataclasses.replace(case, sampling_rate=None).uses


def test_another_value_of_a_parameter() -> None:
    assert only(CASE.with_value("noise-multiplier", 5)).mechanism == GaussianSum(5.0, "add-remove", "poisson", 0.01)
    assert only(CASE.with_value("epochs", 7)).count == 700
    assert CASE.with_value("delta", 1e-7).delta == 1e-7
    with pytest.raises(UsageError, match="no parameter of constant noise"):
        CASE.with_value("decay", 0.1)


def test_trials_together_are_that_many_times_the_uses() -> None:
    case = dataclasses.replace(CASE, together=3)
    assert only(case).count == 750
    assert [releases[0].count for releases in case.by_epoch()] == [300, 300, 150]
    assert only(case.with_value("steps", 10)).count == 30
    assert "3 trials together" in case.subject


def test_a_curve_of_millions_of_epochs_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        dataclasses.replace(POISSON, steps=10**10).by_epoch()


SHUFFLED = Numbers("shuffle", "zero-out", 1e-5, epochs=100).case()


@pytest.mark.parametrize("rho", [1e-4, 0.3, 7.0])
def test_noise_for_rho(rho: float) -> None:
    _, found = SHUFFLED.solved("noise-multiplier", Target(rho=rho), accountants.get("zcdp"))
    spent = total_rho([only(found)])
    assert spent <= rho
    assert spent > rho * (1 - 1e-5)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 40.0])
def test_most_epochs_for_epsilon(epsilon: float) -> None:
    gaussian = accountants.get("gaussian")
    case = Numbers("shuffle", "zero-out", 1e-5, noise_multiplier=20.0).case()
    epochs, found = case.solved("epochs", Target(epsilon=epsilon), gaussian)
    assert gaussian.epsilon([only(found)], 1e-5) <= epsilon
    assert gaussian.epsilon([only(case.with_value("epochs", epochs + 1))], 1e-5) > epsilon


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
    return Plan(sampling, noise, 1.0, before, epochs, name, 1e-5, None, covers_before=True, is_adaptive=False)


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


@pytest.mark.parametrize("name", accountants.NAMES)
def test_what_is_repeated_states_no_more_than_what_is_not(name: str) -> None:
    """An estimate of several trials, or of a group, is no upper bound either."""
    one = accountants.get(name)
    for derived in (RepeatedAccountant(one, 3), ForGroup(one, 2)):
        assert derived.bound == one.bound
