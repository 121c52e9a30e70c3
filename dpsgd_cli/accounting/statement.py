"""Statements: the record of a priced composition, the least upper bound that applies, and warnings.

Each bound is a theorem about the same releases, so the least of them is true. Releases must be fixed beforehand. For
releases that are chosen during the run, only the theorem of the filter that admits them holds
(`ledger.priced_releases`). Warnings are no errors: such a run may be an experiment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant, number
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.groups import ForGroup, Parts, splits_of
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, Release, ZeroConcentrated, merge
from dpsgd_cli.accounting.tradeoff import LEAST_ERROR, RATES, Attacker, TradeoffCurve, curve_of, strongest
from dpsgd_cli.common.text_format import count, epsilon_text
from dpsgd_cli.errors import UnsupportedMechanism

if TYPE_CHECKING:  # NumPy
    from dpsgd_cli.accounting.repeated_selection import Choice

MOST_EPSILON = 100.0


class BestAccountant(Accountant):
    """The least upper bound of the accountants called `names`. Those that state an estimate are left out.

    Releases that one accountant refuses may be priced by others.
    """

    name = "least"
    bound = "upper"
    note = "least upper bound"

    def __init__(self, names: Sequence[str] = accountants.USUAL) -> None:
        self._names = names

    @cached_property
    def _all(self) -> list[Accountant]:
        named = [accountants.get(name) for name in self._names]
        return [accountant for accountant in named if accountant.bound == "upper"]

    def uncovered(self, mechanism: Mechanism) -> str | None:
        reasons = [accountant.refusal(mechanism) for accountant in self._all]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.best(releases, delta)[0]

    def best(self, releases: Sequence[Release], delta: float) -> tuple[float, str]:
        """Return the least epsilon, and the name of the accountant that proves it.

        Raises UnsupportedMechanism, with the reasons of all, if none covers the releases.
        """
        found, reasons = self._asked(lambda accountant: accountant.epsilon(releases, delta))
        if not found:
            raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))
        return min(found)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        found, _ = self._asked(lambda accountant: accountant.delta(releases, epsilon))
        return min(found, default=(math.inf, ""))[0]

    def _asked(self, question: Callable[[Accountant], float]) -> tuple[list[tuple[float, str]], list[str]]:
        """Return each answer with the name of the accountant that proves it, and the reasons of those that refuse."""
        found, reasons = list[tuple[float, str]](), list[str]()
        for accountant in self._all:
            try:
                found.append((number(accountant, partial(question, accountant)), accountant.name))
            except UnsupportedMechanism as refusal:
                reasons.append(str(refusal))
        return found, reasons


LEAST_DELTA = math.ulp(0.0)
"""Least positive delta that is printed: no Gaussian is pure, however small its delta."""


@dataclass(frozen=True)
class Composition:
    """Releases that are priced together, and for whom. Every figure of one statement is a method of one such record.

    - `trials`: the releases of each trial, by part of the data (`ledger.by_part`). A statement holds for each trial by
      itself; trials that are priced together are one item.
    - `group`: the number of records (or users) that are protected together.
    - `choice`: if given, only the best of a random number of runs is published, each of which is one of `trials`.

    Guarantee: `epsilon`, `delta`, `rho` and `attack` are bounds for the same neighbours and the same release: groups of
    `group` and the published best, if there is one. A method returns None where nothing is proved.
    """

    trials: tuple[tuple[tuple[Release, ...], ...], ...]
    group: int = 1
    choice: Choice | None = None

    @classmethod
    def of(cls, trials: Iterable[Parts], group: int = 1, choice: Choice | None = None) -> Composition:
        """Return the composition of some trials; equal mechanisms are merged, and equal trials are one."""
        merged = (tuple(tuple(merge(list(part))) for part in parts) for parts in trials)
        return cls(tuple(dict.fromkeys(merged)), group, choice)

    @property
    def releases(self) -> list[Release]:
        """The releases of all trials and parts, one after the other."""
        return [release for parts in self.trials for part in parts for release in part]

    @property
    def adjacency(self) -> Adjacency | None:
        """Adjacency of the first release; None without any."""
        return next((release.mechanism.adjacency for release in self.releases), None)

    def epsilon(self, accountant: Accountant, delta: float) -> float:
        """Return epsilon at `delta`; inf if there is none. Raises UnsupportedMechanism if `accountant` refuses."""
        if self.choice is not None:
            return number(accountant, lambda: self._best()[0](delta))
        grouped = ForGroup(accountant, self.group)
        return max(number(accountant, partial(grouped.epsilon_of, parts, delta)) for parts in self.trials)

    def delta(self, accountant: Accountant, epsilon: float) -> float:
        """Return delta at `epsilon` by `accountant`: 0 only where no noise is Gaussian, as Gaussians are never pure."""
        if self.choice is not None:
            found = number(accountant, lambda: self._best()[1](epsilon))
        else:
            grouped = ForGroup(accountant, self.group)
            found = max(number(accountant, partial(grouped.delta_of, parts, epsilon)) for parts in self.trials)
        return found or (0.0 if all(map(_is_pure, self.releases)) else LEAST_DELTA)

    def rho(self) -> float | None:
        """Return rho of all together; None if there is none, as for sampled batches and for a best of several."""
        if self.choice is not None:
            return None
        try:
            rhos = [rho_of(split) for parts in self.trials for split in splits_of(parts, self.group)]
        except UnsupportedMechanism:
            return None
        known = [rho for rho in rhos if rho is not None and rho < math.inf]
        return max(known, default=0.0) if len(known) == len(rhos) else None

    def attack(self, rates: Sequence[float] = RATES) -> Attacker | None:
        """Return bounds on any attack: TPR at these false positive rates, mu and regret; None if nothing is proved."""
        try:
            return strongest([curve.attacker(rates) for curve in self.curves(min(*rates, LEAST_ERROR))])
        except UnsupportedMechanism:
            return None

    def curves(self, least: float = min(RATES)) -> list[TradeoffCurve]:
        """Return trade-off curves whose lowest bounds the statement, from the false positive rate `least` on.

        Raises UnsupportedMechanism, with the reasons, if no accountant has a profile.
        """
        if self.choice is not None:
            return [TradeoffCurve.of_profile(self._best()[1], "rdp")]
        try:
            return [curve_of(split, least) for parts in self.trials for split in splits_of(parts, self.group)]
        except UnsupportedMechanism:
            if self.group == 1:
                raise
        grouped = ForGroup(accountants.get("pld"), self.group)
        return [TradeoffCurve.of_profile(_group_profile(grouped, parts, least), "pld") for parts in self.trials]

    def _best(self) -> tuple[Callable[[float], float], Callable[[float], float]]:
        assert self.choice is not None
        if any(len(parts) > 1 for parts in self.trials):
            raise UnsupportedMechanism(
                "the best of several trials whose held-out records are private: the choice may use both parts, and no"
                " price of that is proved"
            )
        from dpsgd_cli.accounting.repeated_selection import BestOfTrials  # NumPy

        return BestOfTrials(self.choice).of_any([splits_of(parts, self.group)[0] for parts in self.trials])


def _group_profile(grouped: ForGroup, parts: Parts, least: float) -> Callable[[float], float]:
    """Return a group's delta as a function of epsilon, by the statement on one record (`groups.py`)."""
    ones = [grouped.accountant.profile(part, least / grouped.size**2) for part in parts]

    def profile(epsilon: float) -> float:
        own = epsilon / grouped.size
        return min(1.0, grouped.group_delta(max(one(own) for one in ones), own))

    return profile


