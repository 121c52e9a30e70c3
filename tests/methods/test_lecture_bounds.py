from __future__ import annotations

import math

import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from dpsgd_cli.methods.lectures import (
    PublicProblem,
    excess_risk_of_average,
    excess_risk_of_last,
    lecture_9_demand,
    second_moment,
)

PROBLEM = PublicProblem(records=1000, weights=11, lipschitz=2.0, radius=3.0)


def test_the_best_rate_gives_r_b_over_root_t_and_others_more() -> None:
    moment = second_moment(PROBLEM, 0.1)
    assert moment == pytest.approx(4 + 11 * 0.01)
    best = 3 / math.sqrt(moment * 50)
    least = excess_risk_of_average(PROBLEM, 0.1, 50, best)
    assert least == pytest.approx(3 * math.sqrt(moment) / math.sqrt(50))
    assert (
        excess_risk_of_average(PROBLEM, 0.1, 50, best / 2) > least < excess_risk_of_average(PROBLEM, 0.1, 50, 2 * best)
    )


def test_the_last_iterate_has_its_own_orders() -> None:
    strong = PublicProblem(1000, 11, 2.0, 3.0, strong_convexity=0.5)
    ratio = excess_risk_of_last(PROBLEM, 0.0, 400) / excess_risk_of_last(PROBLEM, 0.0, 100)
    assert ratio == pytest.approx((2 + math.log(400)) / (2 + math.log(100)) / 2)
    quick = excess_risk_of_last(strong, 0.0, 400) / excess_risk_of_last(strong, 0.0, 100)
    assert quick == pytest.approx((1 + math.log(400)) / (1 + math.log(100)) / 4)


def test_what_lecture_9_asks_for_gives_the_wanted_error() -> None:
    epsilon, delta, error = 0.5, 1e-6, 0.2
    steps, records = lecture_9_demand(PROBLEM, error, epsilon, delta)
    multiplier = math.sqrt(2 * steps * math.log(1.25 / delta)) / epsilon
    assert (
        accountants.get("gaussian").epsilon([Release(GaussianSum(multiplier, "add-remove"), steps)], delta) <= epsilon
    )
    noise = multiplier * PROBLEM.lipschitz / records
    rate = 3 / math.sqrt(second_moment(PROBLEM, noise) * steps)
    assert excess_risk_of_average(PROBLEM, noise, steps, rate) <= error
    half = lecture_9_demand(PROBLEM, error / 2, epsilon, delta)
    assert half == (pytest.approx(4 * steps, abs=4), pytest.approx(2 * records, abs=2))
    with pytest.raises(PrivacyError, match="below 1"):
        lecture_9_demand(PROBLEM, error, 1.5, delta)
    with pytest.raises(PrivacyError, match="positive"):
        lecture_9_demand(PROBLEM, 0.0, epsilon, delta)


@pytest.mark.parametrize(("noise", "covered"), [(4.75, False), (5.25, True)])
def test_lemma_15_5_is_refused_where_one_use_passes_what_the_gaussian_lemma_is_proved_for(
    noise: float, covered: bool
) -> None:
    """sqrt(2 log(1.25 / delta_0)) / z at delta_0 = delta / (2 T q) is 1.05 for z = 4.75 and .95 for 5.25, and must stay
    below 1 (Dwork and Roth 2014, Theorem A.1), although amplified and composed both stay below what the lemma states.
    """
    steps, rate, delta = 1000, 1e-3, 1e-5
    single = math.sqrt(2 * math.log(1.25 * 2 * steps * rate / delta)) / noise
    assert (single < 1) is covered
    releases = [Release(GaussianSum(noise, "replace-one", "fixed", rate), steps)]
    if covered:
        assert accountants.get("lemma-15.5").epsilon(releases, delta) < 1
        return
    with pytest.raises(UnsupportedMechanism, match="must stay below 1"):
        accountants.get("lemma-15.5").epsilon(releases, delta)
