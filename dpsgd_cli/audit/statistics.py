"""Statistical bounds on error rates, epsilon and noise, each valid at its stated confidence.

Notation: `false_positives` of the `negatives` canaries that were out scored above a threshold; `false_negatives` of the
`positives` canaries that were in did not. FPR and FNR are the probabilities behind these counts. Thresholds and numbers
of guesses are fixed before anything is observed (`claim.py`): a bound chosen afterwards proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

_MOST_EPSILON = 50.0


@dataclass(frozen=True)
class Errors:
    """Counted errors of one membership test, and the numbers of canaries."""

    false_positives: int
    negatives: int
    false_negatives: int
    positives: int

    @property
    def rates(self) -> tuple[float, float]:
        """Return the observed FPR and FNR."""
        return self.false_positives / max(1, self.negatives), self.false_negatives / max(1, self.positives)

    def upper(self, confidence: float) -> tuple[float, float]:
        """Return upper bounds on FPR and FNR that both hold with probability `confidence` (half of the error each)."""
        half = (1 + confidence) / 2
        return (
            upper_rate(self.false_positives, self.negatives, half),
            upper_rate(self.false_negatives, self.positives, half),
        )

    def lower(self, confidence: float) -> tuple[float, float]:
        """Return lower bounds on FPR and FNR that both hold with probability `confidence` (half of the error each)."""
        half = (1 + confidence) / 2
        return (
            lower_rate(self.false_positives, self.negatives, half),
            lower_rate(self.false_negatives, self.positives, half),
        )


def upper_rate(count: int, trials: int, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson upper bound on the probability behind `count` of `trials`.

    Guarantee: wrong with probability at most 1 - `confidence`, for every probability, if the trials are independent.

    >>> round(upper_rate(0, 100, 0.975), 4)
    0.0362
    """
    return 1.0 if count >= trials else float(stats.beta.ppf(confidence, count + 1, trials - count))


def lower_rate(count: int, trials: int, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson lower bound on the probability behind `count` of `trials`."""
    return 0.0 if count <= 0 else float(stats.beta.ppf(1 - confidence, count, trials - count + 1))


def epsilon_of_errors(errors: Errors, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon at `delta` from independent trials (tier A).

    From 1 - FNR <= e^epsilon FPR + delta, and the same with the roles exchanged (1 - FPR <= e^epsilon FNR + delta),
    with upper bounds for both rates. Nothing is assumed about the noise. Each canary counts as a trial of its own.

    >>> round(epsilon_of_errors(Errors(100, 5000, 2000, 5000), 1e-5, 0.95), 3)
    3.184
    """
    positive, negative = errors.upper(confidence)

    def ratio(above: float, below: float) -> float:
        return math.log(above / below) if above > below > 0 else 0.0

    return max(ratio(1 - negative - delta, positive), ratio(1 - positive - delta, negative))


def mu_of_errors(errors: Errors, confidence: float) -> float:
    """Return a lower bound on mu of mu-Gaussian DP (tier B, full batches): -Phi^-1(FPR) - Phi^-1(FNR), at least 0."""
    positive, negative = errors.upper(confidence)
    return max(0.0, float(-stats.norm.ppf(positive) - stats.norm.ppf(negative)))


@dataclass(frozen=True)
class Guesses:
    """Guesses on `canaries`, each in or out by its own fair coin: `made` guesses, of which `right` were right."""

    canaries: int
    made: int
    right: int


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return a bound on the probability that at least `right` of `made` guesses are right under (epsilon, delta)-DP.

    P[Bin(r, p) >= v] + 2 m delta max_i P[v - i <= Bin(r, p) < v] / i with p = e^epsilon / (1 + e^epsilon), for v right
    of r guesses on m canaries.

    Guarantee: guesses of one run, or of several runs with their own coins, may depend on each other in any way. The
    coins are independent, and each canary changes the input of only one of the releases. The number of guesses is fixed
    beforehand. Source: Steinke, Nasr and Jagielski 2023, Theorem 5.2.
    """
    made, right = guesses.made, guesses.right
    p = 1 / (1 + math.exp(-epsilon))
    alone = float(stats.binom.sf(right - 1, made, p))
    if delta == 0 or right == 0:
        return min(1.0, alone)
    below = stats.binom.cdf(right - 1, made, p)
    number = np.arange(1, right + 1)
    worst = float(((below - stats.binom.cdf(right - 1 - number, made, p)) / number).max())
    return min(1.0, alone + 2 * guesses.canaries * delta * worst)


def epsilon_of_guesses(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return the largest epsilon that the guesses of one run refute at `confidence` (tier A); 0 if they refute none."""
    wrong = 1 - confidence
    if one_run_p_value(guesses, 0.0, delta) > wrong:
        return 0.0
    low, high = 0.0, _MOST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if one_run_p_value(guesses, middle, delta) <= wrong else (low, middle)
    return low


def noise_bound(squares: float, count: int, confidence: float) -> float:
    """Return an upper bound on a standard deviation, from the sum of squares of `count` independent centred normals.

    squares / sigma^2 is chi-square with `count` degrees of freedom.
    """
    return math.sqrt(squares / stats.chi2.ppf(1 - confidence, count)) if count else math.inf


def too_little_noise(squares: float, count: int) -> float:
    """Return the probability that `count` normals of standard deviation 1 have a sum of squares of at most `squares`.

    For a larger standard deviation the probability is smaller.
    """
    return float(stats.chi2.cdf(squares, count))


def far_from(count: float, trials: float, rate: float) -> float:
    """Return the two-sided p-value of `count` under Binomial(trials, rate): exact tails, doubled.

    >>> far_from(500, 1000, 0.5) > 0.9
    True
    """
    below, above = stats.binom.cdf(count, trials, rate), stats.binom.sf(count - 1, trials, rate)
    return float(min(1.0, 2 * min(below, above)))
