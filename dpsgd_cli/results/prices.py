"""Prices of releases, cached, because the cells of a sweep and most trials have equal releases.

`parts` has the price of preprocessing, training and looks at validation records, each by itself. Epsilons of parts do
not add up to that of the whole; rhos do. `accounting/accountants/` computes prices.

What a result claims is compared with the price of its ledger before a page or a comparison repeats the claim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import number
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.ledger import Ledger, LedgerEntry, priced_parts, read_entries, read_seeds
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, merge
from dpsgd_cli.accounting.statement import Composition
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.errors import DataError, DpsgdError
from dpsgd_cli.results import reading
from dpsgd_cli.results.result import Row
from dpsgd_cli.users.settings import PERSON

_ROUNDING = 1e-6
"""Relative difference between a claim and a price, which another version of an accountant may make."""


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
    found: dict[str, list[tuple[float | None, float | None]]] = {}
    for ledger in ledgers:
        by_label: dict[str, list[Release]] = {}
        for entry in ledger.entries:
            by_label.setdefault(entry.release.mechanism.label, []).append(entry.release)
        for label, releases in by_label.items():
            made = merge(releases)
            own = epsilon(accountant, made, delta)
            found.setdefault(label, []).append((own if math.isfinite(own) else None, rho_of(made)))
    return {
        label: {"epsilon": largest([e for e, _ in costs]), "rho": largest([rho for _, rho in costs])}
        for label, costs in found.items()
    }


def largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value of all trials. None (no finite bound, no rho) is larger than any number."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def refuse_false(directory: Path, document: Row) -> None:
    """Raise DataError if the result in `directory` claims less than its ledger costs."""
    if problems := problems_of(directory, document):
        raise DataError(f"{directory}: {'; '.join(problems)}; `dpsgd check` has all verdicts")


def problems_of(directory: Path, document: Row) -> list[str]:
    """Return what the result claims that its ledger does not prove; empty without privacy.

    Each trial is priced again by the accountant that the result names, at its delta.
    Raises DataError for a damaged ledger.
    """
    privacy, ledger = document["privacy"], directory / "ledger.jsonl"
    if privacy["accountant"] is None:
        return []
    if reading.hides_start(directory, document):
        return ["its recipe and its claim do not agree on whether it started from an earlier result"]
    trials = read_entries(ledger)
    entries = [entry for own in trials.values() for entry in own]
    found = [
        f"{name} {claimed} is claimed; the ledger says {said}"
        for name, claimed, said in (
            ("adjacency", privacy["adjacency"], _all({entry.release.mechanism.adjacency for entry in entries})),
            ("protection of", PERSON if privacy.get("unit") else None, _all({entry.unit for entry in entries})),
            ("for trials of seeds", [row["seed"] for row in document["trials"]], read_seeds(ledger)),
        )
        if claimed != said
    ]
    if privacy["noise_source"] == "secure" and any(seed is not None for seed in read_seeds(ledger) or ()):
        found.append("noise nobody can know is claimed; the ledger has seeds")
    try:
        return found + _of_prices(document, trials)
    except DpsgdError as error:
        return [*found, f"the ledger has no such price: {error}"]


def _of_prices(document: Row, trials: dict[int, list[LedgerEntry]]) -> list[str]:
    privacy = document["privacy"]
    name, start = privacy["accountant"], privacy.get("start")
    delta = privacy["delta"] if start is None else start["own"]["delta"]
    found = []
    if privacy["bound"] != accountants.get(name).bound:
        found.append(f"the epsilon is claimed as {privacy['bound']}; {name} states {accountants.get(name).bound}")
    parts = {trial: [[unscaled(r) for r in part] for part in priced_parts(own)] for trial, own in trials.items()}
    costs = {trial: max(epsilon(name, part, delta) for part in own) for trial, own in parts.items()}
    if start is not None:
        # what is proved together with the earlier result is a sum, and nothing else (`results/earlier.py`)
        if privacy["delta"] < start["delta"] + delta or (privacy["rho"], privacy.get("attacker")) != (None, None):
            found.append("delta is not the sum of both, or more than the sum is claimed of both together")
        costs = {trial: start["epsilon"] + cost for trial, cost in costs.items()}
    claims = [("epsilon", privacy["epsilon"], max(costs.values()))]
    claims += [
        (f"epsilon of trial {row['trial']}", row.get("epsilon"), costs[row["trial"]]) for row in document["trials"]
    ]
    whole = Composition.of(parts.values())
    if privacy["rho"] is not None:
        rho = whole.rho()
        claims.append(("rho", privacy["rho"], math.inf if rho is None else rho))
    if (attacker := privacy.get("attacker")) is not None:
        rates = [float(rate) for rate in attacker["true_positives"]]
        attack = whole.attack(rates)
        claims.append(("mu", attacker["mu"], math.inf if attack is None else attack.mu))
        for rate, share in attacker["true_positives"].items():
            claims.append((f"TPR at FPR {rate}", share, 1.0 if attack is None else attack.true_positives[float(rate)]))
    return found + [
        f"{what} {epsilon_text(claimed)} is claimed; the ledger costs {epsilon_text(cost)} ({name})"
        for what, claimed, cost in claims
        if claimed is not None and claimed < cost * (1 - _ROUNDING)
    ]


def _all(values: set[str | None]) -> object:
    return next(iter(values)) if len(values) == 1 else sorted(map(str, values))
