"""Laplace noise and choices in integers: their exact laws, and epsilons that rounding does not exceed."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd_cli.engine import discrete
from dpsgd_cli.engine.discrete import BITS
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.noise.run import laplace
from dpsgd_cli.noise.selection import NoisyChoice, least_exactly, select_least
from tests.noise.test_selection import exact

ONE = 1 << BITS
LEAST = 1e-6


def coins(seed: int = 0) -> discrete.Coins:
    return random.Random(seed).getrandbits


def test_laplace_numbers_have_their_law() -> None:
    """Kolmogorov-Smirnov on 30,000 of a fixed seed, and their low bits; scales of .93 and 1.07 are rejected."""
    own = coins()
    drawn = [discrete.laplace(own) for _ in range(30_000)]
    x = np.array(drawn) / ONE
    assert stats.kstest(x, "laplace").pvalue > LEAST
    for wrong in (0.93, 1.07):
        assert stats.kstest(x * wrong, "laplace").pvalue < LEAST
    assert stats.kstest(np.abs(x), "laplace").pvalue < LEAST
    assert stats.binomtest(sum(number & 1 for number in drawn), len(drawn)).pvalue > LEAST


def test_zero_is_as_likely_as_the_law_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a grid of 2 steps a scale: P[Z = 0] is tanh(1/4), .245; counted twice it were .394."""
    monkeypatch.setattr(discrete, "BITS", 1)
    monkeypatch.setattr(discrete, "_SCALE", 2)
    own = coins(1)
    drawn = np.array([discrete.laplace(own) for _ in range(20_000)])
    values = np.arange(-6, 7)
    law = np.tanh(0.25) * np.exp(-np.abs(values) / 2)
    counts = [int((drawn == value).sum()) for value in values]
    rest = len(drawn) - sum(counts)
    assert stats.chisquare([*counts, rest], np.append(law, 1 - law.sum()) * len(drawn)).pvalue > LEAST


@pytest.mark.parametrize("kind", ["laplace", "exponential"])
def test_choices_have_their_exact_probabilities(kind: NoisyChoice) -> None:
    """Chi-square at 1e-6 of a fixed seed; half and twice the epsilon are rejected."""
    scores, epsilon, own = [0.0, 0.5, 0.7, 3.0], 1.3, coins(2)
    seen = np.bincount([least_exactly(scores, epsilon, 1.0, own, kind) for _ in range(20_000)], minlength=4)
    for tested, right in ((epsilon, True), (epsilon / 2, False), (2 * epsilon, False)):
        law = exact(scores, tested, kind)  # sums to 1 but for the error of an integral
        assert (stats.chisquare(seen, law / law.sum() * seen.sum()).pvalue > LEAST) == right


@pytest.mark.parametrize("kind", ["laplace", "exponential"])
def test_a_score_that_is_no_number_is_never_preferred(kind: NoisyChoice) -> None:
    scores = torch.tensor([[math.nan, 3.0, math.inf]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert select_least(scores, one, one, kind, [coins(3)]).tolist() == [1]


def test_scores_far_apart_end_at_once() -> None:
    """A million scores of exp(-1) apart are no million draws."""
    assert least_exactly([0.0, 1e9, 1e12], 1.0, 1.0, coins(4), "exponential") == 0


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 7.3])
def test_rounding_to_the_grid_stays_within_the_epsilon_that_is_charged(epsilon: float) -> None:
    """The exponents of 400 pairs of neighbours, exactly: scores that one record moves by up to D, one way or both."""
    own, sensitivity = random.Random(5), 0.7
    allowed = Fraction(epsilon) * ONE
    unit = Fraction(sensitivity) / discrete.drawn_epsilon(epsilon, 2)
    widest = Fraction(0)
    for _ in range(400):
        scores = [own.uniform(0, 50) for _ in range(5)]
        for low in (0.0, -sensitivity / 2):
            moved = [s + low + sensitivity * own.choice([0, 1]) for s in scores]
            apart = [discrete.on_grid(a, unit) - discrete.on_grid(b, unit) for a, b in zip(moved, scores, strict=True)]
            # floats that were moved are rounded themselves, by up to 2^-47, which no grid can know of
            slack = Fraction(2) ** -46 / unit * ONE
            widest = max(widest, Fraction(max(apart) - min(apart)) - slack)
    assert widest <= allowed
    assert widest > allowed * Fraction(9, 10), "an epsilon that is far too small is no use"
    assert discrete.drawn_epsilon(epsilon, 2) == Fraction(epsilon) - Fraction(2, ONE)


def test_an_epsilon_that_the_grid_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding to the grid costs"):
        discrete.drawn_epsilon(2.0**-41, 2)


def test_released_laplace_numbers_are_multiples_of_a_public_step() -> None:
    """Of two counts: their low bits show no sum, and the scale is the one that is charged."""
    seen = np.concatenate(
        [laplace(SecureStreams(), "vote", 0, np.array([12.3, 9.1]), 0.5, 2.0, changed=2) for _ in range(2000)]
    )
    step = Fraction(2) / discrete.drawn_epsilon(0.5, 2) / ONE
    places = [Fraction(float(one)) / step for one in seen]
    assert max(abs(place - round(place)) for place in places if abs(place) < 2**46) < Fraction(1, 16)
    errors = seen.reshape(-1, 2) - [12.3, 9.1]
    assert stats.kstest(errors.ravel(), stats.laplace(scale=4).cdf).pvalue > LEAST
    assert stats.kstest(errors.ravel(), stats.laplace(scale=6).cdf).pvalue < LEAST
