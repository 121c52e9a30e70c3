"""Sums of many discretised privacy losses, and the epsilon or delta of the sum. NumPy only.

The sum's masses come from discrete Fourier transforms of exponentially tilted masses. The tilt moves the bulk of the
distribution to where epsilon lies, so that tails far below 1e-16 keep their relative precision. Mass that falls out of
the window on the right counts as infinite loss, by a Chernoff bound; mass that falls out on the left re-enters at
larger losses. Both can only overstate delta.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.conversions import minimise
from dpsgd_cli.accounting.dominating_pairs import Cells, LossMasses
from dpsgd_cli.accounting.noise_levels import Levels
from dpsgd_cli.errors import FailedAccountant

Floats = NDArray[np.floating]
Complexes = NDArray[np.complex128]

_NEGLIGIBLE = -18.0
"""log of the share of delta that may lie beyond the window."""
_FARTHEST = -5.0
"""log of the share of delta that may lie beyond the mean of the tilted sum, by Chernoff's bound."""
_VANISHED = 1e-26
"""Fourier coefficients below this stay below it, because every further factor is at most 1 in modulus."""
_EXACTLY = 8
"""Number of kinds from which on searches use merged losses; what they find is evaluated without."""
_SEARCHED = 250
"""About how many losses of a kind a search evaluates."""
_TERMS, _NEAR = 8, 0.02
"""Terms of a series of logarithms, and how far it is taken: .02^8 / 8 is 3e-15."""


