"""Prediction sets with a stated coverage, from the noisy counts of `price.py`: no further release.

A record's score is the margin of a class, log(p / (1 - p)); its set holds every class whose score is at least a
threshold T. Let n be the number of held-out records, N(e) the number whose true class scores at least edge e, and
D(e) = N(e) - (1 - a) n. D^ is D from the unbiased counts, with Gaussian noise of a standard deviation between s_min and
s_max. T is the lowest edge if D^ is below a constant c there or everywhere; else it is the highest edge such that D^ is
at least c at it and at all edges below it.

Coverage. Over the held-out records and a new record, drawn exchangeably, and over the noise, the set of the new record
holds its class with probability at least

    1 / (n + 1) sum_{i = 0..n} Phi((c + (1 - a) n - i) / s_i),  s_i = s_max if the numerator is positive, else s_min.

Proof. Let i be the number of held-out records that score above the new record's score r. By exchangeability, i is
stochastically at most uniform on 0..n (ties make it smaller), and the summand decreases in i. The class is missed only
if T > r. Let e be the lowest edge above r. T > r means T >= e, so edge e has passed: D^(e) >= c. But N(e) <= i, so this
has probability at most Phi((i - (1 - a) n - c) / s(e)): the noise of one edge, though many edges are looked at. The
statement is about the mean over new records, and holds for any model, as does split conformal prediction (Vovk,
Gammerman and Shafer 2005) without noise.

Users. n is the number of users, and N(e) adds up the share of each user's rows that score at least e. The new record is
a random row of a new user. The sum then goes over i = 1..n + 1, which is at most one term less. Proof: let S be the sum
over the n + 1 users of their shares of rows above r. A random row of a random user has S at most uniform on (0, n + 1),
as S / (n + 1) is the share of that very law above r (as in Lee, Barber and Willett 2023). N(e) is at most S, and a
decreasing function of a uniform variable on (0, n + 1) has at least the mean of its values at 1..n + 1.

The constant is the least c for which the bound is 1 - a for every n in a 1 - 1e-4 confidence interval of the noisy n;
the bound is asked for 1e-4 more, which pays for the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from dpsgd_cli.evaluation.estimates import Noised
from dpsgd_cli.evaluation.strategy import BINS, EDGES, ERRORS, FINE, FINE_EDGES, SIDE, conforming, reaching, within

_FAILURE = 1e-4
_FAILURE_Z = 3.8905918864131203
"""Two-sided quantile of a normal law at `_FAILURE`."""


@dataclass(frozen=True)
class SetThreshold:
    """The threshold of sets with coverage 1 - a, or the half-width of intervals; None: everything has to be included.

    `edge`: the lowest score that is included; for numbers, the largest absolute error as a share of the range.
    """

    coverage: float
    edge: float | None


def scores(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending edges (E,) of scores and which cells (E, cells) hold records that score at least each.

    `kind`: that of `estimates.Measured`. A score is the margin of the true class; for numbers, minus the error.
    """
    if kind == "numbers":
        return -ERRORS[::-1], np.array([within(SIDE - edge) for edge in range(SIDE + 1)])
    if kind == "two-classes":
        return EDGES, np.array([conforming(edge).ravel() for edge in range(BINS + 1)])
    return FINE_EDGES, np.array([reaching(edge).ravel() for edge in range(FINE + 1)])


def threshold(noised: Noised, kind: str, coverage: float, users: bool = False) -> SetThreshold:
    """Return the threshold of sets, or of intervals around predictions, with probability at least `coverage` in (0, 1).

    `kind`: that of `estimates.Measured`. For numbers the edge is the half-width, as a share of the target's range.
    """
    edges, above = scores(kind)
    found = _edge(noised, above, coverage, users)
    if not found:
        return SetThreshold(coverage, None)
    return SetThreshold(coverage, float(abs(edges[found]) if kind == "numbers" else edges[found]))


def _edge(noised: Noised, above: np.ndarray, coverage: float, users: bool) -> int:
    """Return the number of the edge that is the threshold; 0 is the lowest, which every record passes.

    `above` (edges, cells): which cells hold records that score at least each edge. Raises ValueError if most releases
    of so few records have no higher edge: even with all records above it, an edge would fail.
    """
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be between 0 and 1, got {coverage:g}")
    queries = above[1:] - coverage
    excess = queries @ noised.linear
    deviations = np.linalg.norm(queries @ noised.root, axis=1)
    spread = _FAILURE_Z * noised.deviation_of(np.ones(above.shape[1]))
    fewest, most = max(noised.records - spread, 0.0), noised.records + spread
    constant = _constant(coverage, fewest, most, (float(deviations.min()), float(deviations.max())), users)
    if (1 - coverage) * noised.records < constant:
        raise ValueError(f"about {max(noised.records, 0):.0f} held-out {'users' if users else 'records'} are too few")
    fails = np.flatnonzero(excess < constant)
    return int(fails[0]) if len(fails) else len(above) - 1


def _constant(coverage: float, fewest: float, most: float, deviations: tuple[float, float], users: bool) -> float:
    """Return a constant c that is enough for every number of records between `fewest` and `most`.

    `deviations`: s_min and s_max. Where a n > 12 s_max, the terms that the sum leaves out, of i > n, are below
    Phi(-12 + c / s_max), and c solves (1 - a) n + c + constant = (1 - a) (n + 1): it no longer depends on n. So the
    bound is solved at each number up to there, and once beyond.
    """
    apart = math.ceil(12 * deviations[1] / (1 - coverage))
    counts = {*range(math.floor(fewest), min(math.ceil(most), apart) + 1), max(math.floor(fewest), apart)}
    return max(_needed(coverage + _FAILURE, max(n, 1), deviations, users) for n in counts)


@lru_cache(maxsize=1 << 16)
def _needed(coverage: float, records: int, deviations: tuple[float, float], users: bool) -> float:
    """Return the least c (to .01) with which the bound is `coverage` for `records`; inf if none is."""
    largest = deviations[1]
    low, high = -2.0 * largest - 2, 10.0 * largest + (1 - coverage) * records + 10
    if coverage_bound(high, coverage, records, *deviations, users) < coverage:
        return math.inf
    while high - low > 0.01:
        middle = (low + high) / 2
        if coverage_bound(middle, coverage, records, *deviations, users) < coverage:
            low = middle
        else:
            high = middle
    return high


def coverage_bound(
    constant: float, coverage: float, records: int, least: float, largest: float, users: bool = False
) -> float:
    """Return the bound on the coverage of the module's docstring, for n = `records`."""
    room = constant + coverage * records - np.arange(records + 1) - users
    return float(ndtr(room / np.where(room > 0, largest, least)).mean())
