"""Privacy-loss distributions: the tightest bound for Poisson-sampled Gaussians and for compositions with them.

Losses are discretised in `dominating_pairs.py` and in the module that a batching names, and composed in
`loss_composition.py`. This module joins them, in both directions of the adjacency. SciPy loads on the first query.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants import EVERY_NEIGHBOUR, Accountant
from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import ApproximateDP, CorrelatedSums, GaussianSum, GroupSum, PureDP, Release, merge
from dpsgd_cli.errors import FailedAccountant

if TYPE_CHECKING:
    from dpsgd_cli.accounting.dominating_pairs import Floats
    from dpsgd_cli.accounting.loss_composition import Composer

_RELATIVE_WIDTH = 0.02
"""Cell width over the standard deviation of an average step: inflates the total's by about width^2/12, 3e-5 of it."""
_LEAST_WIDTH = 1e-12
"""Least cell width: narrower cells would lose their split of masses in rounding."""
_GREATEST_WIDTH = 0.05
"""Greatest cell width: inside such a cell e^-loss is still nearly linear, however wide the whole is."""
_MOST_VARIANCE = 1e12
"""Largest variance of the summed losses: above it too few digits are left; Renyi divergences have no such limit."""
_LEAST_NOISE, _LEAST_ALLOCATED = 0.04, 0.1
"""Below these noise multipliers exponentials of losses would overflow. Epochs of random allocation are then priced as
unsampled Gaussians, which dominate them, and sampled Gaussians by `_revealed`."""
_LEAST_RATE = 1e-12
"""Smaller sampling rates are priced as this one, which dominates them (hockey-stick divergences are convex)."""
_LARGE_DELTA = 1e-3
"""Above this delta losses need no tilt: doubles hold such a delta to all digits that are shown."""
_SMALL_DELTA = 1e-30
"""Below this delta rounding of masses weighs; a bound by Renyi divergences, if it is less, is stated instead."""
_REVEALED = 1e-2, 1e-15
"""Probability with which more steps than are charged hold a record: a share of delta, or this if it is not known."""
_BEYOND = 1e-33
_MOST_WORK = 2e7
"""Most cells times normals of a group's mixture; beyond them the group is charged for the most that a batch holds."""
_MOST_USES = 10**7
"""Number of uses from which on rounding weighs; a bound by Renyi divergences, if it is less, is stated instead."""
_UNEVEN = 16.0
"""Ratio of the variances of losses at which a curve is cut."""
_TILTS = (1e-4, 1e5)
"""Range of tilts that are searched."""
_BELOW = 5.0
"""Distance below a delta, in logarithms, to which the masses that are cut off are aimed."""
_MANY_USES = 20_000
"""Above so many uses, rounding errors of masses are felt at deltas of 1e-10, unless losses are tilted."""
_MOST_CELLS = 1 << 21
"""Most cells; beyond them (about 150 MB of memory) cells become wider and the bound looser."""


