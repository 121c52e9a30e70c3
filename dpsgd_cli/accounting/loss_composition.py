"""Sums of many discretised privacy losses, and the epsilon or delta of the sum. NumPy only.

The sum's masses come from discrete Fourier transforms of exponentially tilted masses. The tilt moves the bulk of the
distribution to where epsilon lies, so that tails far below 1e-16 keep their relative precision. Mass that falls out of
the window on the right counts as infinite loss, by a Chernoff bound; mass that falls out on the left re-enters at
larger losses. Both can only overstate delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.conversions import minimise
from dpsgd_cli.accounting.dominating_pairs import Cells, LossMasses
from dpsgd_cli.errors import FailedAccountant

Floats = NDArray[np.floating]
Complexes = NDArray[np.complex128]

_NEGLIGIBLE = -18.0
"""log of the share of delta that may lie beyond the window."""
_FARTHEST = -5.0
"""log of the share of delta that may lie beyond the mean of the tilted sum, by Chernoff's bound."""
_VANISHED = 1e-26
"""Fourier coefficients below this stay below it, because every further factor is at most 1 in modulus."""


class Composer:
    """Composer of sums of losses of M kinds; the number of uses of each kind may vary.

    Args: kinds, discretised losses on multiples of `width`; counts, shape (M,), the largest number of uses of each
    kind; tilt (>= 0, per unit of loss) and log_delta, which deltas will be asked for. The last three fix the window:
    other questions get looser answers.
    """

    def __init__(
        self,
        kinds: Sequence[LossMasses],
        width: float,
        counts: Floats,
        tilt: float,
        log_delta: float,
        shorter_too: bool = False,
    ) -> None:
        self.width, self._counts = width, counts
        self._log_missable = log_delta + _NEGLIGIBLE
        plain = [_Tilted(kind, 0.0) for kind in kinds]
        self._plain_mean = float(sum(n * kind.mean for n, kind in zip(counts, plain, strict=True)))
        self.tilt, self._kinds = _gentle_tilt(kinds, plain, width, (tilt, log_delta), counts)
        self._log_mgfs = np.array([kind.log_mgf for kind in self._kinds])
        self._log_finite = np.log1p(-np.array([kind.infinite for kind in kinds]))
        self.start, self.size, self._overflow = self._window(shorter_too)

    def compose(self) -> ComposedLoss:
        """Return the sum of all the uses."""
        return self.compose_each(self._counts[None, :])[0]

    def compose_each(self, cumulative: Floats) -> list[ComposedLoss]:
        """Return one sum for every row of uses so far, shape (E, M); each is one product away from the row before."""
        spectrum = np.ones(self.size // 2 + 1, dtype=np.complex128)
        active = np.arange(len(spectrum))
        before = np.zeros(cumulative.shape[1])
        room = np.empty(self.size), np.empty_like(spectrum)
        result = []
        for row in cumulative:
            for i in np.flatnonzero(row - before):
                factor = self._kinds[i].spectrum(active, self.size, room)
                spectrum *= factor ** int(row[i] - before[i])
                alive = np.abs(spectrum) > _VANISHED
                if np.count_nonzero(alive) < 0.8 * len(active):
                    spectrum, active = spectrum[alive], active[alive]
            before = row
            result.append(self._invert(spectrum, active, row))
        return result

    def _invert(self, spectrum: Complexes, active: Cells, counts: Floats) -> ComposedLoss:
        """Return weights on losses from Fourier coefficients of tilted masses."""
        full = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        full[active] = spectrum
        tilted = np.fft.irfft(full, self.size)
        # Relative rounding errors of the coefficients grow with the uses and come back as white noise of this size
        # in every cell; adding it keeps each mass an overstatement.
        uses = float(counts.sum())
        noise = 3e-16 * (uses + 50) * float(np.sqrt(np.square(tilted).sum() / self.size))
        tilted = np.maximum(tilted, 0.0) + noise
        rounding = 1 + 1e-15 * (uses + 1e4)
        losses = (self.start + np.arange(self.size)) * self.width
        infinite = -np.expm1(float((counts * self._log_finite).sum())) + self._overflow
        return ComposedLoss(
            losses,
            np.roll(tilted, -(self.start % self.size)) * rounding,
            self.tilt,
            float((counts * self._log_mgfs).sum()),
            float(infinite),
        )

    def _window(self, shorter_too: bool) -> tuple[int, int, float]:
        """Return the first cell, the number of cells, and the mass that may lie beyond the last.

        With `shorter_too`, the window also holds the sums of fewer uses, which lie between zero and the whole sum.
        """
        uses = list(zip(self._counts, self._kinds, strict=True))
        mean = float(sum(n * kind.mean for n, kind in uses))
        deviation = float(np.sqrt(sum(n * kind.variance for n, kind in uses))) + 1
        lowest = int(sum(n * int(kind.cells[0]) for n, kind in uses))
        highest = int(sum(n * int(kind.cells[-1]) for n, kind in uses))
        log_scale = float((self._counts * self._log_mgfs).sum()) - self.tilt * self.width * mean
        right, step = self._reach(1 / deviation, log_scale)
        # Mass that leaves on the left re-enters from the right end on, where it weighs as little as the mass there.
        left, _ = self._reach(-1 / deviation, log_scale - self.tilt * self.width * right)
        # Every useful epsilon lies above the mean of the untilted sum.
        start = min(mean - left, self._plain_mean, -left if shorter_too else np.inf)
        low, high = max(lowest, int(start) - 1), min(highest, int(mean + right) + 1)
        overflow = 0.0
        if high < highest:
            slope = step + self.tilt * self.width
            overflow = float(np.exp(self._log_mgf_about_mean(step) + log_scale - slope * (high - mean)))
        return low, _fast_length(high - low + 1), overflow

    def _reach(self, unit: float, log_scale: float) -> tuple[float, float]:
        """Return how far from the tilted mean mass matters, on the side of unit's sign, by Chernoff bounds.

        A true mass is e^(log_scale - tilt * distance) of the tilted one to the right; to the left, log_scale is that
        of the re-entry and exponents exceed the tilt. Returns the least distance and the exponent that proves it.
        """
        tilt = self.tilt * self.width
        sign, extra, least = (1.0, tilt, 0.0) if unit > 0 else (-1.0, 0.0, tilt)

        def distance(log_step: float) -> float:
            step = least + float(np.exp(log_step))
            return (self._log_mgf_about_mean(sign * step) + log_scale - self._log_missable) / (step + extra)

        # Between the best exponents of a Gaussian and of one jump over the whole range; the ratio is quasi-convex.
        jump = 1 / max(float(np.ptp(kind.cells)) + 1 for kind in self._kinds)
        best = minimise(distance, np.log(min(0.1 * abs(unit), jump)), np.log(max(16 * abs(unit), 30 * jump)), 0.2)
        return max(distance(best), 1.0), sign * (least + float(np.exp(best)))

    def _log_mgf_about_mean(self, step: float) -> float:
        return float(sum(n * kind.central_log_mgf(step) for n, kind in zip(self._counts, self._kinds, strict=True)))


def _gentle_tilt(
    kinds: Sequence[LossMasses], plain: list[_Tilted], width: float, aim: tuple[float, float], counts: Floats
) -> tuple[float, list[_Tilted]]:
    """Return the largest of tilt, tilt/2, ... (or 0) that neither moves the bulk far past the aim nor widens it.

    If losses are bounded, Renyi orders aim past every loss that matters; heavy tails would dominate a sum. Returns the
    kinds under that tilt, too.
    """
    tilt, log_delta = aim
    limit = 2 * sum(n * kind.variance for n, kind in zip(counts, plain, strict=True))
    for halvings in range(20):
        lesser = tilt / 2**halvings
        tilted = [_Tilted(kind, width * lesser) for kind in kinds]
        uses = list(zip(counts, tilted, strict=True))
        beyond = sum(n * (kind.log_mgf - lesser * width * kind.mean) for n, kind in uses)  # Chernoff's, at the new mean
        if beyond >= log_delta + _FARTHEST and sum(n * kind.variance for n, kind in uses) <= limit:
            return lesser, tilted
    return 0.0, plain


class _Tilted:
    """One kind of loss under the tilt; unit of loss: one cell."""

    def __init__(self, kind: LossMasses, tilt: float) -> None:
        held = kind.masses > 0
        logs = tilt * kind.cells[held] + np.log(kind.masses[held])
        top = float(logs.max())
        masses = np.exp(logs - top)
        total = float(masses.sum())
        self.cells, self.masses = kind.cells[held], np.maximum(masses / total, 1e-300)
        self.log_mgf = top + float(np.log(total))
        self.mean = float((self.masses * self.cells).sum())
        self.variance = float((self.masses * (self.cells - self.mean) ** 2).sum())

    def central_log_mgf(self, step: float) -> float:
        """Return log E e^(step (cell - mean)), without cancellation where it is near zero."""
        exponents = step * (self.cells - self.mean)
        if float(exponents.max()) < 30:
            return float(np.log1p((self.masses * (np.expm1(exponents) - exponents)).sum()))
        logs = exponents + np.log(self.masses)
        top = float(logs.max())
        return top + float(np.log(np.exp(logs - top).sum()))

    def spectrum(self, frequencies: Cells, size: int, room: tuple[Floats, Complexes]) -> Complexes:
        """Return coefficients of the discrete Fourier transform over `size` cells, at `frequencies` out of 0..size/2.

        Losses beyond `size` cells are folded back, as the transform does to the sums, too. `room` is working memory:
        allocating it anew takes as long as the transform.
        """
        places = self.cells % size
        if len(frequencies) * len(places) < size // 5:
            phases = (frequencies[:, None] * places[None, :]) % size
            return np.exp(phases * (-2j * np.pi / size)) @ self.masses
        dense, transform = room
        dense[:] = 0.0
        np.add.at(dense, places, self.masses)
        np.fft.rfft(dense, out=transform)
        return transform[frequencies]


@dataclass(frozen=True)
class ComposedLoss:
    """Masses tilted * exp(log_scale - tilt * losses) on `losses`, plus the mass of infinite loss."""

    losses: Floats
    tilted: Floats
    tilt: float
    log_scale: float
    infinite: float

    def __post_init__(self) -> None:
        if not np.isfinite(float(self.tilted.sum()) + self.log_scale + self.infinite):
            raise FailedAccountant("the masses of the composed loss are not finite; use rdp")

    def delta(self, epsilon: float) -> float:
        """Return sum of mass * (1 - e^(epsilon - loss)) over losses above `epsilon`, plus infinite mass. In [0, 1]."""
        first = int(np.searchsorted(self.losses, epsilon, side="right"))
        losses = self.losses[first:]
        weights = self._masses(first)
        return min(1.0, self.infinite + float((weights * -np.expm1(epsilon - losses)).sum()))

    def epsilon(self, delta: float) -> float:
        """Return the smallest epsilon >= 0 with `self.delta(epsilon) <= delta`; inf if infinite mass exceeds delta."""
        if self.infinite > delta:
            return float("inf")
        if self.delta(0.0) <= delta:
            return 0.0
        losses, deltas = self.profile()
        fits = np.flatnonzero(deltas <= delta)
        if not len(fits):
            return float(losses[-1])
        j = int(fits[0])  # not 0, whose delta is above
        above, below = float(deltas[j - 1]), float(deltas[j])
        return _between(float(losses[j - 1]), float(losses[j]), (above - delta) / (above - below))

    def profile(self) -> tuple[Floats, Floats]:
        """Return 0 and all positive losses, ascending, and `delta` at each; between two it is linear in e^epsilon.

        delta(loss_j) = sum over k > j of mass_k (1 - e^(loss_j - loss_k)), all j by one recursion from the top.
        """
        first = int(np.searchsorted(self.losses, 0.0, side="right"))
        losses, masses = self.losses[first:], self._masses(first)
        decay = np.exp(-(losses[1] - losses[0])) if len(losses) > 1 else 0.0
        deltas = self.infinite + _shortfalls(np.cumsum(masses[::-1])[::-1], float(decay))
        return np.append(0.0, losses), np.append(self.delta(0.0), deltas)

    def _masses(self, first: int) -> Floats:
        exponents = self.log_scale - self.tilt * self.losses[first:]
        # No mass is above 1, however much the tilt amplifies noise far to the left.
        return np.minimum(self.tilted[first:] * np.exp(np.minimum(exponents, 700.0)), 1.0)


@dataclass(frozen=True, eq=False)
class ComposedProfile:
    """Privacy profile of composed losses: epsilon -> the largest delta of all directions.

    `directions`: for each direction of the adjacency, compositions of the same losses at different tilts. Each of them
    is a bound, so the least one is.
    """

    directions: Sequence[Sequence[ComposedLoss]]

    def __call__(self, epsilon: float) -> float:
        return max(min(loss.delta(epsilon) for loss in same) for same in self.directions)

    @cached_property
    def lines(self) -> list[tuple[Floats, Floats]]:
        """Return ascending epsilons (the first is 0) and their deltas, for each direction."""
        found = []
        for first, *others in self.directions:
            epsilons, deltas = first.profile()
            for other in others:
                # a profile is convex in e^epsilon, so that its chords are bounds
                at, own = other.profile()
                between = np.interp(np.exp(np.minimum(epsilons, 700.0)), np.exp(np.minimum(at, 700.0)), own)
                deltas = np.minimum(deltas, between)
            found.append((epsilons, deltas))
        return found


def _between(low: float, high: float, share: float) -> float:
    """Return the point in a cell where delta(epsilon) = A - e^epsilon B has fallen by `share`, rounded up."""
    gap, share = high - low, min(share, 1.0)
    rise = np.log1p(share * np.expm1(gap)) if gap < 30 else gap + np.log(share + np.exp(-gap))
    return min(high, low + float(rise) * (1 + 1e-9) + 1e-15)


def _shortfalls(above: Floats, decay: float) -> Floats:
    """Return s_j = sum over k > j of mass_k (1 - decay^(k-j)), from above_j = sum over k >= j of mass_k.

    s_j = decay s_(j+1) + (1 - decay) above_(j+1): positive terms only, so nothing cancels. Unrolled in blocks within
    which decay^i stays far from underflow.
    """
    gains = (1 - decay) * np.append(above[1:], 0.0)
    block = max(1, min(len(gains), int(200 / -np.log(decay)))) if 0 < decay < 1 else 1
    result = np.empty_like(gains)
    carry = 0.0
    for stop in range(len(gains), 0, -block):
        start = max(0, stop - block)
        powers = decay ** np.arange(stop - start, dtype=np.float64)[::-1]
        sums = np.cumsum((gains[start:stop] / powers)[::-1])[::-1] * powers
        result[start:stop] = sums + carry * powers * decay
        carry = float(result[start])
    return result


def _fast_length(least: int) -> int:
    """Return the least even 2^a 3^b 5^c that is no smaller than `least`."""
    best = 1 << max(least - 1, 1).bit_length()
    for five in (1, 5, 25):
        for three in (1, 3, 9):
            base = 2 * five * three
            best = min(best, base << max(0, (-(-least // base) - 1).bit_length()))
    return best
