"""Budgets of a risk: closed forms of Gaussians, dp-accounting's profile of sampled ones, refusals, recipes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from dp_accounting.pld import privacy_loss_distribution as oracle
from scipy import stats

from dpsgd_cli.accounting.budget import RiskBudget, mu_squared_left
from dpsgd_cli.accounting.mechanism import Release, Threshold
from dpsgd_cli.accounting.tradeoff import power
from dpsgd_cli.errors import InfeasibleBudget
from dpsgd_cli.results import store
from tests.cli.accounting import rows, run
from tests.conftest import GRADIENT, Train, WriteRecipe

TPR = stats.norm.ppf(0.05) - stats.norm.ppf(0.01)
"""mu at which N(0, 1) against N(mu, 1) has TPR .05 at FPR .01."""
RISKS = [
    (("--target-mu", "0.7"), {"mu": 0.7}, 0.7),
    (("--target-advantage", "0.2"), {"advantage": 0.2}, 2 * stats.norm.ppf(0.6)),
    (("--target-tpr", "0.05@0.01"), {"tpr": 0.05, "at": 0.01}, TPR),
    (("--target-reconstruction", "0.05@0.01"), {"reconstruction": 0.05, "at": 0.01}, TPR),
]


@pytest.mark.parametrize(("options", "budget", "mu"), RISKS)
def test_the_noise_of_full_batches_is_the_closed_form(options: tuple[str, str], budget: Any, mu: float) -> None:
    found = rows("--batching", "full", "--steps", "25", "--accountant", "gaussian", *options)["gaussian"]
    assert found["noise-multiplier"] == pytest.approx(5 / mu, rel=1e-6) and found["mu"] <= mu * (1 + 1e-12)


def sampled_power(noise: float, steps: int, sure: bool) -> float:
    """TPR at FPR 1% of Poisson batches of rate .01."""
    made = oracle.from_gaussian_mechanism(
        noise,
        sampling_prob=0.01,
        value_discretization_interval=2e-4,
        use_connect_dots=sure,
        pessimistic_estimate=sure,
    )
    return float(power(made.self_compose(steps).get_delta_for_epsilon, 0.01))


def test_noise_steps_and_batch_size_of_sampled_batches_spend_the_risk_and_no_more() -> None:
    sampled = ("--sampling-rate", "0.01", "--target-tpr", "0.05@0.01", "--accountant", "pld")
    noise = rows(*sampled, "--steps", "1000")["pld"]["noise-multiplier"]
    assert sampled_power(noise, 1000, sure=False) <= 0.05 <= sampled_power(noise * 0.999, 1000, sure=True)
    steps = int(rows(*sampled, "--noise-multiplier", "1")["pld"]["steps"])
    assert sampled_power(1.0, steps, sure=False) <= 0.05 <= sampled_power(1.0, steps + 3, sure=True)
    asked = ("--records", "1000", "--steps", "20", "--noise-multiplier", "2", "--target-advantage", "0.2")
    size = int(rows(*asked, "--accountant", "pld")["pld"]["batch-size"])
    advantages = [
        oracle.from_gaussian_mechanism(2.0, sampling_prob=batch / 1000, value_discretization_interval=1e-3)
        .self_compose(20)
        .get_delta_for_epsilon(0.0)
        for batch in (size, size + 1)
    ]
    assert advantages[0] <= 0.2 * (1 + 1e-3) and advantages[1] > 0.2 * (1 - 1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--target-tpr", "0.05"), "write it as RISK@RATE"),
        (("--target-tpr", "0.005@0.01"), "must be above the rate 0.01 of a blind guess"),
        (("--target-tpr", "1@0.01"), "must be above 0 and below 1"),
        (("--target-tpr", "nan@0.01"), "must be above 0 and below 1"),
        (("--target-reconstruction", "0.1@0"), "above 0"),
        (("--target-advantage", "1"), "must be above 0 and below 1"),
        (("--target-mu", "inf"), "positive and finite"),
        (("--target-mu", "1", "--target-tpr", "0.05@0.01"), "give one budget"),
        (("--target-mu", "1", "--best-of", "3"), "by Renyi divergences"),
    ],
)
def test_a_risk_that_limits_nothing_is_refused(options: tuple[str, ...], said: str) -> None:
    result = run("--sampling-rate", "0.01", "--steps", "100", *options)
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize(("options", "budget", "mu"), RISKS)
def test_a_recipe_spends_a_risk_exactly_on_full_batches(
    options: tuple[str, str], budget: dict[str, float], mu: float, write_recipe: WriteRecipe
) -> None:
    free = {"schedule": {"kind": "uniform", "initial": "auto"}, "delta": 1e-5}
    method = GRADIENT | {"batching": "full", "batch_size": None}
    path = write_recipe(method=method, privacy=free | {"budget": budget}, epochs=9)
    found = rows(str(path), "--accountant", "gaussian", "--attacker")["gaussian"]
    assert mu * (1 - 1e-9) <= found["mu"] <= mu
    noise = rows(str(path), "--accountant", "gaussian", "--solve", "initial", *options)["gaussian"]["initial"]
    assert noise == pytest.approx(math.sqrt(9) / mu, rel=1e-6)


def test_a_trained_recipe_keeps_to_a_risk_in_poisson_batches_and_says_so(
    train: Train, write_recipe: WriteRecipe
) -> None:
    free = {"schedule": {"kind": "uniform", "initial": "auto"}, "delta": 1e-5, "budget": {"tpr": 0.05, "at": 0.01}}
    directory = train(write_recipe(method=GRADIENT | {"batching": "poisson"}, privacy=free, epochs=2))
    privacy = store.read_document(directory)["privacy"]
    assert privacy["budget"] == {"tpr": 0.05, "at": 0.01}
    assert 0.0499 < privacy["attacker"]["true_positives"]["0.01"] <= 0.05


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"tpr": 0.05}, "at: tpr needs one"),
        ({"mu": 1.0, "at": 0.01}, "at: mu has none"),
        ({"mu": 1.0, "advantage": 0.1}, "limit one risk"),
        ({"tpr": 0.05, "at": 0.2}, "must be above the rate 0.2 of a blind guess"),
    ],
)
def test_a_budget_of_no_single_risk_is_refused(budget: dict[str, float], said: str, write_recipe: WriteRecipe) -> None:
    privacy = {"schedule": {"kind": "uniform", "initial": "auto"}, "delta": 1e-5, "budget": budget}
    result = run(str(write_recipe(privacy=privacy, epochs=2)))
    assert result.exit_code == 2 and said in result.stderr


def test_methods_that_spend_zcdp_refuse_a_risk(tmp_path: Path) -> None:
    result = run("lee2018/dp-agd", "privacy.budget={mu: 1}", "privacy.delta=1e-8")
    assert result.exit_code == 2 and "limits no risk" in result.stderr


def test_a_risk_covers_no_delta_of_categories() -> None:
    spent = [Release(Threshold(0.0, 1e-6, "add-remove"))]
    with pytest.raises(InfeasibleBudget, match="no budget of a risk covers"):
        mu_squared_left(RiskBudget(mu=1.0), spent)
