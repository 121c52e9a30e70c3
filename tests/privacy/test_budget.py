"""What a plan judges to fit is what the ledger lets through, to the last release."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from dpsgd_cli.errors import BudgetExceeded, PrivacyError
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.zcdp import rho_of
from dpsgd_cli.privacy.budget import (
    Budget,
    GaussianFilter,
    PlannedFilter,
    RhoFilter,
    describe,
    enforce,
    enforce_on_choices,
    excess,
    mu_squared_left,
    one_gaussian,
)
from dpsgd_cli.privacy.ledger import Ledger
from dpsgd_cli.privacy.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget, RhoBudget

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
    assert (excess(budget, GAUSSIAN, releases(multipliers)) <= 0) == let_through


def test_a_budget_that_is_met_exactly_is_not_passed() -> None:
    exactly = releases([1.0, 1.0, 2.0, 2.0])  # rho 1/2 + 1/2 + 1/8 + 1/8
    assert excess(RhoBudget(rho=1.25), GAUSSIAN, exactly) <= 0
    assert excess(RhoBudget(rho=1.25), GAUSSIAN, [*exactly, *releases([1e9])]) > 0


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
    assert excess(None, GAUSSIAN, releases([1e-3] * 100)) == -math.inf


def test_sampled_batches_have_no_rho() -> None:
    sampled = [Release(GaussianSum(1.0, "zero-out", "poisson", 0.1))]
    assert rho_of(sampled) is None
    assert rho_of(releases([1.0, 2.0])) == 0.625
    assert rho_of([Release(PureDP(1.0, "zero-out"))]) == 0.5
    assert rho_of([]) == 0
    with pytest.raises(PrivacyError, match="a budget in rho does not fit sampled batches"):
        excess(RhoBudget(rho=1), GAUSSIAN, sampled)


def test_what_is_left() -> None:
    spent = releases([2.0, 4.0])
    assert mu_squared_left(RhoBudget(rho=1), spent) == 2 - 0.25 - 0.0625
    epsilon = GAUSSIAN.epsilon(releases([1.0]), 1e-5)
    assert mu_squared_left(EpsilonBudget(epsilon=epsilon, delta=1e-5), spent) == pytest.approx(0.6875, rel=1e-9)


def test_budgets_in_words() -> None:
    assert describe(None) == "none"
    assert describe(RhoBudget(rho=0.78125)) == "rho 0.78125"
    assert describe(EpsilonBudget(epsilon=3, delta=1e-5)) == "epsilon 3 at delta 1e-05"


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


def test_a_budget_on_choices_counts_the_gaussian_that_a_pure_release_is() -> None:
    """eps = 1 is 1/2-zCDP, but to tell its two answers apart takes a Gaussian of mu = 2 Phi^-1(e / (1 + e)): .76."""
    mu = 2 * norm.ppf(np.e / (1 + np.e))
    for rho, admitted in ((0.6, False), (mu**2 / 2 + 1e-9, True)):
        ledger = Ledger(enforce_on_choices(RhoBudget(rho=rho)))
        assert ledger.admits([Release(PureDP(1.0, "add-remove"))]) is admitted
    assert Ledger(enforce(RhoBudget(rho=0.6), GAUSSIAN, ())).admits([Release(PureDP(1.0, "add-remove"))])


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
