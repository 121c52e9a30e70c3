"""Attack on the price of a choice: publishing the best of a random number of runs, or the first that is good enough.

One run is replaced by the worst that its own price allows: a score that is normal with mean 0 on one neighbour and mu
on the other, where mu-Gaussian-DP is within that price at every epsilon that is looked at. The number of runs, the
choice and what is published are the sweep's own code. The attacker sees the published score, and guesses that the
record is in if it is above a level that is fixed beforehand. Two upper bounds on the error rates that hold together at
the asked confidence refute a price if no (epsilon, delta) on it allows both. The control is a choice that is charged as
one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dpsgd_cli.accounting.conversions import gaussian_delta
from dpsgd_cli.accounting.search import smallest
from dpsgd_cli.audit.findings import Finding
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors
from dpsgd_cli.common.text_format import epsilon_text

Profile = Callable[[float], float]
"""Delta as a function of epsilon."""
Published = Callable[[float, float, int], np.ndarray]
"""The scores (n,) that n sweeps publish, -inf for none, if a run's score is normal around the first argument, and the
threshold, where there is one, is the second."""
_EPSILONS = 61
LEAST_DELTA = 1e-9
"""Deltas below this say nothing to an attack that draws scores."""
_WITHIN = 0.99


@dataclass(frozen=True)
class ChoiceClaim:
    """Claim on a choice: the prices of `one` run and of the `choice`, and `mean`, the expected number of runs."""

    one: Profile
    choice: Profile
    epsilon: float
    delta: float
    mean: float


def attack(claim: ChoiceClaim, published: Published, sweeps: int, confidence: float) -> Finding:
    """Return the finding of tier A on a choice, from `sweeps` sweeps on each of two neighbours."""
    level = float(stats.norm.isf(1 / (5 * claim.mean)))
    mu = largest_mu(claim.one, claim.epsilon)
    out, inside = (published(mean, level, sweeps) > level for mean in (0.0, mu))
    errors = Errors(int(out.sum()), sweeps, sweeps - int(inside.sum()), sweeps)
    least = epsilon_of_errors(errors, claim.delta, confidence)
    return Finding(
        "A", "the choice", f"epsilon at least {least:.4f}: {errors.false_positives} and"
        f" {sweeps - errors.false_negatives} of {sweeps:,} published scores above {level:.2f} (runs of mu {mu:.3f})",
        f"at most {epsilon_text(claim.epsilon)}", lambda asked: passes(errors, claim.choice, claim.epsilon, asked),
        epsilon=least, control=lambda asked: passes(errors, claim.one, claim.epsilon, asked),
    )  # fmt: skip


def largest_mu(price: Profile, farthest: float) -> float:
    """Return a mu whose Gaussian delta is at most `price` at each of many epsilons from 0 to `farthest`.

    >>> round(largest_mu(lambda epsilon: gaussian_delta(0.5, epsilon), 3.0) / 0.99, 6)
    0.5
    """
    asked = [(float(at), price(float(at))) for at in np.linspace(0, max(farthest, 1.0), _EPSILONS)]
    told = [(at, delta) for at, delta in asked if delta > LEAST_DELTA]

    def too_large(mu: float) -> bool:
        return any(gaussian_delta(mu, at) > delta * (1 + 1e-9) for at, delta in told)

    return _WITHIN * smallest(too_large, 1e-3, 50.0) if told else 0.0


def passes(errors: Errors, price: Profile, farthest: float, confidence: float) -> bool:
    """Return True if the two error rates, at `confidence` together, contradict `price` at some epsilon."""
    positive, negative = errors.upper(confidence)
    return any(
        1 - one > math.exp(epsilon) * other + price(float(epsilon))
        for epsilon in np.linspace(0, max(farthest, 1.0), _EPSILONS)
        for one, other in ((negative, positive), (positive, negative))
    )
