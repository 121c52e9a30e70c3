"""Bounds hold as often as they say, and are as tight as the values that were worked out beside the code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.audit import statistics
from dpsgd_cli.audit.claim import PrivacyClaim, best_cutoffs, errors_at, guesses_of, score, shift_of
from dpsgd_cli.audit.statistics import Guesses

DELTA = 1e-5


def claim(multiplier: float, count: int = 1, rate: float = 1.0) -> PrivacyClaim:
    batching = "full" if rate == 1 else "poisson"
    mechanism = GaussianSum(multiplier, "add-remove", batching, rate)  # type: ignore[arg-type]
    made = PrivacyClaim((Release(mechanism, count),), math.inf, DELTA)
    return PrivacyClaim(made.epochs, made.own_epsilon, DELTA)


def observed(
    law: PrivacyClaim, each: int, seed: int, true: PrivacyClaim | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores by `law` of so many canaries out and in, of a run whose law is `true`."""
    out, inside = (true or law).sample(np.random.default_rng(seed), each)
    member = np.repeat([False, True], each)
    return np.concatenate([out, inside]), member


def test_rates_are_bounded_as_often_as_stated() -> None:
    """Of 2,000 at 90% one expects 1,800 or more; fewer than 1,750 has probability 1e-4."""
    counts = np.random.default_rng(0).binomial(40, 0.07, 2000)
    held = sum(statistics.upper_rate(int(count), 40, 0.9) >= 0.07 for count in counts)
    assert held >= 1750
    assert sum(statistics.upper_rate(int(count), 40, 0.9) >= 0.14 for count in counts) < 1750
    assert sum(statistics.lower_rate(int(count), 40, 0.9) <= 0.07 for count in counts) >= 1750


def test_clopper_and_pearson_solve_their_equation() -> None:
    bound = statistics.upper_rate(3, 50, 0.975)
    assert stats.binom.cdf(3, 50, bound) == pytest.approx(0.025, rel=1e-9)
    assert statistics.upper_rate(50, 50, 0.975) == 1 and statistics.lower_rate(0, 50, 0.975) == 0


def test_errors_prove_no_more_than_their_confidence() -> None:
    """The 95% interval of Clopper and Pearson for 5 of 100 ends at .11283: mu = -2 Phi^-1(.11283) = 2.423.

    The rates themselves, .05, would say 3.29.
    """
    errors = statistics.Errors(5, 100, 5, 100)
    assert statistics.mu_of_errors(errors, 0.95) == pytest.approx(2.423, abs=1e-3)
    assert statistics.epsilon_of_errors(errors, 0.0, 0.95) == pytest.approx(math.log(0.88717 / 0.11283), abs=1e-3)
    assert claim(1 / 2.4).refuted_by(errors, 0.95) and not claim(1 / 2.45).refuted_by(errors, 0.95)


def test_the_claim_of_the_table_is_that_of_mu_1() -> None:
    assert claim(1.0).own_epsilon == pytest.approx(4.377, abs=1e-3)


@pytest.mark.parametrize(("each", "least_a", "least_b"), [(500, 1.06, 3.34), (5000, 1.92, 4.02)])
def test_full_batches_reach_the_reference(each: int, least_a: float, least_b: float) -> None:
    """Medians of 20 simulated runs, against 90% of what was worked out for such a claim."""
    law = claim(1.0)
    line = best_cutoffs(law, each, each, 0.95)
    found = []
    for seed in range(20):
        scores, member = observed(law, each, seed)
        guesses = guesses_of(scores, member, line)
        stands = law.standing(errors_at(scores, member, line.threshold), 0.95)
        found.append(
            (statistics.epsilon_of_guesses(guesses, DELTA, 0.95), 0.0 if stands is None else stands.own_epsilon)
        )
    without, family = np.median(found, axis=0)
    assert without >= 0.9 * least_a and family >= 0.9 * least_b
    assert family < law.own_epsilon


def test_a_fifth_less_noise_is_refuted_by_its_family_and_by_nothing_less() -> None:
    law, true = claim(1.0), claim(0.8)
    line = best_cutoffs(law, 5000, 5000, 0.95)
    out, inside = true.sample(np.random.default_rng(5), 5000)
    # scored by the claim, whose attacker knows nothing of the missing noise: z = (score + 1/2), a line
    scores, member = np.concatenate([out * 0.8**2, inside * 0.8**2]), np.repeat([False, True], 5000)
    errors = errors_at(scores, member, line.threshold)
    stands = law.standing(errors, 0.95)
    assert stands is not None and stands.own_epsilon == pytest.approx(5.38, rel=0.1)
    assert law.refuted_by(errors, 0.999)
    guesses = guesses_of(scores, member, line)
    assert statistics.epsilon_of_guesses(guesses, DELTA, 0.95) < law.own_epsilon


