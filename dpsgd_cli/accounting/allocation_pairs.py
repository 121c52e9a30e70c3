"""Dominating losses of random allocation: an epoch in which every record is in one of T steps, drawn uniformly.

The pair. P = average over t of N(e_t, z^2 I), Q = N(0, z^2 I), in T dimensions: the steps' noisy sums in units of the
sensitivity C, less the contribution of the other records. The mean is e_t if the record is in step t, and 0 if there is
no record.

Guarantee: P against Q, in both directions, dominates an epoch under add-remove and zero-out, however each step's
weights are computed from earlier ones. Proof. Fix the others' steps, which have the same distribution on both
neighbours and are drawn without looking at who else is there (joint convexity). The numbers y_1, ..., y_T of either
member of the pair suffice to simulate the epoch step by step. Given all that was released so far, the record's clipped
gradient at step s is a fixed vector C v, |v| <= 1. Along v release C (|v| y_s + (1 - |v|^2)^(1/2) z n), n standard
normal, across it noise of deviation z C, and add the contribution of the others. That has the mean C v where y_s has
mean 1, and 0 where it has 0, and deviation z C in every direction: the step's distribution. So the epoch is a function
of y and of noise that carries no information, and epochs, whose steps are drawn anew, compose adaptively (Zhu, Dong and
Wang 2022, Theorem 10). The pair: Chua et al. 2024 (arXiv 2412.16802, "Balls-and-Bins"), Feldman and Shenfeld 2025
(arXiv 2502.08202). A replaced record has no such pair: refused.

k of t steps (`participations`). If each record is in k steps of an epoch of t, drawn uniformly without replacement, the
epoch is dominated by k uses of the pair, of floor(t / k) steps each, composed. Samplers draw t = k T steps, so nothing
is lost to rounding, and a ledger counts k uses of T steps when an epoch begins. Proof. Draw a uniform order of the t
steps, cut it into k blocks of at least floor(t / k) steps, and draw one step of each block: by symmetry all k-subsets
are equally likely. The order and the cuts do not depend on data, so they may be revealed (joint convexity). Given them,
the numbers y of the blocks are independent pairs, from which the epoch is simulated step by step, in whatever order
blocks interleave. More steps only help: leave out all but floor(t / k) of a block's, at random, and reveal which
(Feldman and Shenfeld 2025).

Numbers. Under Q the ratio dP/dQ is the mean of T independent log-normal numbers Y_t = e^(x_t / z - 1 / 2z^2) of mean 1,
x_t standard normal. Both H_a(P, Q) = E (R - a)_+ and H_a(Q, P) = E (1 - a R)_+ are means of convex functions of R. So
numbers that are larger than Y_t in the convex order give upper bounds. Here values lie on e^(i h), i whole. Each value
is split between its two neighbours so that its mean is kept, and so is each sum of two, by doubling. A split moves a
logarithm by at most h, so the variance of R grows by at most h^2 / 4 of it; h is halved as R concentrates. Sums of
e^(i h) and e^((i + d) h) move i + d by a number that depends on d alone, so a sum of two costs one product of vectors
for each d; where e^(-d h) < h, all d together. (Doroshenko et al. 2022 split losses of one step so.) Mass beyond the
grid's end, at `_STEP_TAIL` deviations under P, counts as infinite loss in both directions. No random numbers are used,
and no lower tail is left out: it goes to ratio 0. Feldman and Shenfeld 2026 (arXiv 2602.17284) compute the same pair by
another method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from dpsgd_cli.accounting.dominating_pairs import Floats, LossMasses, LossPair, cell_masses, gaussian_pair
from dpsgd_cli.accounting.mechanism import GaussianSum

_STEP_TAIL = 10.0
"""Deviations of one step's noise kept on both sides (7.6e-24 beyond)."""
_GRID_POINTS = 2000
"""Number of points on which one step's ratio lies."""
_FINENESS = 0.1
"""Largest spacing h, in standard deviations of the mean of so many steps."""
_LEAST_MASS = 1e-30
"""Mass at the lower end that is split between ratio 0 and the least point."""
_UNSAMPLED_FROM = 1e4
"""Beyond this noise an epoch is priced as unsampled: the grid would lose its split of masses in rounding."""


def allocated(mechanism: GaussianSum, width: float) -> LossPair:
    """Return the losses of one epoch, on multiples of `width`."""
    noise, steps = mechanism.noise_multiplier, mechanism.steps
    if noise > _UNSAMPLED_FROM:
        return gaussian_pair(1.0, noise, width)
    ratios, masses = law_of_ratio(noise, steps)
    # rounding errors of masses double with each sum
    masses = masses * (1 + 1e-14 + 2e-16 * steps)
    one = float(ndtr(-_STEP_TAIL - 1 / noise))
    beyond_p, beyond_q = float(ndtr(-_STEP_TAIL)) + (steps - 1) * one, steps * one
    held = ratios > 0
    loss = np.log(ratios[held])
    remove = _on_multiples(loss, ratios[held] * masses[held], width, beyond_p)
    add = _on_multiples(-loss, masses[held], width, beyond_q + float(masses[~held].sum()))
    return LossPair(remove, add)


def _on_multiples(loss: Floats, masses: Floats, width: float, infinite: float) -> LossMasses:
    """Split each mass between the multiples next to its loss so that both of its masses are kept."""
    low = np.floor(loss / width).astype(np.int64)
    upper = masses * np.clip(np.expm1(low * width - loss) / np.expm1(-width), 0.0, 1.0)
    cells, places = np.unique(np.concatenate([low, low + 1]), return_inverse=True)
    weights = np.concatenate([masses - upper, upper])
    found: Floats = np.bincount(places, weights=weights, minlength=len(cells)).astype(np.float64)
    return LossMasses(cells, found, infinite)


