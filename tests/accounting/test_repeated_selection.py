"""The published best of K trials against dp-accounting and against the theorems' special cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as oracle

from dpsgd_cli.accounting.accountants.rdp import ORDERS, Profile, Rdp
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP, Release
from dpsgd_cli.accounting.repeated_selection import LAWS, BestOfTrials, Choice
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from tests.accounting.releases import full

TRIAL = [Release(GaussianSum(4.0, "add-remove", "poisson", 0.01), 1000)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mean", [1.0, 3.0, 30.0])
def test_agrees_with_dp_accounting(law: str, mean: float) -> None:
    profile = Profile(TRIAL)
    orders = list(ORDERS)
    single = np.array([profile.total(order) for order in orders])
    theirs, _ = oracle.compute_epsilon(
        orders, oracle._compute_rdp_repeat_and_select(orders, single, mean, LAWS[law]), 1e-5
    )
    assert BestOfTrials(Choice(mean, law)).epsilon(TRIAL, 1e-5) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(("law", "factor"), [("logarithmic", 2), ("geometric", 3)])
def test_pure_trials_cost_two_plus_eta_times_one(law: str, factor: int) -> None:
    """Geometric: 3 epsilon, Liu and Talwar 2019."""
    trial = [Release(PureDP(0.1, "add-remove"), 2)]
    accountant = BestOfTrials(Choice(1000.0, law))
    assert accountant.epsilon(trial, 1e-12) == pytest.approx(0.2 * factor)
    assert accountant.delta(trial, 0.2 * factor + 1e-9) == 0


def test_choosing_costs_more_than_one_trial_and_less_than_publishing_all() -> None:
    one = Rdp().epsilon(TRIAL, 1e-5)
    best = BestOfTrials(Choice(20.0)).epsilon(TRIAL, 1e-5)
    everything = Rdp().epsilon([Release(TRIAL[0].mechanism, 20_000)], 1e-5)
    assert one < best < everything


def test_round_trip() -> None:
    accountant = BestOfTrials(Choice(10.0))
    assert accountant.delta(TRIAL, accountant.epsilon(TRIAL, 1e-5)) == pytest.approx(1e-5, rel=1e-6)


def test_the_law_has_the_mean_it_says() -> None:
    log = Choice(17.0, "logarithmic").log_inverse_gamma
    assert math.expm1(log) / log == pytest.approx(17.0)
    assert math.expm1(log) / log >= 17.0


def test_what_is_not_proved_is_refused() -> None:
    with pytest.raises(UnsupportedMechanism, match="no Renyi divergence"):
        BestOfTrials(Choice(5.0)).epsilon([Release(ApproximateDP(0.1, 1e-9, "add-remove"))], 1e-5)
    with pytest.raises(PrivacyError, match="at least 1"):
        Choice(0.5)
    with pytest.raises(PrivacyError, match="known: logarithmic, geometric, poisson"):
        Choice(5.0, "uniform")


def test_no_release_no_cost() -> None:
    assert BestOfTrials(Choice(5.0)).epsilon([], 1e-5) == 0
    assert BestOfTrials(Choice(5.0)).delta([], 0.1) == 0


def test_the_best_of_ten_is_never_below_an_exact_attack() -> None:
    """Best of 10 (geometric) by its loss, one Gaussian with z 1: order 2 needs 1.642, order 8 4.329."""
    best = BestOfTrials(Choice(10))
    divergence = best.divergence(Profile([full(1.0)]))
    assert divergence(2.0) >= 1.642 and divergence(8.0) >= 4.329
    assert best.epsilon([full(1.0)], 1e-5) >= 4.886
