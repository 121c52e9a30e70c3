"""The epsilon that is stated if no accountant is named, the least upper bound that applies; and warnings.

Each bound is a theorem about the same releases, so the least of them is true. Releases must be fixed beforehand. For
releases that are chosen during the run, only the theorem of the filter that admits them holds
(`ledger.priced_releases`). Warnings are no errors: such a run may be an experiment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import EVERY_NEIGHBOUR, Accountant, number
from dpsgd_cli.accounting.conversions import log_upper_tail
from dpsgd_cli.accounting.mechanism import KINDS, Mechanism, Release
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.errors import UnsupportedMechanism

MOST_EPSILON = 100.0


class BestAccountant(Accountant):
    """The least upper bound of the accountants called `names`. Those that state an estimate are left out.

    Releases that one accountant refuses may be priced by others.
    """

    name = "least"
    bound = "upper"
    note = "least upper bound"
    mechanisms = tuple(KINDS)
    adjacencies = EVERY_NEIGHBOUR

    def __init__(self, names: Sequence[str] = accountants.USUAL) -> None:
        self._names = names

    @cached_property
    def _all(self) -> list[Accountant]:
        named = [accountants.get(name) for name in self._names]
        return [accountant for accountant in named if accountant.bound == "upper"]

    def refusal(self, mechanism: Mechanism) -> str | None:
        reasons = [accountant.refusal(mechanism) for accountant in self._all]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.best(releases, delta)[0]

    def best(self, releases: Sequence[Release], delta: float) -> tuple[float, str]:
        """Return the least epsilon, and the name of the accountant that proves it.

        Raises UnsupportedMechanism, with the reasons of all, if none covers the releases.
        """
        found: list[tuple[float, str]] = []
        reasons: list[str] = []
        for accountant in self._all:
            try:
                found.append((number(accountant, partial(accountant.epsilon, releases, delta)), accountant.name))
            except UnsupportedMechanism as refusal:
                reasons.append(str(refusal))
        if not found:
            raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))
        return min(found)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        found = []
        for accountant in self._all:
            try:
                found.append(number(accountant, partial(accountant.delta, releases, epsilon)))
            except UnsupportedMechanism:
                continue
        return min(found, default=math.inf)


def warnings_of(epsilon: float | None, delta: float, records: int) -> list[str]:
    """Return warnings about a guarantee of `epsilon` (None: no finite one) at `delta` for `records` records.

    Publishing each record whole with probability `delta` satisfies (0, delta): at 1 / records that is one, on average.

    >>> warnings_of(3.0, 1e-5, 60_000), len(warnings_of(250.0, 0.01, 100))
    ([], 2)
    """
    found = []
    if delta * records >= 1:
        found.append(
            f"delta {delta:g} is not below 1 / {records}, the number of training records: publishing one of them whole"
            " would satisfy it; give a smaller delta"
        )
    if epsilon is not None and epsilon > MOST_EPSILON:
        found.append(
            f"epsilon {epsilon_text(epsilon)} is above {MOST_EPSILON:g}: it bounds next to nothing; add noise, train"
            " less or lower the budget"
        )
    return found


def epsilon_at_least(noise_multiplier: float, batches: int, delta: float) -> float:
    """Return a lower bound on epsilon at `delta` of one epoch of `batches` >= 1 shuffled batches, under zero-out.

    This bound is the reason why no Poisson epsilon may be reported for shuffled batches; it proves nothing about
    safety.

    Take a record whose removal moves its batch from 2 to 1 while all other batches stay at 0. The event that some batch
    exceeds C has probability P = 1 - Phi((C-2)/z) Phi(C/z)^(T-1), and Q, the same with 1 for 2, without the record. So
    epsilon >= log((P - delta) / Q) for every C. The best C is found on a grid, which keeps the bound true.

    >>> round(epsilon_at_least(0.5, 10_000, 1e-6), 2)
    10.99

    Source: Chua et al. 2024, "How private are DP-SGD implementations?", section 4 (lower bound for shuffling).
    """
    best = 0.0
    for i in range(1, 4001):
        threshold = i * (2 + 12 * noise_multiplier) / 4000
        others = (batches - 1) * _log_below(threshold / noise_multiplier)
        with_record = -math.expm1(_log_below((threshold - 2) / noise_multiplier) + others)
        without = -math.expm1(_log_below((threshold - 1) / noise_multiplier) + others)
        if with_record > delta and without > 0:
            best = max(best, math.log((with_record - delta) / without))
    return best


def _log_below(x: float) -> float:
    """Return log Phi(x), to full precision on both sides."""
    return math.log1p(-math.exp(log_upper_tail(x))) if x > 0 else log_upper_tail(-x)
