"""A share of the ledgers of `mixed_ledgers.py`, and the oracle against closed forms."""

from __future__ import annotations

import dataclasses

import pytest
from scipy.stats import norm

from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from tests.account.ledger_oracle import LAWS, oracle
from tests.account.mixed_ledgers import compared


@pytest.mark.parametrize("seed", [2, 8, 26, 38])
def test_no_accountant_states_less_than_a_ledger_costs(seed: int) -> None:
    """Many noise levels, also the best of four trainings of them; allocated records, also held-out ones and groups."""
    found = compared(seed)
    assert found.stated and found.proved > 0
    assert not found.below
    cheap = dataclasses.replace(found, stated=dict.fromkeys(found.stated, 0.99 * found.proved))
    assert cheap.below


def test_the_oracle_is_below_what_is_exact_and_near_it() -> None:
    """Three Gaussians are one of mu = 3^(1/2); two epsilons add up where delta is hardly anything."""
    made = oracle([Release(GaussianSum(1.0, "add-remove"), 3)])
    mu = 3**0.5
    exact = norm.cdf(mu / 2 - 2 / mu) - 2.718281828459045**2 * norm.cdf(-mu / 2 - 2 / mu)
    assert exact * 0.995 < made.delta(2.0) <= exact
    assert 0.995 < oracle([Release(PureDP(0.5, "add-remove", "laplace"), 2)]).epsilon(1e-12) <= 1.0


def test_the_best_of_one_training_is_that_training() -> None:
    made = oracle([Release(GaussianSum(1.0, "add-remove"))])
    assert made.best_of(LAWS["geometric"](1.0), 1e-5) == pytest.approx(made.epsilon(1e-5), rel=1e-3)
    assert made.best_of(LAWS["geometric"](10.0), 1e-5) > 1.05 * made.epsilon(1e-5)