@pytest.mark.parametrize("wrong", [10, 300, 1000, 1500, 2000, 2400])
def test_the_member_that_stands_is_not_refuted_and_a_little_more_noise_is(wrong: int) -> None:
    """So many errors of each kind among 5,000: from a sixth of the claim's noise to 23 times as much."""
    law, errors = claim(1.0, 50, 0.1), statistics.Errors(wrong, 5000, wrong, 5000)
    assert law.curve.mu is None
    stands = law.standing(errors, 0.95)
    assert stands is not None and not stands.refuted_by(errors, 0.95)
    assert stands.member(1.003).refuted_by(errors, 0.95)


def test_the_search_goes_on_beyond_64_times_the_noise_and_gives_up_at_1000_times() -> None:
    law = claim(1.0, 50, 0.1)
    little = statistics.Errors(49_600, 100_000, 49_600, 100_000)
    stands = law.standing(little, 0.95)
    assert stands is not None
    (release,) = stands.epochs
    assert isinstance(release.mechanism, GaussianSum) and 64 < release.mechanism.noise_multiplier < 1000
    assert not stands.refuted_by(little, 0.95) and stands.member(1.003).refuted_by(little, 0.95)
    less = statistics.Errors(499_000, 1_000_000, 499_000, 1_000_000)
    assert sum(less.upper(0.95)) < 1 and not law.member(1000).refuted_by(less, 0.95)
    assert law.standing(less, 0.95) is None


def test_a_score_is_the_likelihood_ratio_of_its_mixture() -> None:
    seen, rate, noise = np.array([-0.3, 0.4, 2.0]), 0.1, 1.7
    absent = stats.norm.pdf(seen, 0, noise)
    present = (1 - rate) * absent + rate * stats.norm.pdf(seen, 1, noise)
    assert np.allclose(score(seen, noise, rate, (0.0, 1.0)), np.log(present / absent))
    plus = (1 - rate) * absent + rate * stats.norm.pdf(seen, 0.5, noise)
    minus = (1 - rate) * absent + rate * stats.norm.pdf(seen, -0.5, noise)
    replaced = shift_of(GaussianSum(noise, "replace-one"))
    assert np.allclose(score(seen, noise, rate, replaced), np.log(plus / minus))


def test_guesses_of_one_run_are_bounded_as_in_the_paper() -> None:
    """The p-value by its sum, and without delta the binomial tail alone."""
    guesses = Guesses(1000, 100, 90)
    p = 1 / (1 + math.exp(-1.5))
    alone = sum(math.comb(100, k) * p**k * (1 - p) ** (100 - k) for k in range(90, 101))
    assert statistics.one_run_p_value(guesses, 1.5, 0.0) == pytest.approx(alone, rel=1e-9)
    below = [sum(math.comb(100, k) * p**k * (1 - p) ** (100 - k) for k in range(90 - i, 90)) / i for i in range(1, 91)]
    expected = alone + 2 * 1000 * 1e-4 * max(below)
    assert statistics.one_run_p_value(guesses, 1.5, 1e-4) == pytest.approx(expected, rel=1e-9)
    assert statistics.epsilon_of_guesses(Guesses(1000, 100, 55), DELTA, 0.95) == 0.0


def test_canaries_that_leak_together_fool_no_guess_of_one_run() -> None:
    """In a tenth of the runs everything is told: (0, .1)-DP, of which canaries are anything but independent."""
    random = np.random.default_rng(11)
    alarms = {0.1: 0, 0.0: 0}
    for _ in range(300):
        inside = random.random(100) < 0.5
        scores = inside if random.random() < 0.1 else random.random(100)
        right = int(inside[np.argsort(scores)[-10:]].sum())
        for delta in alarms:
            alarms[delta] += statistics.epsilon_of_guesses(Guesses(100, 10, right), delta, 0.95) > 0
    assert alarms[0.1] <= 25 < alarms[0.0]


def test_noise_is_bounded_and_a_wrong_scale_is_not() -> None:
    """Chi-square: from 10^4 draws the bound on multiplier 10 gives epsilon 4.318 of the table."""
    squares = 1e4
    bound = statistics.noise_bound(squares, 10_000, 0.95)
    assert bound == pytest.approx(1.0118, abs=2e-4)
    assert claim(10 * bound, 100).own_epsilon == pytest.approx(4.318, abs=4e-3)
    draws = np.random.default_rng(2).standard_normal(10_000)
    assert statistics.too_little_noise(float(np.square(draws).sum()), 10_000) > 1e-4
    assert statistics.too_little_noise(float(np.square(draws * 0.9).sum()), 10_000) < 1e-12
