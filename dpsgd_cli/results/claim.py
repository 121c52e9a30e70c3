"""What a result claims, against the price of its ledger: read before a page or a comparison repeats the claim."""

from __future__ import annotations

import math
from pathlib import Path

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.ledger import LedgerEntry, priced_parts, read_entries, read_seeds
from dpsgd_cli.accounting.statement import Composition
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.errors import DataError, DpsgdError
from dpsgd_cli.results import prices
from dpsgd_cli.results.result import Row
from dpsgd_cli.users.settings import PERSON

_ROUNDING = 1e-6
"""Relative difference between a claim and a price, which another version of an accountant may make."""


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
    name, delta = privacy["accountant"], privacy["delta"]
    found = []
    if privacy["bound"] != accountants.get(name).bound:
        found.append(f"the epsilon is claimed as {privacy['bound']}; {name} states {accountants.get(name).bound}")
    parts = {trial: [[prices.unscaled(r) for r in part] for part in priced_parts(own)] for trial, own in trials.items()}
    costs = {trial: max(prices.epsilon(name, part, delta) for part in own) for trial, own in parts.items()}
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
