"""A lower bound on what a ledger costs, without any code of the package: pairs of outputs that its lines allow.

A line allows a mechanism whose outputs on two neighbours have known laws P and Q. Here outputs are cut into cells, and
cells of like loss are joined: a function of the output, which can only cost less (data processing). Losses are then
rounded down to a grid, which costs less again. dp_accounting composes them, rounding down, and evaluates the result. So
no true price is below this one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld import pld_pmf
from numpy.typing import NDArray
from scipy.special import gammaln, ndtr
from scipy.stats import binom

from dpsgd_cli.accounting import mechanism as records

Floats = NDArray[np.float64]
Gained = Callable[[Floats, Floats], Floats]
"""From the probability of a lower score than an outcome's, and the outcome's mass, to its mass in the best trial."""
_FAR = 9.0
"""Deviations of noise that are kept; what lies beyond has less than 2e-19."""
_CELLS = 20_000
_MOST_OUTCOMES = 100_000
_UNDERFLOW = 1e-290
_HARDLY = 1e-12
"""Least mass that is not rounding of a Fourier transform."""
_LEVELS = 12
"""Most different noises of otherwise equal sums."""
_SHARE = 40
"""Losses' standard deviation over the width of a cell."""


@dataclass(frozen=True)
class Pair:
    """Masses `p` and `q` of disjoint outcomes on two neighbours. What is missing may be anything else."""

    p: Floats
    q: Floats

    def turned(self) -> Pair:
        return Pair(self.q, self.p)


def _masses(edges: Floats, mean: float) -> Floats:
    """Masses of a standard normal around `mean` between edges, from the nearer tail."""
    x = edges - mean
    return np.where(x[:-1] > 0, ndtr(-x[:-1]) - ndtr(-x[1:]), ndtr(x[1:]) - ndtr(x[:-1]))


def mixture(means: Sequence[float], p: Sequence[float], q: Sequence[float], noise: float) -> Pair:
    """One number: Gaussians around `means`, whose weights are `p` on one neighbour and `q` on the other."""
    places = np.asarray(means) / noise
    edges = np.linspace(places.min() - _FAR, places.max() + _FAR, _CELLS)
    parts = np.stack([_masses(edges, place) for place in places])
    # what underflows is no infinite loss: it is left out
    one, other = np.asarray(p) @ parts, np.asarray(q) @ parts
    held = (one > _UNDERFLOW) & (other > _UNDERFLOW)
    return Pair(one[held], other[held])


def laplace(epsilon: float, moved: float = 1.0) -> Pair:
    """A number that moves by `moved`, plus noise of scale 1 / epsilon."""
    edges = np.concatenate([[-np.inf], np.linspace(0, moved, 4001), [np.inf]])

    def below(x: Floats) -> Floats:
        return np.where(x < 0, 0.5 * np.exp(np.minimum(x, 0)), 1 - 0.5 * np.exp(-np.maximum(x, 0)))

    p, q = np.diff(below(epsilon * (edges - moved))), np.diff(below(epsilon * edges))
    return Pair(p, q)


def answers(epsilon: float, delta: float) -> Pair:
    """Randomised response that betrays its answer with probability delta."""
    p = (1 - delta) / (1 + math.exp(-epsilon))
    other = 1 - delta - p
    return Pair(np.array([delta, p, other, 0.0]), np.array([0.0, other, p, delta]))


def bounded_range(epsilon: float, top: float) -> Pair:
    """Two outcomes of losses `top` epsilon and (`top` - 1) epsilon: the exponential mechanism's range, and no more."""
    high, low = top * epsilon, (top - 1) * epsilon
    p = (1 - math.exp(-low)) / (math.exp(-high) - math.exp(-low)) if epsilon else 0.5
    return Pair(np.array([p, 1 - p]), np.array([p * math.exp(-high), (1 - p) * math.exp(-low)]))


def allocation(noise: float, steps: int) -> Pair:
    """An epoch with the record in one of T steps: how many steps' outputs fall into each of a few cells."""
    bins = 2
    while bins < 80 and math.comb(steps + bins, bins) <= _MOST_OUTCOMES:
        bins += 1
    inner = np.linspace(-3.0, 1 / noise + (4.5 if bins > 12 else 3.0), bins - 1)
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    q, p = _masses(edges, 0.0), _masses(edges, 1 / noise)
    counts = _compositions(steps, bins)
    logs = gammaln(steps + 1) - gammaln(counts + 1).sum(axis=1) + counts @ np.log(q)
    without = np.exp(logs)
    return Pair(without * (counts @ (p / q)) / steps, without)


