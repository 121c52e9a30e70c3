"""Group privacy for any ledger: the price of releases for one person with k records, or for k related people.

Notation: one of two data sets has all k records of the group. The other has none of them (add-remove), k that add
nothing (zero-out) or any k others (replace-one), which is k steps from neighbour to neighbour. Epsilon and delta
without a mark are those of one record.

There are two theorems. `ForGroup` states the lesser result, separately for each accountant.

By mechanism (`of_group`). Each release is replaced by one whose pair of output distributions dominates what a group of
k does to it, whatever was released before. All of these are then priced as if they were one record's:
- Unsampled Gaussian (full, shuffle; correlated sums of an epoch too): noise multiplier z / k. One of multiplier z is
  (1/z)-GDP, and mu-GDP is k mu-GDP for groups of k (Dong, Roth and Su 2022, Theorem 2.14), which is that of
  multiplier z / k: a sum that one record moves by S, k records move by k S.
- Poisson-sampled Gaussian of rate q, under add-remove and zero-out: a mixture of Gaussians (`GroupSum` has the proof).
  A group can attain it, so nothing proved is below it. Accountants that do not price mixtures take one Gaussian of
  noise multiplier z / k and rate 1 - (1 - q)^k, which dominates: every part of the mixture but the first is at most
  N(k S, s^2), and divergences are jointly convex, or quasi-convex.
- epsilon-DP: k epsilon-DP. epsilon-bounded range: k epsilon-bounded range; Laplace noise on a number is that of k
  times the sensitivity. (epsilon, delta)-DP: as below. rho-zCDP: k^2 rho-zCDP (Bun and Steinke 2016, Proposition 1.9).
- Named categories (`Threshold`): nothing is proved, as k records may have a category to themselves, whose count is k.
- No pair is proved here for samples of other kinds: batches of one size, random allocation,
  replaced records in Poisson batches. Nor is it for correlated sums of Poisson batches: the cycles of k records begin
  at different steps, so blocks of rows that one record moves overlap with those of another.

By statement. A release that is (epsilon, delta)-DP is (k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1))-DP for
groups of k (Vadhan 2017, Lemma 2.2, summed up exactly: each step costs a factor e^epsilon and another delta). This
holds for every accountant's own (epsilon, delta), so for the whole curve of a PLD; the code searches for the best point
of that curve.

If all noise is Gaussian, and unsampled or on Poisson batches, a group attains the first theorem's pairs, and the second
is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dpsgd_cli.accounting.accountants import Accountant, Derived
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    GroupSum,
    Mechanism,
    PureDP,
    Release,
    Threshold,
    ZeroConcentrated,
)
from dpsgd_cli.accounting.search import smallest
from dpsgd_cli.errors import UnsupportedMechanism

_DEEPEST = 300.0
"""How far below a group's delta, in logarithms, the search for one record's delta goes."""
_PRECISION = 1e-4
_MOST_SPLITS = 64
"""Most splits of a group over two parts of the data that are priced one by one."""
Parts = Sequence[Sequence[Release]]
_MIXTURE = GroupSum(1.0, "add-remove", "poisson", 0.5, size=2)
"""An example of what only some accountants price."""


def of_group(mechanism: Mechanism, size: int, mixtures: bool = True) -> Mechanism:
    """Return a mechanism that dominates `mechanism` for groups of `size` records; without `GroupSum` unless `mixtures`.

    Raises UnsupportedMechanism if nothing is proved.
    """
    if size == 1:
        return mechanism
    if isinstance(mechanism, GaussianSum):
        if mechanism.sampled and not mechanism.comes_and_goes:
            where = f"{mechanism.batching} batches under {mechanism.adjacency}"
            raise UnsupportedMechanism(f"{where}: no pair of a group's sample is proved")
        if isinstance(mechanism, CorrelatedSums) and mechanism.sampled:
            raise UnsupportedMechanism("correlated noise on Poisson batches: a group's cycles overlap")
        if mechanism.sampled and mixtures:
            return GroupSum(**vars(mechanism), size=size)
        rate = mechanism.sampling_rate
        return replace(
            mechanism,
            noise_multiplier=mechanism.noise_multiplier / size,
            sampling_rate=-math.expm1(size * math.log1p(-rate)) if rate < 1 else 1.0,
        )
    if isinstance(mechanism, PureDP):
        return replace(mechanism, epsilon=size * mechanism.epsilon)
    if isinstance(mechanism, ZeroConcentrated):
        return replace(mechanism, rho=size**2 * mechanism.rho)
    assert isinstance(mechanism, ApproximateDP)
    if isinstance(mechanism, Threshold):
        raise UnsupportedMechanism(f"categories above a threshold: a group of {size} may have one to itself")
    log_delta = math.log(mechanism.delta) + log_factor(mechanism.epsilon, size) if mechanism.delta else -math.inf
    if log_delta >= 0:
        raise UnsupportedMechanism(f"(epsilon, delta)-DP releases say nothing of groups of {size}: delta passes 1")
    return replace(mechanism, epsilon=size * mechanism.epsilon, delta=math.exp(log_delta))


def log_factor(epsilon: float, size: int) -> float:
    """Return log of (e^(k epsilon) - 1) / (e^epsilon - 1) = 1 + e^epsilon + ... + e^((k - 1) epsilon), k = `size`.

    >>> round(math.exp(log_factor(1.0, 3)), 6) == round(1 + math.e + math.e**2, 6)
    True
    """
    if epsilon < 1e-9:
        return math.log(size) + (size - 1) * epsilon
    return (size - 1) * epsilon + math.log(-math.expm1(-size * epsilon)) - math.log(-math.expm1(-epsilon))


class ForGroup(Derived, stated=False):
    """Accountant for groups of `size` records, based on `accountant`, which prices single records.

    `parts` are releases on disjoint parts of the data. Each record of the group is in one of them, so k of them may be
    in the first and the others in the second. For each such split, the releases of all parts compose, each as for its
    share of the group; what is stated is the largest price of all splits. On the way from neighbour to neighbour, each
    step changes a record of one part, so it costs at most the dearest part.
    """

    def __init__(self, accountant: Accountant, size: int) -> None:
        super().__init__(accountant)
        self.size = size
        self.note = f"{accountant.note}; groups of {size}" if size > 1 else accountant.note  # type: ignore[misc]

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.epsilon_of([releases], delta)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        return self.delta_of([releases], epsilon)

    def epsilon_of(self, parts: Parts, delta: float) -> float:
        """Return `epsilon` of releases on disjoint parts of the data."""
        return self._least(
            parts, lambda own: self.accountant.epsilon(own, delta), lambda: self._by_statement(parts, delta)
        )

    def delta_of(self, parts: Parts, epsilon: float) -> float:
        """Return `delta` of releases on disjoint parts of the data."""
        return self._least(
            parts, lambda own: self.accountant.delta(own, epsilon), lambda: self.stated(parts, epsilon / self.size)
        )

    def stated(self, parts: Parts, epsilon: float) -> float:
        """Return the group's delta at `size` times `epsilon`, by the statement on one record."""
        one = max(self.accountant.delta(part, epsilon) for part in parts)
        return self.group_delta(one, epsilon)

    def group_delta(self, one: float, epsilon: float) -> float:
        """Return the group's delta at `size` times `epsilon` if `one` is that of one record at `epsilon`."""
        return math.exp(min(0.0, math.log(one) + log_factor(epsilon, self.size))) if one else 0.0

    def _least(self, parts: Parts, price: Callable[[list[Release]], float], stated: Callable[[], float]) -> float:
        """Return the lesser result of both theorems, or that of the only one that applies.

        If neither applies, raises the UnsupportedMechanism of the first.
        """
        found, refused = [], None
        try:
            mixtures = self.accountant.refusal(_MIXTURE) is None
            pairs = splits_of(parts, self.size, mixtures)
            found.append(max(map(price, pairs)))
            if mixtures and all(isinstance(pair.mechanism, GaussianSum) for split in pairs for pair in split):
                return found[0]
        except UnsupportedMechanism as error:
            refused = error
        if self.size > 1 and self.bound == "upper":
            try:
                found.append(stated())
            except UnsupportedMechanism as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise refused
        return min(found)

    def _by_statement(self, parts: Parts, delta: float) -> float:
        """Return k epsilon at a delta of one record that is small enough; every candidate is a proved bound."""
        known: dict[float, float] = {}

        def fits(below: float) -> bool:
            """Return whether one record's epsilon at `delta` e^-below gives a group at most `delta`."""
            known[below] = max(self.accountant.epsilon(releases, delta * math.exp(-below)) for releases in parts)
            return known[below] < math.inf and log_factor(known[below], self.size) <= below

        low = high = math.log(self.size)
        while not fits(high):
            if high > _DEEPEST:
                return math.inf
            low, high = high, 2 * high
        return self.size * known[smallest(fits, low, high, _PRECISION)]


def splits_of(parts: Parts, size: int, mixtures: bool = True) -> list[list[Release]]:
    """Return, for each split of a group over `parts`, releases whose price bounds that split (see `ForGroup`).

    Of very many splits, neighbouring ones share releases that bound them all. Raises UnsupportedMechanism if nothing is
    proved for some split.
    """
    if len(parts) == 1:
        return [_of_share(parts[0], size, mixtures)]
    first, *rest = parts
    stride = -(-size // _MOST_SPLITS)
    ends = sorted({0, size, *range(stride, size, stride)})
    shares = [(end, size - before) for before, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    return [
        [*_of_share(first, most, mixtures), *others]
        for most, left in shares
        for others in splits_of(rest, left, mixtures)
    ]


def _of_share(releases: Sequence[Release], size: int, mixtures: bool) -> list[Release]:
    return [Release(of_group(one.mechanism, size, mixtures), one.count) for one in releases] if size else []
