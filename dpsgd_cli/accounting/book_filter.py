"""The privacy filter of a book: the most that many runs on one table may cost, each chosen after seeing the others.

A run is charged two numbers before it releases anything: mu^2 of a Gaussian, and a `leak`, a probability. The limits of
both are fixed when the book is created; `fits` refuses a charge that would bring either sum over its limit.

Notation: D(mu, e) the delta at epsilon e of a mu-Gaussian-DP release (`conversions.gaussian_delta`); mu_i and d_i what
run i is charged; M and L the limits of the sums of mu_i^2 and of d_i.

Dominated. A run is dominated by (mu_i, d_i) if, given everything released before it, its delta at every epsilon
e >= 0, for both orders of any two neighbours, is at most d_i + (1 - d_i) D(mu_i, e). Then it can be simulated from a
release that, with probability d_i whatever the data are, shows the data, and else is mu_i-Gaussian-DP: that release has
exactly this delta at every e >= 0, by symmetry at every e < 0 too, and these numbers decide which of two pairs of
distributions can be made from the other (Blackwell 1953; Kairouz, Oh and Viswanath 2017).

Guarantee: let mu_i and d_i be functions of what was released before run i, let every run be dominated, and let the sums
never exceed M and L. Then all runs together are (e, D(sqrt M, e) + L)-DP for every e >= 0. The choice of the next run,
of its price, or to have none, may depend on everything before.
Proof: Let the simulation stop at the first release that shows the data. While it runs, each release is
mu_i-Gaussian-DP, or is the stop, whose probability no data change. So the stopped simulation is sqrt(M)-Gaussian-DP
(fully adaptive composition: Smith and Thakurta 2022, arXiv 2210.17520; Koskela, Tobaben and Honkela 2023, arXiv
2209.15596). A stop has at most the expected sum of d_i as its probability, hence at most L, on any data.
For a set S of outputs and neighbours X, Y: Pr[X in S] <= Pr[X in S, no stop] + L <= e^e Pr[Y in S, no stop] +
D(sqrt M, e) + L <= e^e Pr[Y in S] + D(sqrt M, e) + L.

What a run is charged. The releases of a run are fixed beforehand, or bounded by a filter of its own
(`ledger.priced_releases`), so that inside a run ordinary composition holds (Zhu, Dong and Wang 2022). Unsampled
Gaussians and pure releases have a mu of their own; (epsilon, delta)-DP ones add their delta to the leak. For all others
(sampled batches), the profile of an accountant is taken, as a whole, for one run; `dominating_mu` finds their mu.
Composing profiles over runs that were chosen adaptively is no filter in general (Tran et al. 2026, arXiv 2602.06756),
so it is not done.

The first charge may fill the book: if it alone is (epsilon, delta)-DP by any accountant, and nothing was charged
before, it is admitted and nothing after it is. Then the book is one run, and that run's statement is the book's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import number, split_delta
from dpsgd_cli.accounting.accountants.additive import Gaussian, total_mu_squared
from dpsgd_cli.accounting.budget import EpsilonBudget, mu_squared_left
from dpsgd_cli.accounting.conversions import gaussian_delta, gaussian_epsilon
from dpsgd_cli.accounting.mechanism import Release, merge
from dpsgd_cli.accounting.search import exceeds, smallest
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.errors import UnsupportedMechanism

LEAKS = 0.1
"""The share of a book's delta that leaks may use; the rest is that of the Gaussian."""
_OF_THE_REST = 1 / 16
"""The share of the leak that is left which a run with sampled batches is charged, so that some is always left."""
_CELLS = 400
_MOST_EPSILON = 1e5
_MANY = 64
_ROUNDING = 1 + 1e-9

Profile = Callable[[float], float]
"""Function from epsilon >= 0 to a delta that is proved at it, for a whole run."""


@dataclass(frozen=True)
class Price:
    """Charges of a book: `mu_squared` and `leak`, both >= 0."""

    mu_squared: float
    leak: float


