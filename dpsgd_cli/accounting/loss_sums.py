"""Sums of many discretised privacy losses by the fast Fourier transform, and the epsilon or delta of the sum.

Mass above the window counts as infinite loss, by a Chernoff bound; mass below re-enters at larger losses. Rounding
errors of the transform are added to every cell. All can only overstate delta.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from dpsgd_cli.accounting.losses import Floats, Losses
from dpsgd_cli.accounting.noise_levels import Levels
from dpsgd_cli.errors import FailedAccountant

_LOST = 14.0
"""Mass that may lie beyond each end of the window, as -log of its share of delta; above, it counts as infinite loss."""
_MOST_CELLS = 1 << 21
_WIDEST = 100.0
"""Widest cell of losses: a window that still does not hold them grows with its cells, and never will."""
_MOST_VARIANCE = 1e12
_SPREAD = 0.01
"""Width of a cell over the standard deviation of an average use; it inflates the sum's by 4e-6 of it."""
_UNEVEN = 16.0
"""Ratio of the variances of losses at which a curve is cut."""
_KEPT = 1 << 24
"""Most numbers of spectra that are kept."""


@dataclass(frozen=True)
class SumOfLosses:
    """Masses on the losses (start + k) * width, and the mass of infinite loss."""

    start: int
    width: float
    masses: Floats
    infinite: float

    def delta(self, epsilon: float) -> float:
        """Return sum of mass * (1 - e^(epsilon - loss)) over losses above `epsilon`, plus infinite mass."""
        first = min(max(0, math.floor(epsilon / self.width) + 1 - self.start), len(self.masses))
        losses = (self.start + first + np.arange(len(self.masses) - first)) * self.width
        held = self.masses[first:] * -np.expm1(np.minimum(epsilon - losses, 0.0))
        return min(1.0, self.infinite + float(held.sum()))

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 with `self.delta(epsilon) <= delta`, from above; inf if there is none."""
        if self.infinite > delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        places = range(max(0, self.start) + 1, self.start + len(self.masses))
        fails = places.start - 1 + bisect.bisect_left(places, True, key=lambda k: self.delta(k * self.width) <= delta)
        # between two multiples delta falls linearly in e^epsilon
        at = [self.delta(place * self.width) for place in (fails, fails + 1)]
        share = min(1.0, (at[0] - delta) / (at[0] - at[1]))
        return (fails * self.width + math.log1p(share * math.expm1(self.width))) * (1 + 1e-9) + 1e-15


@dataclass(frozen=True)
class ProfileOfSums:
    """Privacy profile of sums of losses: epsilon to the largest delta of all directions; 0 from `most` on."""

    directions: Sequence[SumOfLosses]
    most: float

    def __call__(self, epsilon: float) -> float:
        return 0.0 if epsilon >= self.most else max(one.delta(epsilon) for one in self.directions)

    @cached_property
    def lines(self) -> list[tuple[Floats, Floats]]:
        """Ascending epsilons from 0 and their deltas, for each direction; delta is linear in e^epsilon between."""
        found = []
        for one in self.directions:
            first = max(0, 1 - one.start)
            losses = (one.start + first + np.arange(len(one.masses) - first)) * one.width
            near = losses < 700
            losses, masses = losses[near], one.masses[first:][near]
            behind = (own[::-1].cumsum()[::-1][1:] for own in (masses, masses * np.exp(-losses)))
            above, weighed = (np.append(own, 0.0) for own in behind)
            beyond = one.infinite + float(one.masses[first + len(masses) :].sum())
            deltas = beyond + np.maximum(above - np.exp(losses) * weighed, 0.0)
            found.append((np.append(0.0, losses), np.append(one.delta(0.0), deltas)))
        return found


def summed(kinds: Sequence[Losses], levels: Levels, uses: Floats, least: float) -> list[SumOfLosses]:
    """Return the sums of `uses[e, i]` uses of level i, which is a public coin between two of `kinds`, for each row e.

    Rows grow. `least` is the smallest delta that will be asked for sharply. Raises FailedAccountant for losses too
    large to discretise.
    """
    variances = np.array([kind.moments()[1] for kind in kinds])
    own = levels.share * variances[levels.first] + (1 - levels.share) * variances[levels.second]
    spread, high, sums = uses @ own, len(uses), list[SumOfLosses]()
    # cells that suit the end are too coarse for a start of much smaller losses
    while high > 0:
        low = int(np.searchsorted(spread[:high], spread[high - 1] / _UNEVEN))
        sums = _summed(kinds, levels, uses[low:high], float(spread[high - 1]), least) + sums
        high = low
    return sums


def _summed(kinds: Sequence[Losses], levels: Levels, uses: Floats, variance: float, least: float) -> list[SumOfLosses]:
    """Return the sums of rows that share a width of cells; `variance` is that of the last row."""
    if not variance < _MOST_VARIANCE:
        raise FailedAccountant(f"pld: a loss of variance {variance:.2g} is too large to discretise; use rdp")
    if not uses[-1].any():
        return [SumOfLosses(0, 1.0, np.ones(1), 0.0)] * len(uses)
    width = min(max(math.sqrt(variance / uses[-1].sum()) * _SPREAD, 1e-12), 0.05)
    beyond = _LOST - math.log(max(least, 1e-300))
    while True:
        low, high, lost = _window(kinds, levels, uses[-1], math.sqrt(variance) + width, width, beyond)
        # every epsilon of interest, of each row, is at or above 0
        low = min(low, 0.0) if len(uses) > 1 else low
        if high - low <= width * _MOST_CELLS:
            break
        width = max(2 * width, (high - low) / _MOST_CELLS)
        if width > _WIDEST:
            raise FailedAccountant("pld: the losses of so many uses are too small to discretise; use rdp")
    start, most = math.floor(low / width), uses[-1].sum()
    size = next_fast_len(math.ceil(high / width) - start + 2, real=True)
    kept: dict[int, np.ndarray] = {}

    def spectrum(kind: int) -> np.ndarray:
        if kind not in kept:
            lows, highs, upper = kinds[kind].dots(width)
            places, weights = np.concatenate([lows, highs]) % size, np.concatenate([kinds[kind].masses - upper, upper])
            found = rfft(np.bincount(places, weights=weights, minlength=size))
            if (len(kept) + 1) * size > _KEPT:
                return found
            kept[kind] = found
        return kept[kind]

    coins, place = np.unique(np.stack([levels.first, levels.second, levels.share], axis=1), axis=0, return_inverse=True)
    place = place.ravel()
    product, before, sums = np.ones(size // 2 + 1, dtype=complex), np.zeros(uses.shape[1]), []
    infinite = np.array([kind.infinite for kind in kinds])
    safe = np.log1p(-(levels.share * infinite[levels.first] + (1 - levels.share) * infinite[levels.second]))
    for row in uses:
        added, before = np.bincount(place, weights=row - before, minlength=len(coins)), row
        for count in np.unique(added[added > 0]):
            once = np.ones_like(product)
            for first, second, part in coins[added == count]:
                own = spectrum(int(first))
                once *= own if part == 1 else part * own + (1 - part) * spectrum(int(second))
            product *= once ** int(count)
        found = np.maximum(irfft(product, size), 0.0)
        # rounding errors of coefficients come back as white noise of this size in every cell
        noise = 3e-16 * (row.sum() + 50) * math.sqrt(float(found @ found) / size)
        masses = np.minimum(np.roll(found, -(start % size)) * (1 + 1e-15 * (most + 1e4)) + noise, 1.0)
        sums.append(SumOfLosses(start, width, masses, float(-math.expm1(row @ safe)) + lost))
    return sums


def _window(
    kinds: Sequence[Losses], levels: Levels, uses: Floats, deviation: float, width: float, beyond: float
) -> tuple[float, float, float]:
    """Return losses beyond which little lies, by Chernoff's bound (what lies below re-enters above), and how much."""
    exponents = np.geomspace(1e-3, 1e2, 24)[:, None] / deviation
    logs, ends = np.zeros((len(kinds), 2, 24)), np.zeros((len(kinds), 2))
    for number, kind in enumerate(kinds):
        lows, highs, upper = kind.dots(width)
        starts = np.arange(0, len(lows), 16)
        masses = np.add.reduceat(kind.masses, starts)
        low, high = np.minimum.reduceat(lows, starts) * width, np.maximum.reduceat(highs, starts) * width
        mean = np.add.reduceat((kind.masses - upper) * lows + upper * highs, starts) * width
        # neighbouring cells as one, with mass and mean kept: greater in the convex order
        apart, alike = np.where(high > low, high - low, 1.0), high == low
        split = (
            np.where(alike, masses / 2, (masses * high - mean) / apart),
            np.where(alike, masses / 2, (mean - masses * low) / apart),
        )
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for side, sign in enumerate((1, -1)):
                parts = [
                    np.exp(sign * exponents * at) @ np.maximum(own, 0.0)
                    for at, own in zip((low, high), split, strict=True)
                ]
                logs[number, side] = np.log(parts[0] + parts[1])
        ends[number] = low.min(), high.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.log(levels.share)[:, None, None], np.log1p(-levels.share)[:, None, None]
        each = np.logaddexp(shares[0] + logs[levels.first], shares[1] + logs[levels.second])
    used = uses > 0
    up, down = np.nan_to_num(np.tensordot(uses[used], each[used], 1), nan=np.inf)
    least = float(uses @ np.minimum(ends[levels.first, 0], ends[levels.second, 0]))
    most = float(uses @ np.maximum(ends[levels.first, 1], ends[levels.second, 1]))
    highest = float(np.min((up + beyond) / exponents[:, 0]))
    lowest = float(np.max(-(down + beyond) / exponents[:, 0]))
    return max(lowest, least), min(highest, most), 0.0 if most <= highest else math.exp(-beyond)
