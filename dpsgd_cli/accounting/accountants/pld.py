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
from dpsgd_cli.accounting.mechanism import ApproximateDP, CorrelatedSums, GaussianSum, PureDP, Release, merge
from dpsgd_cli.errors import FailedAccountant

if TYPE_CHECKING:
    from dpsgd_cli.accounting.loss_composition import Composer

_RELATIVE_WIDTH = 0.02
"""Cell width over the standard deviation of an average step: inflates the total's by about width^2/12, 3e-5 of it."""
_LEAST_WIDTH = 1e-12
"""Least cell width: narrower cells would lose their split of masses in rounding."""
_GREATEST_WIDTH = 0.05
"""Greatest cell width: inside such a cell e^-loss is still nearly linear, however wide the whole is."""
_MOST_VARIANCE = 1e12
"""Largest variance of the summed losses: above it too few digits are left; Renyi divergences have no such limit."""
_LEAST_NOISE = 0.1
"""Below this noise multiplier sampled Gaussians are priced as unsampled ones, which dominate them."""
_LEAST_RATE = 1e-12
"""Smaller sampling rates are priced as this one, which dominates them (hockey-stick divergences are convex)."""
_LARGE_DELTA = 1e-3
"""Above this delta losses need no tilt: doubles hold such a delta to all digits that are shown."""
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
    mechanisms = ("gaussian", "correlated", "last-iterate", "truncated", "pure", "approximate", "threshold")
    adjacencies = EVERY_NEIGHBOUR

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept = _exact_gaussians(releases)
        if kept is None:
            return math.inf
        if (mu := _gaussian_only(kept)) is not None:
            return conversions.gaussian_epsilon(mu, delta)
        composed = max(composer.compose().epsilon(delta) for composer in _composers(kept, _aim_at_delta(kept, delta)))
        return min(composed, _largest_loss(kept))

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        kept = _exact_gaussians(releases)
        if kept is None:
            return 1.0
        if (mu := _gaussian_only(kept)) is not None:
            return conversions.gaussian_delta(mu, epsilon)
        if epsilon >= _largest_loss(kept):
            return 0.0
        aim = _aim_at_epsilon(kept, epsilon)
        found = max(composer.compose().delta(epsilon) for composer in _composers(kept, aim))
        far_below = found < math.exp(aim.log_delta + _BELOW - 1)
        if found == 0 or not (far_below or found > _LARGE_DELTA):
            return found
        # The aim follows Renyi orders, which are loose here: the cut-off masses, and a tilt, would change the result.
        nearer = dataclasses.replace(aim, log_delta=math.log(found) - _BELOW)
        if found > _LARGE_DELTA:
            nearer = dataclasses.replace(nearer, tilt=0.0)
        return min(found, max(composer.compose().delta(epsilon) for composer in _composers(kept, nearer)))

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return delta as a function of epsilon. After many uses, rounding hides small deltas without a tilt."""
        self.check(releases)
        kept = _exact_gaussians(releases)
        if kept is None:
            return lambda epsilon: 1.0
        if (mu := _gaussian_only(kept)) is not None:
            return partial(conversions.gaussian_delta, mu)
        from dpsgd_cli.accounting.loss_composition import ComposedProfile

        aims = [TiltTarget(tilt=0.0, log_delta=math.log(least) - _BELOW)]
        if least < _LARGE_DELTA and sum(release.count for release in kept) > _MANY_USES:
            aims.append(_aim_at_delta(kept, least))
        found = [[composer.compose() for composer in _composers(kept, aim)] for aim in aims]
        return ComposedProfile([*zip(*found, strict=True)])

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        import numpy as np

        self.check([release for releases in epochs for release in releases])
        rows = [_exact_gaussians(releases) for releases in epochs]
        if any(row is None for row in rows) or not any(_samples(row or []) for row in rows):
            return super().curve(epochs, delta)
        total = merge([release for row in rows for release in row or []])
        columns = {release.mechanism: i for i, release in enumerate(total)}
        counts = np.zeros((len(rows), len(columns)))
        for i, row in enumerate(rows):
            for release in row or []:
                counts[i, columns[release.mechanism]] += release.count
        counts = counts.cumsum(axis=0)
        composers = _composers(total, _aim_at_delta(total, delta), shorter_too=True)
        curves = [[loss.epsilon(delta) for loss in composer.compose_each(counts)] for composer in composers]
        return [max(0.0, *values) if counts[i].any() else 0.0 for i, values in enumerate(zip(*curves, strict=True))]


def _exact_gaussians(releases: Sequence[Release]) -> list[Release] | None:
    """Return distinct releases, all unsampled Gaussians joined exactly into one; None if one has no noise."""
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
        if mechanism.sampled and rate < 1 and noise >= _LEAST_NOISE:
            kept.append(Release(_plain(mechanism, max(rate, _LEAST_RATE)), count))
        else:
            precision += count / mechanism.unsampled_noise**2
            adjacency = mechanism.adjacency
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


def _in_poisson_batches(releases: Sequence[Release]) -> list[Release]:
    """Return releases whose best Renyi order is near that of `releases`.

    They serve for an aim only: any aim gives a true bound, and a near one a sharp bound.
    """
    found = []
    for release in releases:
        own, uses = release.mechanism, release.count
        if isinstance(own, GaussianSum) and own.sampled:
            uses *= own.steps if own.by_allocation else 1
            own = GaussianSum(own.noise_multiplier, "add-remove", "poisson", own.sampling_rate)
        elif isinstance(own, GaussianSum):
            own = GaussianSum(own.noise_multiplier, "add-remove")
        else:
            own = dataclasses.replace(own, adjacency="add-remove")
        found.append(Release(own, uses))
    return found


@dataclasses.dataclass(frozen=True)
class TiltTarget:
    """The exponential tilt (>= 0, per unit of loss) and the log of the delta at which results should be sharp."""

    tilt: float
    log_delta: float


def _aim_at_delta(releases: Sequence[Release], delta: float) -> TiltTarget:
    """Return an aim with the tilt of the best Renyi order (order alpha weighs losses by e^((alpha - 1) loss))."""
    return TiltTarget(Rdp().best_order_for_delta(_in_poisson_batches(releases), delta) - 1, math.log(delta))


def _aim_at_epsilon(releases: Sequence[Release], epsilon: float) -> TiltTarget:
    """Return an aim for `epsilon`, at some distance (`_BELOW`) below the delta that Renyi orders prove."""
    rdp, releases = Rdp(), _in_poisson_batches(releases)
    proved = rdp.delta(releases, epsilon)
    log_delta = math.log(max(proved, 1e-200)) - _BELOW
    return TiltTarget(rdp.best_order_for_epsilon(releases, epsilon) - 1, log_delta)


def _composers(releases: Sequence[Release], aim: TiltTarget, shorter_too: bool = False) -> list[Composer]:
    """Return a composer for each direction that matters; a single one if all losses are the same in both directions."""
    import numpy as np

    from dpsgd_cli.accounting.dominating_pairs import discretise, loss_variance
    from dpsgd_cli.accounting.loss_composition import Composer

    counts = np.array([float(release.count) for release in releases])
    variance = float(sum(r.count * loss_variance(r.mechanism) for r in releases))
    if not variance < _MOST_VARIANCE:
        raise FailedAccountant(f"{Pld.name}: a loss of variance {variance:.2g} is too large to discretise; use rdp")
    width = min(max(math.sqrt(variance / float(counts.sum())) * _RELATIVE_WIDTH, _LEAST_WIDTH), _GREATEST_WIDTH)
    while True:
        pairs = [discretise(release.mechanism, width) for release in releases]
        one_way = not _samples(releases) or all(pair.remove is pair.add for pair in pairs)
        directions = ("remove",) if one_way else ("remove", "add")
        composers = [
            Composer([getattr(pair, side) for pair in pairs], width, counts, aim.tilt, aim.log_delta, shorter_too)
            for side in directions
        ]
        excess = max(composer.size for composer in composers) / _MOST_CELLS
        if excess <= 1:
            return composers
        width *= max(2.0, excess)