@dataclass(frozen=True)
class Spending:
    """Releases that runs may make, for one charge: releases fixed beforehand, and runs known by their `profiles` alone.

    `held_out`: releases of the same run on its held-out records, in parallel with the others (`evaluation/price.py`).
    Neighbours differ in one part, so the larger of the two parts' charges dominates the run. Of several runs, which may
    have held out different records, all releases are added up.
    """

    releases: tuple[Release, ...] = ()
    profiles: tuple[Profile, ...] = field(default=(), compare=False)
    held_out: tuple[Release, ...] = ()

    def __add__(self, other: Spending) -> Spending:
        if not (self.releases or self.profiles or self.held_out):
            return other
        every = [*self.releases, *self.held_out, *other.releases, *other.held_out]
        return Spending(tuple(merge(every)), (*self.profiles, *other.profiles))

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon that is proved for this charge alone; inf if none is, as for profiles with others.

        Raises UnsupportedMechanism if no accountant covers the releases.
        """
        if self.held_out:
            parts = Spending(self.releases, self.profiles), Spending(self.held_out)
            return max(part.epsilon(delta) for part in parts)
        if self.profiles:
            profile = self.profiles[0]
            if self.releases or len(self.profiles) > 1 or profile(_MOST_EPSILON) > delta:
                return math.inf
            return smallest(lambda epsilon: profile(epsilon) <= delta, 0.0, _MOST_EPSILON)
        names = accountants.USUAL if len(self.releases) <= _MANY else ("rdp", "zcdp", "gaussian")
        return BestAccountant(names).epsilon(self.releases, delta)

    def price(self, leak_left: float) -> Price:
        """Return what the filter is charged (see above); mu^2 is inf if nothing bounds it.

        Raises UnsupportedMechanism if no accountant covers the releases.
        """
        if self.held_out:
            parts = [
                part.price(leak_left) for part in (Spending(self.releases, self.profiles), Spending(self.held_out))
            ]
            return Price(max(part.mu_squared for part in parts), max(part.leak for part in parts))
        kept, leak = split_delta(self.releases)
        exact = [release for release in kept if Gaussian().refusal(release.mechanism) is None]
        sampled = [release for release in kept if release not in exact]
        total, own = total_mu_squared(exact), leak_left * _OF_THE_REST
        if not (sampled or self.profiles):
            return Price(total, abs(leak))
        if own <= 0:
            return Price(math.inf, 0.0)
        profiles = [_profile(sampled, own)] if sampled else []
        for profile in (*profiles, *self.profiles):
            total += dominating_mu(profile, own) ** 2
            leak += own
        return Price(total, leak)


def limits(epsilon: float, delta: float) -> Price:
    """Return the limits M and L of a book: D(sqrt M, epsilon) + L <= delta."""
    return Price(mu_squared_left(EpsilonBudget(epsilon=epsilon, delta=delta * (1 - LEAKS)), ()), delta * LEAKS)


def fits(limit: Price, spent: Sequence[Price], more: Price) -> bool:
    """Return whether the filter admits the charge `more` after those in `spent`; sums are exact."""
    charges = [*spent, more]
    return not (
        exceeds([one.mu_squared for one in charges], limit.mu_squared)
        or exceeds([one.leak for one in charges], limit.leak)
    )


def left(limit: Price, spent: Sequence[Price]) -> Price:
    """Return what is left of the limits, from below; 0 where nothing is."""
    rest = [math.fsum([most, *(-own for own in charged)]) * (1 - 1e-12) for most, charged in (
        (limit.mu_squared, [one.mu_squared for one in spent]),
        (limit.leak, [one.leak for one in spent]),
    )]  # fmt: skip
    return Price(*(max(0.0, one) for one in rest))


def epsilon_of_next(mu_squared: float, delta: float, runs: int = 1) -> float:
    """Return the epsilon at `delta` of each of `runs` equal Gaussian runs that fit into `mu_squared`, rounded down.

    >>> epsilon_of_next(1.0, 1e-5) > 3 * epsilon_of_next(1.0, 1e-5, 10) > 0
    True
    """
    found = gaussian_epsilon(math.sqrt(mu_squared / runs), delta) * (1 - 1e-9)
    return math.floor(found * 1e4) / 1e4


def dominating_mu(profile: Profile, leak: float) -> float:
    """Return a mu with profile(e) <= leak + (1 - leak) D(mu, e) at every e >= 0; inf if none is found.

    Guarantee: true of the whole half-line if `profile` is an upper bound of a delta at every e. The true delta and D
    fall with e, so within a cell [a, b] it is enough that profile(a) <= leak + (1 - leak) D(mu, b); beyond the last
    cell the profile is at most `leak`.
    """
    end = 1.0
    while profile(end) > leak:
        end *= 2
        if end > _MOST_EPSILON:
            return math.inf
    end = smallest(lambda epsilon: profile(epsilon) <= leak, 0.0, end, 1e-3)
    mu = 0.0
    for cell in range(_CELLS):
        needed = (profile(end * cell / _CELLS) - leak) / (1 - leak)
        mu = _least_mu(needed, end * (cell + 1) / _CELLS, mu)
    return mu * _ROUNDING


def _least_mu(delta: float, epsilon: float, least: float) -> float:
    """Return the least mu >= `least` with D(mu, epsilon) >= `delta`, from above."""
    if delta <= 0 or gaussian_delta(least, epsilon) >= delta:
        return least
    enough = max(least, 1e-6)
    while gaussian_delta(enough, epsilon) < delta:
        enough *= 2
    return smallest(lambda mu: gaussian_delta(mu, epsilon) >= delta, least, enough)


def _profile(releases: Sequence[Release], leak: float) -> Profile:
    """Return the tightest profile that is known for releases of one run, sharp down to `leak`."""
    reasons = []
    for name in ("pld", "rdp") if len(releases) <= _MANY else ("rdp", "pld"):
        accountant = accountants.get(name)
        try:
            found = accountant.profile(releases, leak / 10)
            number(accountant, lambda found=found: found(1.0))  # type: ignore[misc]
            return found
        except UnsupportedMechanism as refusal:
            reasons.append(str(refusal))
    raise UnsupportedMechanism("\n".join(dict.fromkeys(reasons)))