class Composer:
    """Composer of sums of losses of M levels; the number of uses of each level may vary.

    Args: kinds, discretised losses on multiples of `width`; levels, of which level i has the loss of kind `first[i]`
    with probability `share[i]` and else that of `second[i]`; counts, shape (M,), the largest number of uses of each
    level; tilt (>= 0, per unit of loss) and log_delta, which deltas will be asked for. The last three fix the window:
    other questions get looser answers.
    """

    def __init__(
        self,
        kinds: Sequence[LossMasses],
        levels: Levels,
        width: float,
        counts: Floats,
        tilt: float,
        log_delta: float,
        shorter_too: bool = False,
    ) -> None:
        self.width, self._counts = width, counts
        self._log_missable = log_delta + _NEGLIGIBLE
        plain = _Uses(kinds, levels, counts, 0.0)
        self._plain_mean = plain.mean
        self.tilt, self._uses = _gentle_tilt(kinds, levels, plain, width, (tilt, log_delta))
        infinite = np.array([kind.infinite for kind in kinds])
        share = levels.share
        self._log_finite = np.log1p(-(share * infinite[levels.first] + (1 - share) * infinite[levels.second]))
        self.start, self.size, self._overflow = self._window(shorter_too)

    def compose(self) -> ComposedLoss:
        """Return the sum of all the uses."""
        return self.compose_each(self._counts[None, :])[0]

    def compose_each(self, cumulative: Floats) -> list[ComposedLoss]:
        """Return one sum for every row of uses so far, shape (E, M); each is some products away from the row before."""
        product = _Product(self._uses, self.size)
        before = np.zeros(cumulative.shape[1])
        result = []
        for row in cumulative:
            product.multiply(row - before)
            before = row
            result.append(self._invert(product.spectrum, product.active, row, product.truncated))
        return result

    def _invert(self, spectrum: Complexes, active: Cells, counts: Floats, truncated: float) -> ComposedLoss:
        """Return weights on losses from Fourier coefficients of tilted masses, of relative error `truncated`."""
        full = np.zeros(self.size // 2 + 1, dtype=np.complex128)
        full[active] = spectrum
        tilted = np.fft.irfft(full, self.size)
        # Relative rounding errors of the coefficients grow with the uses and come back as white noise of this size
        # in every cell; adding it keeps each mass an overstatement.
        uses = float(counts.sum())
        noise = (3e-16 * (uses + 50) + truncated) * float(np.sqrt(np.square(tilted).sum() / self.size))
        tilted = np.maximum(tilted, 0.0) + noise
        rounding = 1 + 1e-15 * (uses + 1e4)
        losses = (self.start + np.arange(self.size)) * self.width
        infinite = -np.expm1(float((counts * self._log_finite).sum())) + self._overflow
        return ComposedLoss(
            losses,
            np.roll(tilted, -(self.start % self.size)) * rounding,
            self.tilt,
            float((counts * self._uses.log_mgfs).sum()),
            float(infinite),
        )

    def _window(self, shorter_too: bool) -> tuple[int, int, float]:
        """Return the first cell, the number of cells, and the mass that may lie beyond the last.

        With `shorter_too`, the window also holds the sums of fewer uses, which lie between zero and the whole sum.
        """
        uses = self._uses
        mean, deviation = uses.mean, float(np.sqrt(uses.variance)) + 1
        lowest, highest = uses.span()
        log_scale = float((self._counts * uses.log_mgfs).sum()) - self.tilt * self.width * mean
        right, step = self._reach(1 / deviation, log_scale)
        # Mass that leaves on the left re-enters from the right end on, where it weighs as little as the mass there.
        left, _ = self._reach(-1 / deviation, log_scale - self.tilt * self.width * right)
        # Every useful epsilon lies above the mean of the untilted sum.
        start = min(mean - left, self._plain_mean, -left if shorter_too else np.inf)
        low, high = max(lowest, int(start) - 1), min(highest, int(mean + right) + 1)
        overflow = 0.0
        if high < highest:
            slope = step + self.tilt * self.width
            overflow = float(np.exp(self._uses.log_mgf_about_mean(step) + log_scale - slope * (high - mean)))
        return low, _fast_length(high - low + 1), overflow

    def _reach(self, unit: float, log_scale: float) -> tuple[float, float]:
        """Return how far from the tilted mean mass matters, on the side of unit's sign, by Chernoff bounds.

        A true mass is e^(log_scale - tilt * distance) of the tilted one to the right; to the left, log_scale is that
        of the re-entry and exponents exceed the tilt. Returns the least distance and the exponent that proves it.
        """
        tilt = self.tilt * self.width
        sign, extra, least = (1.0, tilt, 0.0) if unit > 0 else (-1.0, 0.0, tilt)

        def distance(log_step: float, about: bool = True) -> float:
            step = least + float(np.exp(log_step))
            reached = self._uses.log_mgf_about_mean(sign * step, about)
            return (reached + log_scale - self._log_missable) / (step + extra)

        # Between the best exponents of a Gaussian and of one jump over the whole range; the ratio is quasi-convex.
        jump = 1 / max(float(np.ptp(kind.cells)) + 1 for kind in self._uses.kinds)
        best = minimise(distance, np.log(min(0.1 * abs(unit), jump)), np.log(max(16 * abs(unit), 30 * jump)), 0.2)
        return max(distance(best, about=False), 1.0), sign * (least + float(np.exp(best)))


def _gentle_tilt(
    kinds: Sequence[LossMasses], levels: Levels, plain: _Uses, width: float, aim: tuple[float, float]
) -> tuple[float, _Uses]:
    """Return the largest of tilt, tilt/2, ... (or 0) that neither moves the bulk far past the aim nor widens it.

    If losses are bounded, Renyi orders aim past every loss that matters; heavy tails would dominate a sum. Returns the
    uses under that tilt, too.
    """
    tilt, log_delta = aim
    for halvings in range(20):
        lesser = tilt / 2**halvings
        tilted = _Uses(kinds, levels, plain.counts, width * lesser)
        # Chernoff's bound, at the new mean
        beyond = float((plain.counts * tilted.log_mgfs).sum()) - lesser * width * tilted.mean
        if beyond >= log_delta + _FARTHEST and tilted.variance <= 2 * plain.variance:
            return lesser, tilted
    return 0.0, plain


class _Uses:
    """All uses under a tilt; unit of loss: one cell. A tilt moves the shares of a coin, too."""

    def __init__(self, kinds: Sequence[LossMasses], levels: Levels, counts: Floats, tilt: float) -> None:
        self.kinds, self.counts = [_Tilted(kind, tilt) for kind in kinds], counts
        self.first, self.second = levels.first, levels.second
        logs = self._of_kinds("log_mgf")
        with np.errstate(divide="ignore"):
            one = np.log(levels.share) + logs[self.first]
            other = np.log1p(-levels.share) + logs[self.second]
        self.log_mgfs = np.logaddexp(one, other)
        self.share = np.exp(one - self.log_mgfs)
        means, variances = self._of_kinds("mean"), self._of_kinds("variance")
        self._merged = [kind.merged() for kind in self.kinds] if len(kinds) > _EXACTLY else []
        gap = means[self.first] - means[self.second]
        self._means = means[self.second] + self.share * gap
        spread = variances[self.second] + self.share * (variances[self.first] - variances[self.second])
        self.mean = float((counts * self._means).sum())
        self.variance = float((counts * (spread + self.share * (1 - self.share) * gap**2)).sum())

    def _of_kinds(self, name: str) -> Floats:
        found: Floats = np.array([getattr(kind, name) for kind in self.kinds], dtype=np.float64)
        return found

    def span(self) -> tuple[int, int]:
        """Return the least and the greatest sum."""
        low = np.array([int(kind.cells[0]) for kind in self.kinds])
        high = np.array([int(kind.cells[-1]) for kind in self.kinds])
        least, most = np.minimum(low[self.first], low[self.second]), np.maximum(high[self.first], high[self.second])
        return int((self.counts * least).sum()), int((self.counts * most).sum())

    def log_mgf_about_mean(self, step: float, about: bool = False) -> float:
        """Return log E e^(step (sum - mean)), without cancellation where it is near zero; `about`: for a search."""
        kinds = self._merged if about and len(self.kinds) > _EXACTLY else self.kinds
        central = np.array([kind.central_log_mgf(step) for kind in kinds])
        means = self._of_kinds("mean")
        first = central[self.first] + step * (means[self.first] - self._means)
        second = central[self.second] + step * (means[self.second] - self._means)
        near = np.maximum(first, second) < 1.0
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            mixed = np.log1p(self.share * np.expm1(first) + (1 - self.share) * np.expm1(second))
            far = np.logaddexp(np.log(self.share) + first, np.log1p(-self.share) + second)
        alone = self.first == self.second
        return float((self.counts * np.where(alone, first, np.where(near, mixed, far))).sum())


def merged_losses(kind: LossMasses, width: float) -> tuple[Floats, Floats]:
    """Return about `_SEARCHED` finite losses with their masses, neighbours as one: to search with, not to state."""
    starts = np.arange(0, len(kind.cells), 1 + len(kind.cells) // _SEARCHED)
    masses = np.add.reduceat(kind.masses, starts)
    losses = np.add.reduceat(kind.masses * kind.cells, starts)
    held = masses > 0
    return width * losses[held] / masses[held], masses[held]


class _Product:
    """Fourier coefficients of the sum of the uses so far, where they have not vanished (`active`)."""

    def __init__(self, uses: _Uses, size: int) -> None:
        self._uses, self._size = uses, size
        self.spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
        self.active = np.arange(size // 2 + 1)
        self.truncated = 0.0
        """Bound on the relative error of a coefficient by the series of `_cell`, all cells together."""
        self._room = np.empty(size), np.empty_like(self.spectrum)
        self._known: dict[int, Complexes] = {}

    def multiply(self, counts: Floats) -> None:
        """Multiply by `counts` uses of each level."""
        uses, used = self._uses, np.flatnonzero(counts)
        cells = uses.first[used] * len(uses.kinds) + uses.second[used]
        order = np.argsort(cells, kind="stable")
        bounds = np.flatnonzero(np.diff(cells[order], prepend=-1, append=-1))
        for low, high in itertools.pairwise(bounds):
            members = used[order[low:high]]
            self._cell(members, counts[members])
            alive = np.abs(self.spectrum) > _VANISHED
            if np.count_nonzero(alive) < 0.8 * len(self.active):
                self._keep(alive)

    def _keep(self, alive: NDArray[np.bool_]) -> None:
        self.spectrum, self.active = self.spectrum[alive], self.active[alive]
        self._known = {kind: factor[alive] for kind, factor in self._known.items()}

    def _factor(self, kind: int) -> Complexes:
        if kind not in self._known:
            # neighbours are asked for one after the other
            self._known = dict(list(self._known.items())[-1:])
            self._known[kind] = self._uses.kinds[kind].spectrum(self.active, self._size, self._room)
        return self._known[kind]

    def _cell(self, members: Cells, counts: Floats) -> None:
        """Multiply by the uses of levels between the same two kinds.

        The factor of a use is m (1 + d_i r), m being that of the mean share, r = (F_1 - F_2) / m and d_i the share less
        its mean. The logarithm of all factors is n log m + sum_k (-1)^(k + 1) r^k / k sum_i n_i d_i^k. Where |r| is
        below a bound, the terms from `_TERMS` on are below what is added to `truncated`; elsewhere each level is
        multiplied by itself.
        """
        first, second = int(self._uses.first[members[0]]), int(self._uses.second[members[0]])
        total = float(counts.sum())
        if first == second:
            self.spectrum *= self._factor(first) ** int(total)
            return
        share = self._uses.share[members]
        # no factor is greater than the greater of the two
        one, other = self._factor(first), self._factor(second)
        alive = np.abs(self.spectrum) * np.maximum(np.abs(one), np.abs(other)) ** total > _VANISHED
        if np.count_nonzero(alive) < 0.8 * len(self.active):
            self._keep(alive)
            one, other = self._factor(first), self._factor(second)
        mean = float((counts * share).sum()) / total
        middle = other + mean * (one - other)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (one - other) / middle
        farthest = float(np.abs(share - mean).max())
        near = np.abs(ratio) * farthest < _NEAR if len(members) > 1 else np.ones(len(ratio), dtype=bool)
        self.spectrum[near] *= middle[near] ** int(total)
        if len(members) > 1:
            powers = [float((counts * (share - mean) ** k).sum()) for k in range(_TERMS)]
            held = ratio[near]
            series = np.zeros_like(held)
            for k in range(_TERMS - 1, 1, -1):
                series = (series + (-1) ** (k + 1) * powers[k] / k) * held
            self.spectrum[near] *= np.exp(series * held)
            largest = float(np.abs(held).max(initial=0.0)) * farthest
            self.truncated += total * largest**_TERMS / _TERMS / (1 - largest)
            apart = ~near
            if apart.any():
                for own, count in zip(share, counts, strict=True):
                    self.spectrum[apart] *= (other[apart] + own * (one[apart] - other[apart])) ** int(count)


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

    def merged(self) -> _Tilted:
        """Return the kind with neighbouring losses as one, at their mean."""
        starts = np.arange(0, len(self.cells), 1 + len(self.cells) // _SEARCHED)
        merged = copy.copy(self)
        merged.masses = np.add.reduceat(self.masses, starts)
        merged.cells = np.add.reduceat(self.masses * self.cells, starts) / merged.masses
        return merged

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
        if len(places) and int(places.max()) - int(places.min()) == int(self.cells[-1] - self.cells[0]):
            dense[:] = 0.0
            dense[places] = self.masses
        else:
            dense[:] = np.bincount(places, weights=self.masses, minlength=size)
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