class Pld(Accountant):
    """Accountant by numerical composition of discretised privacy losses, rounded up."""

    name = "pld"
    bound = "upper"
    note = "numerical composition, rounded up"
    mechanisms = ("gaussian", "correlated", "truncated", "grouped", "pure", "approximate", "threshold")
    adjacencies = EVERY_NEIGHBOUR

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        found = [self._epsilon(kept, delta) for kept in _alternatives(releases, delta)]
        many = _uses(releases) > _MOST_USES or delta < _SMALL_DELTA
        if many and all(Rdp().refusal(r.mechanism) is None for r in releases):
            found.append(Rdp().epsilon(releases, delta))
        return min(found)

    def _epsilon(self, kept: list[Release] | None, delta: float) -> float:
        if kept is None:
            return math.inf
        if (mu := _gaussian_only(kept)) is not None:
            return conversions.gaussian_epsilon(mu, delta)
        losses = _Losses(kept)
        aim = losses.aim_at_delta(delta)
        composed = max(composer.compose().epsilon(delta) for composer in losses.composers(aim))
        return min(composed, _largest_loss(kept))

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        found = [self._delta(kept, epsilon) for kept in _alternatives(releases)]
        if _uses(releases) > _MOST_USES and all(Rdp().refusal(r.mechanism) is None for r in releases):
            found.append(Rdp().delta(releases, epsilon))
        return min(found)

    def _delta(self, kept: list[Release] | None, epsilon: float) -> float:
        if kept is None:
            return 1.0
        if (mu := _gaussian_only(kept)) is not None:
            return conversions.gaussian_delta(mu, epsilon)
        if epsilon >= _largest_loss(kept):
            return 0.0
        losses = _Losses(kept)
        aim = losses.aim_at_epsilon(epsilon)
        found = max(composer.compose().delta(epsilon) for composer in losses.composers(aim))
        far_below = found < math.exp(aim.log_delta + _BELOW - 1)
        if found == 0 or not (far_below or found > _LARGE_DELTA):
            return found
        # The aim follows Renyi orders, which are loose here: the cut-off masses, and a tilt, would change the result.
        nearer = dataclasses.replace(aim, log_delta=math.log(found) - _BELOW)
        if found > _LARGE_DELTA:
            nearer = dataclasses.replace(nearer, tilt=0.0)
        return min(found, max(composer.compose().delta(epsilon) for composer in losses.composers(nearer)))

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return delta as a function of epsilon. After many uses, rounding hides small deltas without a tilt."""
        self.check(releases)
        profiles = [self._profile(kept, least) for kept in _alternatives(releases)]
        return profiles[0] if len(profiles) == 1 else lambda epsilon: min(profile(epsilon) for profile in profiles)

    def _profile(self, kept: list[Release] | None, least: float) -> Callable[[float], float]:
        if kept is None:
            return lambda epsilon: 1.0
        if (mu := _gaussian_only(kept)) is not None:
            return partial(conversions.gaussian_delta, mu)
        from dpsgd_cli.accounting.loss_composition import ComposedProfile

        losses, aims = _Losses(kept), [TiltTarget(tilt=0.0, log_delta=math.log(least) - _BELOW)]
        if least < _LARGE_DELTA and _uses(kept) > _MANY_USES:
            aims.append(losses.aim_at_delta(least))
        found = [[composer.compose() for composer in losses.composers(aim)] for aim in aims]
        return ComposedProfile([*zip(*found, strict=True)])

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        self.check([release for releases in epochs for release in releases])
        found = [self._curve(epochs, delta, secret) for secret in ((True, False) if _allocates(epochs) else (True,))]
        return [min(values) for values in zip(*found, strict=True)]

    def _curve(self, epochs: Sequence[Sequence[Release]], delta: float, secret: bool) -> list[float]:
        import numpy as np

        rows = [_exact_gaussians(releases, secret) for releases in epochs]
        if any(row is None for row in rows) or not any(_samples(row or []) for row in rows):
            spent: list[Release] = []
            result = []
            for releases in epochs:
                spent = merge([*spent, *releases])
                result.append(self._epsilon(_exact_gaussians(spent, secret, delta), delta))
            return result
        total = merge([release for row in rows for release in row or []])
        columns = {release.mechanism: i for i, release in enumerate(total)}
        counts = np.zeros((len(rows), len(columns)))
        for i, row in enumerate(rows):
            for release in row or []:
                counts[i, columns[release.mechanism]] += release.count
        counts = counts.cumsum(axis=0)
        losses = _Losses(total)
        spread = counts @ losses.variances
        result, high = [0.0] * len(rows), len(rows)
        # A cell, and a tilt, that suit the end are too coarse for a start of much smaller losses.
        while high > 0 and spread[high - 1] > 0:
            low = int(np.searchsorted(spread[:high], spread[high - 1] / _UNEVEN))
            used = counts[high - 1] > 0
            part = (
                losses
                if high == len(rows)
                else _Losses([Release(r.mechanism, int(n)) for r, n in zip(total, counts[high - 1], strict=True) if n])
            )
            composers = part.composers(part.aim_at_delta(delta), shorter_too=True)
            curves = [
                [loss.epsilon(delta) for loss in composer.compose_each(counts[low:high][:, used])]
                for composer in composers
            ]
            result[low:high] = [max(0.0, *values) for values in zip(*curves, strict=True)]
            high = low
        return result


def _alternatives(releases: Sequence[Release], delta: float | None = None) -> list[list[Release] | None]:
    """Return lists of releases that each dominate: with epochs of random allocation as they are, and without secret."""
    secret = (True, False) if _allocates([releases]) else (True,)
    return [_exact_gaussians(releases, one, delta) for one in secret]


def _allocates(epochs: Sequence[Sequence[Release]]) -> bool:
    made = (release.mechanism for releases in epochs for release in releases)
    return any(isinstance(one, GaussianSum) and one.by_allocation and one.sampling_rate < 1 for one in made)


def _uses(releases: Sequence[Release]) -> int:
    return sum(release.count for release in releases)


def _revealed(mechanism: GaussianSum, count: int, leak: float) -> int:
    """Return the most steps, of `count`, that hold a record (or any of its group), but with probability `leak`.

    Guarantee: these steps as unsampled Gaussians, and a leak of probability `leak`, dominate all steps. Proof: reveal
    to the attacker which steps drew the record. The draw has one law in both data sets; steps that did not draw it are
    equal there, and each of the others is dominated by `unsampled_noise`.
    """
    if mechanism.kind not in ("gaussian", "correlated", "grouped") or mechanism.sampling_rate == 1:
        return count
    size = mechanism.size if isinstance(mechanism, GroupSum) else 1
    return _most_of(count, -math.expm1(size * math.log1p(-mechanism.sampling_rate)), leak)


def _most_together(mechanism: GroupSum) -> int | None:
    """Return the most records of a group in one batch, but with probability `_BEYOND`; None if a mixture is no work.

    Guarantee: an unsampled Gaussian for so many records dominates the mixture, but for that probability.
    """
    most = _most_of(mechanism.size, mechanism.sampling_rate, _BEYOND)
    cells = (most / mechanism.noise_multiplier) ** 2 / 2 / _GREATEST_WIDTH
    return most if most * cells > _MOST_WORK else None


def _most_of(count: int, rate: float, beyond: float) -> int:
    """Return the least k with Pr[Binomial(`count`, `rate`) > k] <= `beyond`."""
    from scipy.special import bdtrc

    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bdtrc(middle, count, rate) <= beyond else (middle + 1, high)
    return low


def _exact_gaussians(
    releases: Sequence[Release], secret: bool = True, delta: float | None = None
) -> list[Release] | None:
    """Return distinct releases, all unsampled Gaussians joined exactly into one; None if one has no noise.

    Unless `secret`, epochs of random allocation count as unsampled, too. `delta` is the one that will be asked for.
    """
    precision = 0.0
    adjacency: Adjacency = "add-remove"
    kept: list[Release] = []
    for release in merge(list(releases)):
        mechanism, count = release.mechanism, release.count
        if isinstance(mechanism, PureDP | ApproximateDP):
            kept.append(Release(dataclasses.replace(mechanism, label=""), count))
            continue
        assert isinstance(mechanism, GaussianSum), "refused by Accountant.check"
        noise, rate = mechanism.noise_multiplier, mechanism.sampling_rate
        if rate == 0:
            continue
        if noise == 0:
            return None
        least = _LEAST_NOISE if not mechanism.by_allocation else _LEAST_ALLOCATED if secret else math.inf
        together = _most_together(mechanism) if isinstance(mechanism, GroupSum) and rate < 1 else None
        if mechanism.sampled and rate < 1 and noise >= least and together is None:
            kept.append(Release(_plain(mechanism, max(rate, _LEAST_RATE)), count))
            continue
        adjacency = mechanism.adjacency
        if together is not None:
            precision += count * (together / noise) ** 2
            kept.append(Release(ApproximateDP(0.0, _BEYOND, adjacency), count))
        elif mechanism.sampled and not mechanism.by_allocation:
            leak = _REVEALED[1] if delta is None else _REVEALED[0] * delta
            charged = _revealed(mechanism, count, leak)
            precision += charged / mechanism.unsampled_noise**2
            kept += [Release(ApproximateDP(0.0, leak, adjacency))] if charged < count else []
        else:
            precision += count / mechanism.unsampled_noise**2
    if precision > 0:
        kept.append(Release(GaussianSum(1 / math.sqrt(precision), adjacency)))
    return merge(kept)


def _plain(mechanism: GaussianSum, rate: float) -> GaussianSum:
    """Return only what the price depends on, with sampling rate `rate`; correlated noise becomes its equivalent sum."""
    if isinstance(mechanism, CorrelatedSums):
        return GaussianSum(mechanism.noise_multiplier, mechanism.adjacency, mechanism.batching, rate)
    # an epoch's rate is one over its steps, which is never so small
    rate = mechanism.sampling_rate if mechanism.by_allocation else rate
    return dataclasses.replace(mechanism, sampling_rate=rate, sensitivity=1.0, label="")


def _gaussian_only(kept: Sequence[Release]) -> float | None:
    """Return the Gaussian-DP parameter if nothing else is left (0 for no release at all); None otherwise."""
    if not kept:
        return 0.0
    mechanism = kept[0].mechanism
    if len(kept) == 1 and isinstance(mechanism, GaussianSum) and mechanism.batching == "full":
        return 1 / mechanism.noise_multiplier
    return None


def _largest_loss(kept: Sequence[Release]) -> float:
    """Return the sum of pure epsilons, which no loss exceeds (cells would round it up); inf if a loss has no bound."""
    if not all(isinstance(release.mechanism, PureDP) for release in kept):
        return math.inf
    return sum(r.count * r.mechanism.epsilon for r in kept if isinstance(r.mechanism, PureDP))


def _samples(releases: Sequence[Release]) -> bool:
    return any(isinstance(r.mechanism, GaussianSum) and r.mechanism.sampled for r in releases)


@dataclasses.dataclass(frozen=True)
class TiltTarget:
    """The exponential tilt (>= 0, per unit of loss) and the log of the delta at which results should be sharp."""

    tilt: float
    log_delta: float


class _Losses:
    """Discretised losses of releases, and what to aim at: any aim gives a true bound, and a near one a sharp bound."""

    def __init__(self, releases: Sequence[Release]) -> None:
        import numpy as np

        from dpsgd_cli.accounting.noise_levels import levels_of
        from dpsgd_cli.accounting.sampled_pairs import loss_variance

        self._levels = levels_of([release.mechanism for release in releases])
        self._counts = np.array([float(release.count) for release in releases])
        own = np.array([loss_variance(made) for made in self._levels.made])
        share = self._levels.share
        self.variances = share * own[self._levels.first] + (1 - share) * own[self._levels.second]
        variance = float((self._counts * self.variances).sum())
        if not variance < _MOST_VARIANCE:
            raise FailedAccountant(f"{Pld.name}: a loss of variance {variance:.2g} is too large to discretise; use rdp")
        width = math.sqrt(variance / float(self._counts.sum())) * _RELATIVE_WIDTH
        self._one_way = not _samples(releases)
        self._discretise(min(max(width, _LEAST_WIDTH), _GREATEST_WIDTH))

    def _discretise(self, width: float) -> None:
        from dpsgd_cli.accounting.dominating_pairs import discretise

        self._width = width
        self._pairs = [discretise(made, width) for made in self._levels.made]
        self._one_way |= all(pair.remove is pair.add for pair in self._pairs)

    def composers(self, aim: TiltTarget, shorter_too: bool = False) -> list[Composer]:
        """Return a composer for each direction that matters; a single one if losses are the same in both."""
        from dpsgd_cli.accounting.loss_composition import Composer

        while True:
            composers = [
                Composer(
                    [getattr(pair, side) for pair in self._pairs],
                    self._levels,
                    self._width,
                    self._counts,
                    aim.tilt,
                    aim.log_delta,
                    shorter_too,
                )
                for side in (("remove",) if self._one_way else ("remove", "add"))
            ]
            excess = max(composer.size for composer in composers) / _MOST_CELLS
            if excess <= 1:
                return composers
            self._discretise(self._width * max(2.0, excess))

    def aim_at_delta(self, delta: float) -> TiltTarget:
        """Return the tilt of the best Renyi order (order alpha weighs losses by e^((alpha - 1) loss))."""
        tilt = self._best_tilt(lambda order, cost: conversions.renyi_epsilon(order, cost, delta))[0]
        return TiltTarget(tilt, math.log(delta))

    def aim_at_epsilon(self, epsilon: float) -> TiltTarget:
        """Return an aim for `epsilon`, at some distance (`_BELOW`) below the delta that Renyi orders show."""
        tilt, log_delta = self._best_tilt(lambda order, cost: conversions.renyi_log_delta(order, cost, epsilon))
        return TiltTarget(tilt, max(min(log_delta, 0.0), math.log(1e-200)) - _BELOW)

    def _best_tilt(self, objective: Callable[[float, float], float]) -> tuple[float, float]:
        """Return the tilt, order less 1, where `objective` of order and divergence is least, and its value there.

        Divergences are those of the finite losses, of one direction, about.
        """
        import numpy as np

        from dpsgd_cli.accounting.loss_composition import merged_losses

        kinds = [merged_losses(pair.remove, self._width) for pair in self._pairs]
        levels = self._levels
        with np.errstate(divide="ignore"):
            shares = np.log(levels.share), np.log1p(-levels.share)
        known: dict[float, float] = {}

        def at(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            excess = np.array([_log_mean(losses, masses, tilt) for losses, masses in kinds])
            each = np.logaddexp(shares[0] + excess[levels.first], shares[1] + excess[levels.second])
            known[log_tilt] = objective(1 + tilt, max(float((self._counts * each).sum()) / tilt, 0.0))
            return known[log_tilt]

        for low in np.arange(math.log(_TILTS[0]), math.log(_TILTS[1]), 1.0):
            at(float(low))
        best = min(known, key=known.__getitem__)
        conversions.minimise(at, best - 1.0, best + 1.0, 0.02)
        best = min(known, key=known.__getitem__)
        return math.exp(best), known[best]


def _log_mean(losses: Floats, masses: Floats, tilt: float) -> float:
    """Return log of the mean of e^(tilt loss)."""
    import numpy as np

    exponents = tilt * losses
    top = float(exponents.max())
    if top < 30:
        return float(np.log1p((masses * np.expm1(exponents)).sum() / masses.sum()))
    return top + float(np.log((masses * np.exp(exponents - top)).sum() / masses.sum()))
