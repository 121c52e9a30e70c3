"""Choices of one run among a sweep's, and the numbers of runs before them, against the laws that price them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.privacy.together import Records, Run
from dpsgd_cli.sweep.choosing import _exponential, draw
from dpsgd_cli.sweep.pricing import Spent, statement
from dpsgd_cli.sweep.schema import ExponentialChoice, RandomStopping
from tests.sweep.test_pricing import SWEEP

RUN = Run("a", (None,), "replace-one", Records("mine", "tested on 20%"))


def test_the_exponential_choice_has_the_law_of_half_its_epsilon() -> None:
    """P(i) proportional to exp(eps c_i / 2), as a replaced record moves one count up and another down (McSherry and
    Talwar 2007): shares of 3000 seeds within 4.5 standard errors, P(fail) < 1e-4; eps and eps / 4 do not fit."""
    counts, trials = [7, 8, 10], 3000
    rows: list[Any] = [(SimpleNamespace(), {"nonprivate_train_accuracy": count / 10}) for count in counts]
    chosen = np.zeros(3)
    for seed in range(trials):
        found = _exponential(rows, ExponentialChoice(epsilon=1.0, seed=seed), lambda cell: 10)
        assert found is not None
        chosen[[row is found for row in rows].index(True)] += 1

    def fits(rate: float) -> bool:
        weights = np.exp(rate * np.array(counts))
        law = weights / weights.sum()
        return bool((np.abs(chosen / trials - law) < 4.5 * np.sqrt(law * (1 - law) / trials)).all())

    assert fits(0.5)
    assert not fits(1.0) and not fits(0.25)


def test_what_is_stated_of_an_exponential_choice_is_no_less_than_it_can_lose() -> None:
    """Among a thousand runs, one count rises by 1 and all others fall by 1: the probability of that run moves from P to
    almost e^eps P, and delta at e is at least P' - e^e P, which is above 1e-5 at e = 1.9 for eps = 2."""
    others, start = 1000, -2.0
    before, after = (1 / (1 + others * math.exp(-logit)) for logit in (start, start + 2.0))
    assert after - math.exp(1.9) * before > 1e-5
    hardly = Spent((Release(GaussianSum(1000.0, "replace-one")),), RUN, 1e-5)
    told = statement([hardly], SWEEP.model_copy(update={"select": ExponentialChoice(epsilon=2.0)}))["choice"]
    assert told["epsilon"] >= 1.9


def test_a_poisson_number_is_nought_as_often_as_it_should_be() -> None:
    """P(0) = e^-m, here .2231 of 3000: within 5 standard errors (below 1e-6), which no law without 0 is."""
    drawn = [sum(draw(RandomStopping(law="poisson", mean=1.5, seed=seed), 3)) for seed in range(3000)]
    share, chance = drawn.count(0) / 3000, math.exp(-1.5)
    assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / 3000)
    assert share > 5 * math.sqrt(chance * (1 - chance) / 3000)


def test_two_runs_are_of_cells_drawn_independently() -> None:
    """Of draws of two runs among 4 cells a quarter are of one cell twice, within 5 standard errors; half are not."""
    pairs = [counts for seed in range(4000) if sum(counts := draw(RandomStopping(mean=2, seed=seed), 4)) == 2]
    share, error = sum(max(counts) == 2 for counts in pairs) / len(pairs), math.sqrt(3 / 16 / len(pairs))
    assert abs(share - 0.25) < 5 * error < 0.25
