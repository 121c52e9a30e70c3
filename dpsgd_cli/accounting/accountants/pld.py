"""Privacy-loss distributions: the tightest bound for Poisson-sampled Gaussians and for compositions with them.

Losses are discretised in `losses.py` and in the module that a batching names, and added up in `loss_sums.py`. This
module joins them, in both directions of the adjacency. SciPy loads on the first query.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants import ONLY_ZCDP, Accountant
from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    GroupSum,
    Mechanism,
    PureDP,
    Release,
    ZeroConcentrated,
    merge,
)

if TYPE_CHECKING:
    from dpsgd_cli.accounting.loss_sums import SumOfLosses

_LEAST_NOISE, _LEAST_ALLOCATED = 0.04, 0.1
"""Below these noise multipliers exponentials of losses would overflow. Epochs of random allocation are then priced as
unsampled Gaussians, which dominate them, and sampled Gaussians by `_revealed`."""
_LEAST_RATE = 1e-12
"""Smaller sampling rates are priced as this one, which dominates them (hockey-stick divergences are convex)."""
_REVEALED = 1e-2, 1e-15
"""Probability with which more steps than are charged hold a record: a share of delta, or this if it is not known."""
_BEYOND = 1e-33
_MOST_WORK = 2e7
"""Most cells times normals of a group's mixture; beyond them the group is charged for the most that a batch holds."""
_GREATEST_WIDTH = 0.05
_MOST_USES = 10**5
_SMALL_DELTA = 1e-9
"""From so many uses on, and below this delta, rounding weighs; a bound by Renyi divergences, if less, is stated."""


