"""Calibration: as little noise as the budget allows, and never less."""

from __future__ import annotations

import math

import pytest

from dpsgd_cli.errors import InfeasibleBudget, UnsupportedMechanism
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.zcdp import total_rho
from dpsgd_cli.privacy.calibrate import Range, calibrate, calibrate_rho
from dpsgd_cli.privacy.mechanism import GaussianSum, PureDP, Release


def poisson(noise: float, steps: int = 1000) -> list[Release]:
    return [Release(GaussianSum(noise, "add-remove", "poisson", 0.01), steps)]


def shuffled(noise: float, epochs: int = 100) -> list[Release]:
    return [Release(GaussianSum(noise, "zero-out", "shuffle"), epochs)]


@pytest.mark.parametrize("name", ["rdp", "pld", "moments", "strong-composition"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 20.0])
def test_the_least_noise_that_satisfies_epsilon(name: str, epsilon: float) -> None:
    accountant = accountants.get(name)
    noise = calibrate(poisson, accountant, epsilon, 1e-5)
    assert accountant.epsilon(poisson(noise), 1e-5) <= epsilon
    # pld is monotone to the precision of its discretisation only
    assert accountant.epsilon(poisson(noise * (1 - (1e-3 if name == "pld" else 1e-6))), 1e-5) > epsilon


def test_a_schedule_is_calibrated_as_a_whole() -> None:
    def build(initial: float) -> list[Release]:
        return [r for i in range(30) for r in poisson(initial * math.exp(-0.02 * i), 100)]

    accountant = accountants.get("rdp")
    initial = calibrate(build, accountant, 1.0, 1e-5)
    assert accountant.epsilon(build(initial), 1e-5) <= 1.0 < accountant.epsilon(build(initial * (1 - 1e-6)), 1e-5)


def test_rho_is_met_to_the_last_bits() -> None:
    noise = calibrate_rho(shuffled, 0.78125, Range(precision=1e-12))
    assert total_rho(shuffled(noise)) <= 0.78125
    assert noise == pytest.approx(8.0, rel=1e-11)


def test_what_no_noise_affords_is_said() -> None:
    def build(noise: float) -> list[Release]:
        return [*poisson(noise), Release(PureDP(2.0, "add-remove"))]

    with pytest.raises(InfeasibleBudget, match=r"no noise multiplier up to 1e\+07 satisfies epsilon 1"):
        calibrate(build, accountants.get("rdp"), 1.0, 1e-5)
    with pytest.raises(InfeasibleBudget, match=r"rho 0\.1"):
        calibrate_rho(lambda noise: [*shuffled(noise), Release(PureDP(2.0, "zero-out"))], 0.1)


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(UnsupportedMechanism, match="zcdp does not cover"):
        calibrate(poisson, accountants.get("zcdp"), 1.0, 1e-5)


def test_a_region_that_begins_at_some_noise_is_entered_from_above() -> None:
    """Lemma 15.2 speaks below epsilon 1 only: less noise is a refusal, not a price."""
    accountant = accountants.get("advanced-composition")
    noise = calibrate(poisson, accountant, 0.5, 1e-5)
    assert accountant.epsilon(poisson(noise), 1e-5) == pytest.approx(0.5, rel=1e-5)


def test_the_lower_end_of_the_range_is_an_answer() -> None:
    assert calibrate(shuffled, accountants.get("zcdp"), 1e9, 1e-5, Range(low=0.5)) == 0.5