def _is_pure(release: Release) -> bool:
    """Return whether a release has a finite largest loss, or none at all."""
    mechanism = release.mechanism
    if isinstance(mechanism, GaussianSum):
        return mechanism.sampling_rate == 0 or not release.count
    return not isinstance(mechanism, ZeroConcentrated) or mechanism.rho == 0


def warnings_of(epsilon: float | None, delta: float, records: int | None, group: int = 1) -> list[str]:
    """Return warnings about a guarantee of `epsilon` (None: no finite one) at `delta` for groups of `records` records.

    `records` is None if their number is not known.

    Publishing each record whole with probability `delta` satisfies (0, delta): at 1 / records that is one, on average.

    >>> warnings_of(3.0, 1e-5, 60_000), len(warnings_of(250.0, 0.01, 100))
    ([], 2)
    """
    found = []
    if records is not None and delta * records >= 1:
        found.append(
            f"delta {delta:g} is not below 1 / {records}, the number of training records: publishing one of them whole"
            " would satisfy it; give a smaller delta"
        )
    if records is not None and group > records:
        found.append(f"a group of {group} is larger than the data, which have {count(records, 'record')}")
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
    import numpy as np
    from scipy.special import log_ndtr

    # in units of the noise
    thresholds = np.arange(1, 4001) * (2 / noise_multiplier + 12) / 4000
    others = (batches - 1) * log_ndtr(thresholds)
    with_record, without = (-np.expm1(log_ndtr(thresholds - moved / noise_multiplier) + others) for moved in (2, 1))
    held = (with_record > delta) & (without > 0)
    return float(np.log((with_record[held] - delta) / without[held]).max(initial=0.0))