class Pld(Accountant):
    """Accountant by numerical composition of discretised privacy losses, rounded up."""

    name = "pld"
    bound = "upper"
    note = "numerical composition, rounded up"

    def uncovered(self, mechanism: Mechanism) -> str | None:
        return ONLY_ZCDP if isinstance(mechanism, ZeroConcentrated) else None

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.curve([releases], delta)[0]

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        found = self.profile(releases, _SMALL_DELTA)(epsilon)
        if found >= 100 * _SMALL_DELTA or (rest := _by_divergences(releases)) is None:
            return found
        return min(found, Rdp().delta(rest, epsilon))

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return delta as a function of epsilon: the least of what each way to price random allocation proves."""
        self.check(releases)
        found = [_profile(_dominating(releases, secret), least) for secret in _ways([releases])]
        if _uses(releases) > _MOST_USES and _samples(releases) and (rest := _by_divergences(releases)) is not None:
            found.append(Rdp().profile(rest, least))
        return found[0] if len(found) == 1 else lambda epsilon: min(profile(epsilon) for profile in found)

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        every = [release for releases in epochs for release in releases]
        self.check(every)
        found = [_curve(epochs, delta, secret) for secret in _ways(epochs)]
        doubtful = _samples(every) and (delta < _SMALL_DELTA or _uses(every) > _MOST_USES)
        if doubtful and None not in (rows := [_by_divergences(releases) for releases in epochs]):
            found.append(Rdp().curve([row for row in rows if row is not None], delta))
        return [min(values) for values in zip(*found, strict=True)]


def _by_divergences(releases: Sequence[Release]) -> list[Release] | None:
    """Return releases that dominate and that `Rdp` prices, for where rounding weighs; None if there are none."""
    kept = _dominating(releases, secret=False)
    covered = kept is not None and all(Rdp().refusal(release.mechanism) is None for release in kept)
    return kept if covered else None


def _uses(releases: Sequence[Release]) -> int:
    return sum(release.count for release in releases)


def _samples(releases: Sequence[Release]) -> bool:
    return any(isinstance(r.mechanism, GaussianSum) and r.mechanism.sampled for r in releases)


def _ways(epochs: Sequence[Sequence[Release]]) -> tuple[bool, ...]:
    """Return whether epochs of random allocation are priced as secret, or both ways; both dominate."""
    made = (release.mechanism for releases in epochs for release in releases)
    allocated = any(isinstance(one, GaussianSum) and one.by_allocation and one.sampling_rate < 1 for one in made)
    return (True, False) if allocated else (True,)


def _profile(kept: list[Release] | None, least: float) -> Callable[[float], float]:
    if kept is None:
        return lambda epsilon: 1.0
    if (mu := _gaussian_only(kept)) is not None:
        return partial(conversions.gaussian_delta, mu)
    from dpsgd_cli.accounting.loss_sums import ProfileOfSums

    return ProfileOfSums([direction[0] for direction in _sums([kept], least)], _largest_loss(kept))


def _curve(epochs: Sequence[Sequence[Release]], delta: float, secret: bool) -> list[float]:
    spent: list[Release] = []
    rows: list[list[Release] | None] = []
    for releases in epochs:
        spent = merge([*spent, *releases])
        rows.append(_dominating(spent, secret, delta))
    whole = rows[-1] if rows else None
    mus = [math.inf if row is None else _gaussian_only(row) for row in rows]
    if whole is None or None not in mus:
        return [conversions.gaussian_epsilon(math.inf if mu is None else mu, delta) for mu in mus]
    every = [whole]
    if len(epochs) > 1:
        # each epoch's own, so that rows grow: Gaussians of several epochs joined into one would not
        apart, every = list[Release](), []
        for releases in epochs:
            apart = merge([*apart, *(_dominating(releases, secret) or [])])
            every.append(apart)
    sums = zip(*_sums(every, delta), strict=True)
    found = [max(one.epsilon(delta) for one in row) for row in sums]
    return [min(value, _largest_loss(row or [])) if row else 0.0 for value, row in zip(found, rows, strict=True)]


def _sums(rows: Sequence[Sequence[Release]], least: float) -> list[list[SumOfLosses]]:
    """Return the sums of the losses of each row of releases, for each direction that matters. Rows grow."""
    import numpy as np

    from dpsgd_cli.accounting.loss_sums import summed
    from dpsgd_cli.accounting.noise_levels import levels_of

    made = [release.mechanism for release in rows[-1]]
    place = {mechanism: i for i, mechanism in enumerate(made)}
    uses = np.zeros((len(rows), len(made)))
    for i, row in enumerate(rows):
        for release in row:
            uses[i, place[release.mechanism]] = release.count
    levels = levels_of(made)
    pairs = [pair for mechanism in levels.made if (pair := mechanism.losses()) is not None]
    assert len(pairs) == len(levels.made), "refused by Accountant.check"
    sides = range(1 if all(remove is add for remove, add in pairs) or not _samples(rows[-1]) else 2)
    return [summed([pair[side] for pair in pairs], levels, uses, least) for side in sides]


def _revealed(mechanism: GaussianSum, count: int, leak: float) -> int:
    """Return the most steps, of `count`, that hold a record (or any of its group), but with probability `leak`.

    Guarantee: these steps as unsampled Gaussians, and a leak of probability `leak`, dominate all steps. Proof: reveal
    to the attacker which steps drew the record. The draw has one law in both data sets; steps that did not draw it are
    equal there, and each of the others is dominated by `unsampled_noise`.
    """
    if mechanism.sampling_rate == 1:
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

    return bisect.bisect_left(range(count), True, key=lambda most: bdtrc(most, count, rate) <= beyond)


def _dominating(releases: Sequence[Release], secret: bool, delta: float | None = None) -> list[Release] | None:
    """Return releases that dominate, all unsampled Gaussians joined exactly into one; None if one has no noise.

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
            kept.append(Release(_plain(mechanism), count))
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


def _plain(mechanism: GaussianSum) -> GaussianSum:
    """Return only what the price depends on; correlated noise becomes its equivalent sum."""
    # an epoch's rate is one over its steps, which is never so small
    rate = mechanism.sampling_rate if mechanism.by_allocation else max(mechanism.sampling_rate, _LEAST_RATE)
    if isinstance(mechanism, CorrelatedSums):
        return GaussianSum(mechanism.noise_multiplier, mechanism.adjacency, mechanism.batching, rate)
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