@dataclass(frozen=True)
class _Law:
    """Mass `none` at 0 and `masses` at e^(first h), e^((first + 1) h), ..."""

    none: float
    first: int
    masses: Floats

    def finer(self) -> _Law:
        """Return the same on a grid of half the spacing."""
        masses = np.zeros(2 * len(self.masses) - 1)
        masses[::2] = self.masses
        return _Law(self.none, 2 * self.first, masses)


@lru_cache(maxsize=256)
def law_of_ratio(noise: float, steps: int) -> tuple[Floats, Floats]:
    """Return values and masses under Q, no less in the convex order than the mean of Y_1, ..., Y_T within the tails."""
    h = (2 * _STEP_TAIL + 1 / noise) / noise / _GRID_POINTS
    one = _one_step(noise, h)
    whole, count = one, 1
    relative = math.expm1(min(noise**-2, 50.0))
    for bit in f"{steps:b}"[1:]:
        whole, count = _sum(whole, whole, h), 2 * count
        if bit == "1":
            whole, count = _sum(whole, one, h), count + 1
        if h > _FINENESS * math.sqrt(relative / count):
            h, whole, one = h / 2, whole.finer(), one.finer()
    values = np.exp((whole.first + np.arange(len(whole.masses))) * h - math.log(steps))
    return np.concatenate([[0.0], values]), np.concatenate([[whole.none], whole.masses])


def _one_step(noise: float, h: float) -> _Law:
    """Return Y, whose mass under P is that of a normal moved by 1 / z: each cell's two masses are kept."""
    centre, reach = 1 / (2 * noise**2), _STEP_TAIL / noise
    first, last = math.floor((-reach - centre) / h), math.ceil((reach + centre) / h)
    logs = np.arange(first, last + 1) * h
    z, grid = (logs + centre) * noise, np.exp(logs)
    q, p = cell_masses(z), cell_masses(z - 1 / noise)
    upper = np.clip((p - q * grid[:-1]) / np.diff(grid), 0.0, q)
    masses = np.zeros(len(grid))
    masses[1:] += upper
    masses[:-1] += q - upper
    # the mass below also keeps its mean, between 0 and the least point
    low_q, low_p = float(ndtr(z[0])), float(ndtr(z[0] - 1 / noise))
    masses[0] += low_p / grid[0]
    return _Law(low_q - low_p / grid[0], first, masses)


def _sum(one: _Law, other: _Law, h: float) -> _Law:
    """Return the sum of two independent numbers, with its mean kept."""
    first = min(one.first, other.first)
    last = max(one.first + len(one.masses), other.first + len(other.masses)) - 1
    # two equal numbers are log 2 above each
    found = np.zeros(last - first + math.ceil(math.log(2) / h) + 2)
    if one is other:
        _add_pairs(found[one.first - first :], one, other, h, 0, 1.0)
        _add_pairs(found[one.first - first :], one, other, h, 1, 2.0)
    else:
        _add_pairs(found[other.first - first :], one, other, h, 0, 1.0)
        _add_pairs(found[one.first - first :], other, one, h, 1, 1.0)
    for law, none in ((one, other.none), (other, one.none)):
        found[law.first - first :][: len(law.masses)] += none * law.masses
    return _trimmed(one.none * other.none, first, found, h)


def _add_pairs(found: Floats, smaller: _Law, larger: _Law, h: float, least: int, times: float) -> None:
    """Add the sums of pairs whose larger number is from `larger`, d >= `least` points above the one from `smaller`.

    `found` begins at the first point of `larger`. With `least` 0 and `times` 1 only equal numbers of one law are meant.
    """
    x, y = smaller.masses, larger.masses
    gap = larger.first - smaller.first
    # y's place j is x's place j + gap
    nearest = max(least, gap - len(x) + 1)
    farthest = gap + len(y) - 1
    if smaller is larger and least == 0:
        farthest = 0
    far = max(nearest, math.ceil(math.log(1 / h) / h) if h < 1 else 0)
    for d in range(nearest, min(farthest, far - 1) + 1):
        shift = math.log1p(math.exp(-d * h)) / h
        whole = math.floor(shift)
        share = math.expm1((shift - whole) * h) / math.expm1(h)
        low, high = max(0, d - gap), min(len(y), len(x) + d - gap)
        weights = times * y[low:high] * x[low + gap - d : high + gap - d]
        found[low + whole : high + whole] += (1 - share) * weights
        found[low + whole + 1 : high + whole + 1] += share * weights
    if far > farthest:
        return
    # the others move up by less than one point: masses and means of all of them together
    below = np.arange(len(y)) + gap - far
    held = below >= 0
    last = np.minimum(below[held], len(x) - 1)
    logs = np.arange(len(x)) * h
    means = np.cumsum(x * np.exp(logs - logs[-1]))[last] * np.exp(logs[-1] - (below[held] + far) * h)
    masses = times * y[held] * np.cumsum(x)[last]
    upper = np.minimum(times * y[held] * means / math.expm1(h), masses)
    at = np.flatnonzero(held)
    found[at] += masses - upper
    found[at + 1] += upper


def _trimmed(none: float, first: int, masses: Floats, h: float) -> _Law:
    """Split the least masses between 0 and the point above them, keeping the mean; drop places without mass."""
    start = int(np.searchsorted(np.cumsum(masses), _LEAST_MASS))
    stop = int(np.flatnonzero(masses)[-1]) + 1
    shares = np.exp(np.arange(-start, 0) * h)
    kept = masses[start:stop].copy()
    kept[0] += float(masses[:start] @ shares)
    return _Law(none + float(masses[:start] @ (1 - shares)), first + start, kept)
