"""Dominating losses of an epoch in which every record is in one of T steps, drawn uniformly and independently.

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

Numbers. Under Q the ratio dP/dQ is the mean of T independent log-normal numbers Y_t = e^(x_t / z - 1 / 2z^2) of mean 1,
x_t standard normal. Both H_a(P, Q) = E (R - a)_+ and H_a(Q, P) = E (1 - a R)_+ are means of convex functions of R. So
numbers that are larger than Y_t in the convex order give upper bounds. Here each value is split between the two
neighbouring points of a grid, which keeps its mean; sums of two are split again, and so on by doubling. (Doroshenko et
al. 2022 do the same to losses of one step.) Mass beyond the grid's end, at `_TAIL` deviations under P, counts as
infinite loss in both directions. No random numbers are used, and no lower tail is left out: it goes to ratio 0. Feldman
and Shenfeld 2026 (arXiv 2602.17284) compute the same pair by another method.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import ndtr

from dpsgd_cli.accounting.dominating_pairs import Floats, LossMasses, LossPair, cell_masses, gaussian_pair
from dpsgd_cli.accounting.mechanism import GaussianSum

_TAIL = 10.0
"""Deviations of one step's noise kept on both sides (7.6e-24 beyond)."""
_POINTS = 400
"""Number of points of the grids that values lie on."""
_BINS = 1000
"""Bins of the histogram that places a grid's points: this many over all values, and again where nearly all lie."""
_RARE = 1e-6
"""Mass on each side that "nearly all" leaves out."""
_EVEN = 0.1
"""Exponent by which points follow masses: their number grows with this power of the density of the loss."""
_LEAST = 1e-28
"""Mass below the least point other than 0."""
_MOST_NOISE = 1e4
"""Beyond this noise an epoch is priced as unsampled: the grid would lose its split of masses in rounding."""


def losses(mechanism: GaussianSum, width: float) -> LossPair:
    """Return the losses of one epoch, on multiples of `width`."""
    noise, steps = mechanism.noise_multiplier, mechanism.steps
    if noise > _MOST_NOISE:
        return gaussian_pair(1.0, noise, width)
    ratios, masses = law_of_ratio(noise, steps)
    one = float(ndtr(-_TAIL - 1 / noise))
    beyond_p, beyond_q = float(ndtr(-_TAIL)) + (steps - 1) * one, steps * one
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


@lru_cache(maxsize=256)
def law_of_ratio(noise: float, steps: int) -> tuple[Floats, Floats]:
    """Return values and masses under Q, no less in the convex order than the mean of Y_1, ..., Y_T within the tails."""
    one = _one_step(noise)
    values, masses = one
    for bit in f"{steps:b}"[1:]:
        values, masses = _sum((values, masses), (values, masses))
        if bit == "1":
            values, masses = _sum((values, masses), one)
    return values / steps, masses


def _one_step(noise: float) -> tuple[Floats, Floats]:
    """Return Y, whose mass under P is that of a normal moved by 1 / z: each cell's two masses are kept."""
    z = np.linspace(-_TAIL, _TAIL + 1 / noise, _POINTS)
    grid = np.exp(z / noise - 1 / (2 * noise**2))
    q, p = cell_masses(z), cell_masses(z - 1 / noise)
    upper = np.clip((p - q * grid[:-1]) / np.diff(grid), 0.0, q)
    masses = np.zeros(len(grid) + 1)
    masses[2:] += upper
    masses[1:-1] += q - upper
    # the mass below also keeps its mean, between 0 and the least point
    low_q, low_p = float(ndtr(z[0])), float(ndtr(z[0] - 1 / noise))
    masses[1] += low_p / grid[0]
    masses[0] += low_q - low_p / grid[0]
    return np.concatenate([[0.0], grid]), masses


def _sum(first: tuple[Floats, Floats], second: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Return the sum of two independent numbers, on a grid of its own, with its mean kept."""
    values = np.add.outer(first[0], second[0]).ravel()
    masses = np.multiply.outer(first[1], second[1]).ravel()
    if first is second:
        # each unequal pair counts twice
        upper_half = np.triu(np.ones((len(first[0]),) * 2)).ravel() > 0
        masses = np.where(np.eye(len(first[0])).ravel() > 0, masses, 2 * masses)[upper_half]
        values = values[upper_half]
    kept = masses > 0
    values, masses = values[kept], masses[kept]
    grid = _grid(values, masses)
    cell = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    upper = masses * np.clip((values - grid[cell]) / (grid[cell + 1] - grid[cell]), 0.0, 1.0)
    found = np.zeros(len(grid))
    found += np.bincount(cell, weights=masses - upper, minlength=len(grid))
    found += np.bincount(cell + 1, weights=upper, minlength=len(grid))
    return grid, found


def _grid(values: Floats, masses: Floats) -> Floats:
    """Return 0, and points up to the largest value, denser in the logarithm where P or Q have more mass there."""
    positive = values > 0
    logs, own = np.log(values[positive]), masses[positive]
    own = own * (1 + values[positive] / float((values * masses).sum()))
    ends = np.linspace(float(logs.min()), float(logs.max()), _BINS + 1)
    below = np.cumsum(np.histogram(logs, ends, weights=own)[0])
    first, last = np.searchsorted(below, [_RARE, 2 - _RARE]).clip(0, _BINS - 1)
    low, high = ends[first], ends[last + 1]
    least = ends[np.searchsorted(below, _LEAST)]
    ends = np.unique(np.concatenate([np.linspace(least, ends[-1], _BINS), np.linspace(low, high, _BINS)]))
    held = np.histogram(logs, ends, weights=own)[0]
    density = np.maximum(held / np.diff(ends), 1e-30) ** _EVEN
    reached = np.concatenate([[0.0], np.cumsum(density * np.diff(ends))])
    points = np.interp(np.linspace(0, reached[-1], _POINTS), reached, ends)
    grid = np.exp(points[:-1])
    return np.unique(np.concatenate([[0.0], grid, [float(values.max())]]))
