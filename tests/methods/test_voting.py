"""What votes release: worked values of the papers' code, sensitivities by enumeration, laws of answers, plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.methods.pate.price import VotingPlan
from dpsgd_cli.methods.pate.run import _QueryNoise
from dpsgd_cli.methods.pate.settings import ConfidentGnMax, GnMax, LnMax, VoteNoise
from dpsgd_cli.methods.pate.votes import (
    ORDERS,
    epsilon_at,
    laplace_log_q,
    laplace_renyi,
    max_log_q,
    max_renyi,
    threshold_renyi,
)
from dpsgd_cli.noise.run import laplace_of
from dpsgd_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class FloatNoise:
    """Floating-point noise on votes: fast, for attacks only."""

    random: np.random.Generator

    def gaussian(self, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        del purpose
        scale = mechanism.noise_multiplier * mechanism.sensitivity
        return np.asarray(exact + scale * self.random.standard_normal(exact.shape))

    def laplace(self, purpose: str, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int) -> np.ndarray:
        del purpose, changed
        return np.asarray(exact + sensitivity / epsilon * laplace_of(self.random.standard_normal((*exact.shape, 4))))


def votes(*counts: int, classes: int = 10) -> np.ndarray:
    return np.array([[*counts, *[0] * (classes - len(counts))]])


@pytest.mark.parametrize(
    ("counts", "order", "log_q", "bound"),
    [
        ((200, 50), 10, -5.17915231, 0.00178944),
        ((200, 50), 20, -5.17915231, 0.00290776),
        ((200, 50), 50, -5.17915231, 0.0191905),
        ((230, 12, 8), 20, -8.22034278, 2.44978e-4),
        ((150, 100), 20, None, 20 / 40**2),
    ],
)
def test_gnmax_by_votes_is_that_of_the_published_code(
    counts: tuple[int, ...], order: float, log_q: float | None, bound: float
) -> None:
    found = max_log_q(votes(*counts), 40)
    assert log_q is None or found[0] == pytest.approx(log_q, rel=1e-8)
    assert max_renyi(found, 40, np.array([order]))[0, 0] == pytest.approx(bound, rel=3e-6)


def test_lnmax_by_votes_is_that_of_the_published_code() -> None:
    found = laplace_log_q(votes(250), 20)
    assert found[0] == pytest.approx(-9.01492113, rel=1e-8)
    assert laplace_renyi(found, 20, np.array([20.0]))[0, 0] == pytest.approx(4.91499e-5, rel=1e-5)
    # Bun and Steinke 2016: pure epsilon is epsilon^2/2-zCDP, and no divergence is above epsilon
    even = laplace_log_q(votes(125, 125), 20)
    assert laplace_renyi(even, 20, np.array([4.0, 100.0]))[0].tolist() == pytest.approx([4 * 0.1**2 / 2, 0.1])


def test_the_published_confident_run_is_priced_as_published() -> None:
    same, answered = votes(230, 12, 8), 640 * norm.cdf((230 - 200) / 150)
    each = threshold_renyi(same.max(axis=1), 200, 150)[0] * 640 + max_renyi(max_log_q(same, 40), 40)[0] * answered
    assert answered == pytest.approx(370.73, abs=0.005)
    assert epsilon_at(each, 1e-5) == pytest.approx(0.9683, abs=5e-5)
    asked, answer = CONFIDENT.asked("add-remove"), CONFIDENT.answered("add-remove")
    rho = 640 / (2 * asked.noise_multiplier**2) + answered / (2 * answer.noise_multiplier**2)
    assert epsilon_at(ORDERS * rho, 1e-5) == pytest.approx(3.6121, abs=5e-3)


CONFIDENT = ConfidentGnMax(threshold=200, threshold_noise=150, noise=40)


def neighbours(teachers: int, classes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All counts that differ in one teacher's vote."""
    for counts in product(range(teachers + 1), repeat=classes):
        if sum(counts) != teachers:
            continue
        for one, other in product(range(classes), repeat=2):
            if one != other and counts[one]:
                moved = np.array(counts)
                moved[one] -= 1
                moved[other] += 1
                yield np.array(counts), moved


def test_charges_are_those_of_how_far_one_vote_moves_what_is_noised() -> None:
    pairs = list(neighbours(6, 3))
    moved = [theirs - ours for ours, theirs in pairs]
    l1, l2 = max(np.abs(d).sum() for d in moved), max(np.linalg.norm(d) for d in moved)
    top = max(abs(int(a.max()) - int(b.max())) for a, b in pairs)
    answer, asked = CONFIDENT.answered("add-remove"), CONFIDENT.asked("add-remove")
    assert (answer.noise_multiplier, answer.sensitivity) == pytest.approx((40 / l2, l2))
    assert (asked.noise_multiplier, asked.sensitivity) == pytest.approx((150 / top, top))
    assert GnMax(noise=7).answered("replace-one") == GaussianSum(
        7 / math.sqrt(2), "replace-one", sensitivity=math.sqrt(2), label="vote"
    )
    assert LnMax(noise=20).answered("add-remove") == PureDP(l1 / 20, "add-remove", "pure", "vote")