@lru_cache(maxsize=32)
def _compositions(total: int, parts: int) -> Floats:
    """All ways to write `total` as a sum of `parts` numbers, as rows."""
    rows = np.zeros((1, 0), dtype=np.int64)
    left = np.array([total])
    for _ in range(parts - 1):
        times = left + 1
        first = np.concatenate([np.arange(n) for n in times])
        rows = np.column_stack([np.repeat(rows, times, axis=0), first])
        left = np.repeat(left, times) - first
    return np.column_stack([rows, left]).astype(np.float64)


def one_use(mechanism: records.Mechanism, group: int, top: float) -> list[Pair]:
    """The pair of one use for `group` records, as parts of which a public coin chooses one."""
    if isinstance(mechanism, records.ZeroConcentrated):
        return [mixture([0, group], [0, 1], [1, 0], 1 / math.sqrt(2 * mechanism.rho))]
    if isinstance(mechanism, records.PureDP):
        if mechanism.source == "exponential":
            return [bounded_range(mechanism.epsilon, top) if group == 1 else laplace(mechanism.epsilon / 2, group)]
        if mechanism.source == "laplace" or group > 1:
            return [laplace(mechanism.epsilon, group)]
        return [answers(mechanism.epsilon, 0.0)]
    if isinstance(mechanism, records.ApproximateDP):
        alone = group == 1 or mechanism.epsilon == 0
        return [answers(mechanism.epsilon, mechanism.delta) if alone else laplace(mechanism.epsilon, group)]
    return _of_sums(mechanism, group)


def _of_sums(mechanism: records.GaussianSum, group: int) -> list[Pair]:
    noise, rate = mechanism.noise_multiplier, mechanism.sampling_rate
    if mechanism.batching == "random-allocation":
        return [allocation(noise, mechanism.steps)]
    if mechanism.batching in ("full", "shuffle"):
        return [mixture([0, group], [0, 1], [1, 0], noise)]
    replaced = mechanism.adjacency == "replace-one" and mechanism.batching != "fixed"
    usual = binom.pmf(np.arange(group + 1), group, rate)
    plain = mixture(range(group + 1), usual, [1.0, *([0.0] * group)], noise)
    if replaced:
        plain = mixture([-0.5, 0, 0.5], [0, 1 - rate, rate], [rate, 1 - rate, 0], noise)
    return [plain]


def _spread(pairs: Sequence[Pair]) -> float:
    p, q = (np.concatenate(parts) for parts in zip(*((one.p, one.q) for one in pairs), strict=True))
    held = (p > 0) & (q > 0)
    loss = np.log(p[held] / q[held])
    mean = float((p[held] * loss).sum())
    return math.sqrt(max(float((p[held] * (loss - mean) ** 2).sum()), 1e-12))


def _on_grid(pair: Pair, width: float, shift: float) -> tuple[Floats, Floats, float]:
    """Whole numbers of cells of loss, rounded down, with their masses under P, and the mass of infinite loss."""
    held = (pair.p > 0) & (pair.q > 0)
    p, q = pair.p[held], pair.q[held]
    places = np.floor(np.log(p / q) / width - shift + 0.5).astype(np.int64)
    _, at = np.unique(places, return_inverse=True)
    p, q = (np.bincount(at, own).astype(np.float64) for own in (p, q))
    low = np.floor(np.log(p / q) / width + 1e-9)
    return low, p, float(pair.p[(pair.p > 0) & (pair.q == 0)].sum())


def discretised(pairs: Sequence[Pair], width: float) -> pld_pmf.DensePLDPmf:
    """The losses of one use for dp_accounting, by the shift of cells at which least is lost."""
    best: tuple[float, Floats, Floats, float] | None = None
    for shift in (0.0, 0.01, 0.03, 0.1, 0.25):
        parts = [_on_grid(pair, width, shift) for pair in pairs]
        low, p = np.concatenate([one[0] for one in parts]), np.concatenate([one[1] for one in parts])
        mean = float((low * p).sum())
        if best is None or mean > best[0]:
            best = mean, low, p, math.fsum(one[2] for one in parts)
    assert best is not None
    _, low, p, infinite = best
    least = int(low.min())
    probabilities = np.bincount((low - least).astype(np.int64), p)
    return pld_pmf.DensePLDPmf(width, least, probabilities, infinite, pessimistic_estimate=False)


