"""Interface of all accountants, from releases to a guarantee or to a refusal that names the reason; their table.

To add one: a file beside this one and a line in `ACCOUNTANTS`. Its module loads on first use: most queries need no
NumPy.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.mechanism import (
    LISTED,
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    Mechanism,
    PureDP,
    Release,
    ZeroConcentrated,
    merge,
)
from dpsgd_cli.accounting.search import smallest
from dpsgd_cli.errors import FailedAccountant, UnsupportedMechanism, UsageError

Bound = Literal["upper", "estimate"]
STATEMENTS = ("name", "bound", "note")


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) at an adjacency, as one accountant states it.

    `bound` is `upper` if it is a theorem and `estimate` otherwise. `epsilon` is >= 0, possibly inf.
    """

    accountant: str
    epsilon: float
    delta: float
    adjacency: Adjacency | None
    bound: Bound
    note: str = ""


class Accountant(ABC):
    """Method of pricing a list of releases. Stateless: the same releases always cost the same.

    Every class states, in its own body and without a default, what its statements rest on:

    `name`: its key in the registry. `note`: what a reader should know of the formula.
    `bound`: `upper` if its statement is a theorem, `estimate` otherwise.

    A class that is not an accountant by itself passes `stated=False`. Any other class must state all, or
    raises TypeError.
    """

    name: ClassVar[str]
    bound: ClassVar[Bound]
    note: ClassVar[str]

    def __init_subclass__(cls, stated: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        left_out = [name for name in STATEMENTS if name not in vars(cls)]
        if stated and left_out:
            raise TypeError(f"accountant {cls.__name__} must state {', '.join(left_out)}: none has a default")

    def refusal(self, mechanism: Mechanism) -> str | None:
        """Return why this accountant does not cover `mechanism`; None if it does."""
        listed = None if type(mechanism) in LISTED else f"{mechanism.kind} releases: no theorem here is about them"
        return listed or self.uncovered(mechanism) or unsound_sampling(mechanism)

    @abstractmethod
    def uncovered(self, mechanism: Mechanism) -> str | None:
        """Return why its formula does not cover a listed mechanism; None if it does."""

    @abstractmethod
    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        """Return the smallest epsilon this accountant can state at `delta` in (0, 1): at least 0; inf if there is none.

        Raises UnsupportedMechanism for mechanisms that `refusal` names and for mixed adjacencies.
        """

    @abstractmethod
    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        """Return the smallest delta in [0, 1] this accountant can state at `epsilon` >= 0."""

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        """Return epsilon after each epoch: entry i prices everything released in epochs 0..i."""
        spent: list[Release] = []
        result = []
        for releases in epochs:
            spent = merge([*spent, *releases])
            result.append(self.epsilon(spent, delta))
        return result

    def profile(self, releases: Sequence[Release], least: float) -> Callable[[float], float]:
        """Return a function from epsilon to delta: always a true bound, sharp for delta from about `least` up."""
        del least
        self.check(releases)
        return partial(self.delta, releases)

    def guarantee(self, releases: Sequence[Release], delta: float) -> Guarantee:
        """Return `epsilon` with everything that a reader needs to judge it."""
        adjacency = common_adjacency(releases)
        return Guarantee(self.name, self.epsilon(releases, delta), delta, adjacency, self.bound, self.note)

    def check(self, releases: Sequence[Release]) -> None:
        """Raise UnsupportedMechanism unless every release is covered and all share one adjacency."""
        common_adjacency(releases)
        for release in releases:
            reason = _out_of_range(release.mechanism) or self.refusal(release.mechanism)
            if reason is not None:
                raise UnsupportedMechanism(f"{self.name} does not cover this: {reason}")


ONLY_ZCDP = (
    "what is released is chosen from what was released, within a budget in rho, and of that it is proved that the whole"
    " is rho-zCDP and nothing more; use zcdp, zcdp-tight or rdp"
)


class Derived(Accountant, stated=False):
    """Accountant that is based on another one, and covers no more than that one does."""

    def __init__(self, accountant: Accountant) -> None:
        self.accountant = accountant
        for name in STATEMENTS:
            setattr(self, name, getattr(accountant, name))

    def uncovered(self, mechanism: Mechanism) -> str | None:
        return self.accountant.refusal(mechanism)


class WithoutLeaks(Accountant, stated=False):
    """Accountant whose formula is for releases that leak nothing. Leaks are taken off delta beforehand.

    Leaks are those of (epsilon, delta)-DP releases. Guarantee: see `split_delta`. A leak of delta or more leaves no
    finite epsilon.
    """

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = split_delta(releases)
        return self._epsilon(kept, delta - leak) if leak < delta else math.inf

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        kept, leak = split_delta(releases)
        return min(1.0, leak + self._delta(kept, epsilon)) if kept else 0.0

    @abstractmethod
    def _epsilon(self, kept: list[Release], delta: float) -> float:
        """Return `epsilon` of releases that were all used, and leak nothing."""

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        """Return `delta` of one or more releases that were all used, and leak nothing.

        The default serves formulas that give epsilon only.
        """
        return smallest_delta(lambda delta: self._epsilon(kept, delta), epsilon)


def number(accountant: Accountant, ask: Callable[[], float]) -> float:
    """Return the answer of `ask` for `accountant`, if it is a number.

    Raises FailedAccountant if its arithmetic breaks down: a failed computation states no bound.
    """
    try:
        value = ask()
    except (ArithmeticError, ValueError) as error:
        raise FailedAccountant(f"{accountant.name}: its numbers fail here ({error}); take another one") from error
    if math.isnan(value):
        raise FailedAccountant(f"{accountant.name}: its numbers fail here (not a number); take another one")
    return value


def _out_of_range(mechanism: Mechanism) -> str | None:
    """Return why floats cannot hold the squares of a number of `mechanism`; None if they can."""
    if isinstance(mechanism, GaussianSum):
        noise, rate = mechanism.noise_multiplier, mechanism.sampling_rate
        if noise != 0 and not 1e-100 <= noise <= 1e100:
            return f"noise multiplier {noise:g} is outside [1e-100, 1e100]"
        if rate != 0 and rate < 1e-100:
            return f"sampling rate {rate:g} is below 1e-100"
    elif not isinstance(mechanism, ZeroConcentrated) and mechanism.epsilon > 1e100:
        return f"epsilon {mechanism.epsilon:g} is above 1e100"
    return None


def common_adjacency(releases: Sequence[Release]) -> Adjacency | None:
    """Return the one adjacency of all releases; None for an empty list.

    Raises UnsupportedMechanism for mixed adjacencies, which have no common statement.
    """
    names = sorted({release.mechanism.adjacency for release in releases})
    if len(names) > 1:
        raise UnsupportedMechanism(f"releases are stated for different adjacencies: {', '.join(names)}")
    return names[0] if names else None


def unsound_sampling(mechanism: Mechanism) -> str | None:
    """Return why no theorem covers a batching under its adjacency, for any accountant; None if one does."""
    if not isinstance(mechanism, GaussianSum):
        return None
    if isinstance(mechanism, CorrelatedSums) and mechanism.sampled and NEIGHBOURS[mechanism.adjacency].replaced:
        return (
            "correlated noise on sampled batches under replace-one adjacency: its theorem is about a record that comes"
            " or goes; use add-remove or zero-out"
        )
    return mechanism.batches.refusal(mechanism.adjacency)


def split_delta(releases: Sequence[Release]) -> tuple[list[Release], float]:
    """Replace every (epsilon, delta)-DP release by its pure part, and bound the rest. Unused releases are dropped.

    Returns the releases and the probability `leak`. A guarantee (epsilon, delta) of the returned releases is
    (epsilon, delta + leak) of the given ones. Source: Kairouz, Oh and Viswanath 2017 (an (epsilon, delta)-DP
    release is post-processing of randomised response that reveals everything with probability delta).
    """
    kept: list[Release] = []
    log_safe = 0.0
    for release in releases:
        mechanism = release.mechanism
        if not release.count:
            continue
        if isinstance(mechanism, ApproximateDP):
            log_safe += release.count * math.log1p(-mechanism.delta)
            kept.append(Release(PureDP(mechanism.epsilon, mechanism.adjacency, "pure", mechanism.label), release.count))
        else:
            kept.append(release)
    return kept, -math.expm1(log_safe)


def smallest_delta(epsilon_at: Callable[[float], float], epsilon: float, most: float = 1.0) -> float:
    """Return the least delta of [1e-300, 1] with `epsilon_at(delta) <= epsilon`, from above; 1 if there is none.

    For accountants whose formula gives epsilon only. A delta for which `epsilon_at` raises UnsupportedMechanism is
    outside the formula's region and does not count; nor does one from `most` on, where that region ends.
    """

    def holds(delta: float) -> bool:
        try:
            return epsilon_at(delta) <= epsilon
        except UnsupportedMechanism:
            return False

    low, high = 1e-300, min(most, 1.0) * (1 - 1e-12)
    if not holds(high):
        return 1.0
    return low if holds(low) else smallest(holds, low, high)


@dataclass(frozen=True, kw_only=True)
class AccountantEntry:
    """Entry of an accountant in the table. No field has a default.

    `runs`: `module:class` in this folder, imported when it is needed. The class states the direction of
    its bound, and the mechanisms and adjacencies that it is proved for. `usual`: True if it answers a query that names
    no accountant; the others are variants and looser noise levels. `in_recipes`: True if a recipe may name it. Only
    upper bounds may be named, and no variants that are looser (but `rdp-markov`, by which papers chose their noise).
    """

    runs: str
    usual: bool
    in_recipes: bool


ACCOUNTANTS: dict[str, AccountantEntry] = {
    "basic-composition": AccountantEntry(runs="composition:BasicComposition", usual=True, in_recipes=True),
    "advanced-composition": AccountantEntry(runs="composition:AdvancedComposition", usual=True, in_recipes=True),
    "strong-composition": AccountantEntry(runs="composition:StrongComposition", usual=True, in_recipes=True),
    "zcdp": AccountantEntry(runs="additive:Zcdp", usual=True, in_recipes=True),
    "zcdp-rs": AccountantEntry(runs="additive:ZcdpRs", usual=True, in_recipes=False),
    "moments": AccountantEntry(runs="rdp:Moments", usual=True, in_recipes=True),
    "rdp": AccountantEntry(runs="rdp:Rdp", usual=True, in_recipes=True),
    "pld": AccountantEntry(runs="pld:Pld", usual=True, in_recipes=True),
    "gaussian": AccountantEntry(runs="additive:Gaussian", usual=True, in_recipes=True),
    "zcdp-tight": AccountantEntry(runs="additive:TightZcdp", usual=False, in_recipes=True),
    "rdp-markov": AccountantEntry(runs="rdp:MarkovRdp", usual=False, in_recipes=True),
    "strong-composition-published": AccountantEntry(
        runs="composition:PublishedStrongComposition", usual=False, in_recipes=False
    ),
    "lemma-15.1": AccountantEntry(runs="composition:Lemma151", usual=False, in_recipes=True),
    "lemma-15.5": AccountantEntry(runs="composition:Lemma155", usual=False, in_recipes=True),
    "nikolov": AccountantEntry(runs="composition:Nikolov", usual=False, in_recipes=True),
}

NAMES = tuple(ACCOUNTANTS)
USUAL = tuple(name for name, listed in ACCOUNTANTS.items() if listed.usual)
"""Accountants that answer a query which names none; the others are variants and looser noise levels."""

_ELSEWHERE = {"prv": "pld", "fft": "pld", "gdp": "gaussian", "renyi": "rdp", "ma": "moments"}
"""Names that other libraries give to these methods."""


def get(name: str) -> Accountant:
    """Return the accountant called `name`.

    Raises UsageError, listing every name, for one that does not exist. Raises TypeError for an entry that is not an
    accountant of its name, or that recipes may name though its class states no upper bound.
    """
    if name not in ACCOUNTANTS:
        known = _ELSEWHERE.get(name.lower())
        hint = f"; did you mean {known}?" if known else ""
        raise UsageError(f"unknown accountant {name!r}{hint}; known: {', '.join(NAMES)}")
    listed = ACCOUNTANTS[name]
    module, _, symbol = listed.runs.partition(":")
    accountant = getattr(importlib.import_module(f"{__name__}.{module}"), symbol)()
    if not isinstance(accountant, Accountant) or accountant.name != name:
        raise TypeError(f"accountant {name}: {listed.runs} is no accountant of that name")
    if listed.in_recipes and accountant.bound != "upper":
        raise TypeError(
            f"accountant {name}: its bound is {accountant.bound!r}, so no recipe may state an epsilon by it"
        )
    return accountant