@pytest.mark.parametrize("exact", [False, True])
def test_answers_have_the_law_that_is_priced(exact: bool) -> None:
    """In floating point, and on the grid, whose coins no seed repeats: false failures below 1 in 3,000."""
    draws, counts = 20_000 if not exact else 3000, np.array([12, 9])
    noise: VoteNoise = FloatNoise(np.random.default_rng(0))
    if exact:
        noise = _QueryNoise(SecureStreams(), 0, 21)

    def share(of: Any) -> float:
        return float(np.mean([of() for _ in range(draws)]))

    lead = 3.0
    laplace = 1 - (1 + lead / (2 * 4)) * math.exp(-lead / 4) / 2
    rules: list[tuple[Any, str, float]] = [
        (GnMax(noise=5), "label", norm.cdf(lead / (5 * math.sqrt(2)))),
        (LnMax(noise=4), "label", laplace),
        (
            ConfidentGnMax(threshold=13, threshold_noise=2, noise=5),
            "accepts",
            1 - norm.cdf((12 - 13) / 2),
        ),
    ]
    for rule, what, expected in rules:
        if what == "label":
            found = 1 - share(lambda rule=rule: rule.label(counts, noise))
        else:
            found = 1 - share(lambda rule=rule: rule.accepts(counts, noise))
        assert found == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(draws)), rule


def planned(aggregation: dict[str, Any], privacy: dict[str, Any] | None = None, **method: Any) -> VotingPlan:
    teacher = {"count": 250, "epochs": 1}
    recipe = Recipe.model_validate(
        {
            "name": "votes",
            "data": {"path": "x.npz", "public": {"records": 1000}},
            "model": {"kind": "linear"},
            "method": {
                "kind": "pate",
                "teachers": teacher,
                "aggregation": aggregation,
                "queries": 640,
                "student": {"epochs": 1},
                **method,
            },
            "privacy": {"delta": 1e-5, **(privacy or {})},
            "seed": 0,
        }
    )
    plan = plan_for(recipe, Facts(60_000, public_records=1000))
    assert isinstance(plan, VotingPlan)
    return plan


BUDGET = {"budget": {"epsilon": 3.0, "delta": 1e-5}}


def test_a_run_that_chooses_is_bounded_by_all_that_it_might_answer_or_by_its_budget() -> None:
    confident = CONFIDENT.model_dump()
    asked, answered = 640 / 150**2, 2 / 40**2
    free = planned(confident).guarantee().epsilon
    assert free == pytest.approx(gaussian_epsilon(math.sqrt(asked + 640 * answered), 1e-5), rel=1e-6)
    capped = planned({**confident, "answers": 300}).guarantee().epsilon
    assert capped == pytest.approx(gaussian_epsilon(math.sqrt(asked + 300 * answered), 1e-5), rel=1e-6)
    assert planned(confident, BUDGET).guarantee().epsilon == pytest.approx(3.0, rel=1e-6)
    assert planned({**confident, "answers": 300}, {"budget": {"epsilon": 50.0, "delta": 1e-5}}).guarantee().epsilon == (
        pytest.approx(capped)
    )


@pytest.mark.parametrize("kind", ["gnmax", "lnmax", "confident-gnmax"])
def test_the_least_noise_spends_the_budget(kind: str) -> None:
    plan = planned({"kind": kind, "noise": "auto"}, BUDGET)
    assert 2.99 < plan.guarantee().epsilon <= 3.0 * (1 + 1e-9)


def test_every_query_of_the_others_is_planned() -> None:
    assert planned({"kind": "gnmax"}).releases[0].count == 640


@pytest.mark.parametrize(
    ("aggregation", "privacy", "method", "error", "message"),
    [
        ({"kind": "gnmax"}, BUDGET, {}, InfeasibleBudget, "640 queries cost more than epsilon 3"),
        ({"kind": "gnmax", "noise": "auto"}, None, {}, PrivacyError, "give privacy.budget"),
        (CONFIDENT.model_dump(), {"accountant": "pld"}, {}, PrivacyError, "use auto"),
        (CONFIDENT.model_dump(), {"budget": {"rho": 1e-6}}, {}, InfeasibleBudget, "one answered query"),
        (CONFIDENT.model_dump(), None, {"teachers": {"count": 70_000, "epochs": 1}}, PrivacyError, "60000 training"),
    ],
)
def test_what_has_no_guarantee_or_does_not_fit_is_refused(
    aggregation: dict[str, Any],
    privacy: dict[str, Any] | None,
    method: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        planned(aggregation, privacy, **method)