@dataclass(frozen=True)
class Oracle:
    """Privacy losses of a ledger in each direction, rounded down."""

    directions: list[pld_pmf.PLDPmf]

    def delta(self, epsilon: float) -> float:
        return max(float(one.get_delta_for_epsilon(epsilon)) for one in self.directions)

    def epsilon(self, delta: float) -> float:
        """The least epsilon with this delta, by bisection: what dp_accounting inverts is off by .05% above 1,000."""
        low, high = 0.0, 2 * max(float(one.get_epsilon_for_delta(delta)) for one in self.directions)
        for _ in range(50 if self.delta(0.0) > delta else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return low

    def best_of(self, gained: Gained, delta: float) -> float:
        """Epsilon of publishing the best of K trials, scored by their loss.

        Losses that were rounded down leave too much mass under Q: it is scaled back. Mass that was cut off is an
        outcome of its own, whose loss is unknown and counts for nothing.
        """
        found = 0.0
        for one, other in (self.directions, self.directions[::-1]):
            dense = one.to_dense_pmf()
            cells = np.asarray(dense._probs)
            losses = (dense._lower_loss + np.arange(len(cells))) * dense._discretization
            cells = np.where(cells > _HARDLY, cells, 0.0)
            behind = np.where(cells > 0, cells * np.exp(-np.maximum(losses, -60.0)), 0.0)
            behind *= min(1.0, (1 - other._infinity_mass) / behind.sum())
            p = np.concatenate([cells, [one._infinity_mass]])
            q = np.append(behind, 0.0)
            for order in (1, -1):
                chosen = [_chosen(masses[::order], gained) for masses in (p, q)]
                found = max(found, _epsilon_of(chosen[0], chosen[1], delta), _epsilon_of(chosen[1], chosen[0], delta))
        return found


def _chosen(masses: Floats, gained: Gained) -> Floats:
    """Masses of the best of K where what is missing has the least score, in ascending order of scores."""
    below = np.append(0.0, masses.cumsum())[:-1] + max(0.0, 1 - float(masses.sum()))
    return gained(np.minimum(below, 1.0), masses)


def _epsilon_of(p: Floats, q: Floats, delta: float) -> float:
    low, high = 0.0, 200.0
    if float(np.maximum(p - q, 0).sum()) <= delta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(p - math.exp(middle) * q, 0).sum() > delta else (low, middle)
    return low


def _fewer(releases: Sequence[records.Release]) -> list[records.Release]:
    """Sums that differ in their noise alone, with at most `_LEVELS` noises: others have the next larger one, which
    costs less (noise can be added to what is released)."""
    alike: dict[records.Mechanism, list[records.Release]] = {}
    for release in releases:
        own = release.mechanism
        kind = dataclasses.replace(own, noise_multiplier=1.0) if type(own) is records.GaussianSum else own
        alike.setdefault(kind, []).append(release)
    found = []
    for own_releases in alike.values():
        own_releases.sort(key=lambda release: getattr(release.mechanism, "noise_multiplier", 0.0), reverse=True)
        each = -(-len(own_releases) // _LEVELS)
        for start in range(0, len(own_releases), each):
            part = own_releases[start : start + each]
            found.append(records.Release(part[0].mechanism, sum(release.count for release in part)))
    return found


def oracle(releases: Sequence[records.Release], group: int = 1, top: float = 0.5) -> Oracle:
    """The price of `releases` from below, for `group` records; `top` chooses among exponential mechanisms."""
    releases = _fewer([release for release in records.merge(list(releases)) if release.count])
    uses = [one_use(release.mechanism, group, top) for release in releases]
    spreads = [_spread(one) for one in uses]
    total = math.sqrt(math.fsum(r.count * s**2 for r, s in zip(releases, spreads, strict=True)))
    least = min(spreads)
    width = max(min(least / _SHARE, total / 1000), total / 50_000, 2e-6)
    directions = []
    logging.disable(logging.WARNING)
    for turn in (lambda pair: pair, Pair.turned):
        whole: pld_pmf.PLDPmf | None = None
        for release, pairs in zip(releases, uses, strict=True):
            one: pld_pmf.PLDPmf = discretised([turn(pair) for pair in pairs], width)
            one = one.self_compose(release.count, 1e-16) if release.count > 1 else one
            whole = one if whole is None else whole.compose(one, 1e-16)
        assert whole is not None
        directions.append(whole)
    logging.disable(logging.NOTSET)
    return Oracle(directions)


LAWS: dict[str, Callable[[float], Gained]] = {
    "poisson": lambda mean: lambda u, mass: np.exp(mean * (u - 1)) * np.expm1(mean * mass),
    "geometric": lambda mean: (
        lambda u, mass: mass / mean / ((1 - (1 - 1 / mean) * u) * (1 - (1 - 1 / mean) * np.minimum(u + mass, 1.0)))
    ),
}
"""Laws of the number of trials, by their mean: E (u + m)^K - E u^K."""
