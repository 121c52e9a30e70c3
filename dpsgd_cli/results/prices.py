"""Prices of releases, cached, because the cells of a sweep and most trials have equal releases.

`parts` has the price of preprocessing, training and looks at validation records, each by itself. Epsilons of parts do
not add up to that of the whole; rhos do. `accounting/accountants/` computes prices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import number
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.ledger import Ledger, priced_parts
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, merge
from dpsgd_cli.accounting.statement import Composition
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.results.result import Row


def unscaled(release: Release) -> Release:
    """Return the release in units of its sensitivity; a price depends on nothing else."""
    mechanism = release.mechanism
    if not isinstance(mechanism, GaussianSum) or mechanism.sensitivity == 1.0:
        return release
    return Release(dataclasses.replace(mechanism, sensitivity=1.0), release.count)


def epsilon(accountant: str, releases: Sequence[Release], delta: float) -> float:
    """Return the accountant's epsilon at `delta` for all releases together; inf if there is none."""
    return _epsilon(accountant, tuple(merge([unscaled(release) for release in releases])), delta)


def curve(accountant: str, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
    """Return epsilon at `delta` after each epoch."""
    return list(_curve(accountant, tuple(tuple(map(unscaled, releases)) for releases in epochs), delta))


@functools.lru_cache(maxsize=256)
def _epsilon(accountant: str, releases: tuple[Release, ...], delta: float) -> float:
    named = accountants.get(accountant)
    return number(named, lambda: named.epsilon(releases, delta))


@functools.lru_cache(maxsize=64)
def _curve(accountant: str, epochs: tuple[tuple[Release, ...], ...], delta: float) -> tuple[float, ...]:
    return tuple(accountants.get(accountant).curve(epochs, delta))


def attacker(ledgers: Sequence[Ledger]) -> Row | None:
    """Return the best attacker on the trial that reveals most; None if no accountant has a profile of the trial."""
    priced = ([[unscaled(r) for r in part] for part in priced_parts(ledger.entries)] for ledger in ledgers)
    found = _attack(Composition.of(priced))
    if found is None:
        return None
    rates = {f"{rate:g}": share for rate, share in found.true_positives.items()}
    mu = found.mu if math.isfinite(found.mu) else None
    return {"mu": mu, "regret": found.regret, "true_positives": rates, "proved_by": found.proved_by}


@functools.lru_cache(maxsize=256)
def _attack(priced: Composition) -> Attacker | None:
    return priced.attack()


def parts(ledgers: Sequence[Ledger], accountant: str, delta: float) -> Row:
    """Return epsilon at `delta` and rho of each label (`pca`, `gradient`, ...), in the most expensive trial.

    None stands for no finite epsilon, or for releases without a rho.
    """
    known: dict[tuple[Release, ...], tuple[float | None, float | None]] = {}
    found: dict[str, list[tuple[float | None, float | None]]] = {}
    for ledger in ledgers:
        by_label: dict[str, list[Release]] = {}
        for entry in ledger.entries:
            by_label.setdefault(entry.release.mechanism.label, []).append(entry.release)
        for label, releases in by_label.items():
            key = tuple(merge(releases))
            if key not in known:
                own = epsilon(accountant, key, delta)
                known[key] = (own if math.isfinite(own) else None, rho_of(key))
            found.setdefault(label, []).append(known[key])
    return {
        label: {"epsilon": largest([e for e, _ in costs]), "rho": largest([rho for _, rho in costs])}
        for label, costs in found.items()
    }


def largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value of all trials. None (no finite bound, no rho) is larger than any number."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
