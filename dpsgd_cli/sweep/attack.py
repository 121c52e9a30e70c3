"""Audit of a sweep: the price of its private choice, attacked by `audit/chosen.py` with the sweep's own code."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.repeated_selection import BestOfTrials
from dpsgd_cli.audit import auditing, chosen, findings
from dpsgd_cli.audit.findings import AuditOptions
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.engine.metrics import less_is_better
from dpsgd_cli.errors import UsageError
from dpsgd_cli.results import store
from dpsgd_cli.sweep import planning, pricing, private_tuning
from dpsgd_cli.sweep.pricing import Spent
from dpsgd_cli.sweep.session import SweepSession
from dpsgd_cli.sweep.settings import RandomStopping

_QUICK, _USUAL = 3000, 20_000
_SEED = 37


@trusting()
def run(source: str, overrides: Sequence[str], out: Path | None, options: AuditOptions) -> None:
    """Audit the choice of a sweep, write the findings and print them. Raises RunError if its price is refuted."""
    with kill_is_interrupt():
        document = audit(source, overrides, options)
    directory = store.audit_place(Path("results"), document["name"]) if out is None else out / document["name"]
    auditing.say_verdict(document, findings.write(document, directory))


def audit(source: str, overrides: Sequence[str], options: AuditOptions) -> dict[str, Any]:
    """Return the document of the audit of a sweep's choice.

    Raises UsageError for a sweep whose choice has no price of its own to attack, or whose cells have none.
    """
    begun = time.perf_counter()
    session = SweepSession.open(source, overrides, Path("results"))
    select, cells = session.sweep.select, planning.planned_spending(session.every)
    if not isinstance(select, RandomStopping):
        raise UsageError(
            f"{source}: only a choice by select: {{kind: random-stopping, ...}} has a price of its own; audit the"
            " recipes of the sweep one by one"
        )
    told = pricing.statement(cells, session.sweep, cells)["choice"]
    if told["epsilon"] is None:
        raise UsageError(f"{source}: nothing is claimed of the choice, so nothing can be refuted: {told['note']}")
    about = {
        "name": session.sweep.name,
        "recipe": source,
        "hash": session.folder.stem,
        "seed": select.seed,
        "claim": {
            "epsilon": told["epsilon"],
            "delta": told["delta"],
            "adjacency": told["adjacency"],
            "accountant": f"choice, law {told['law']}",
            "bound": told["bound"],
        },
    }
    left_out = ["the trainings of the cells: audit their recipes one by one", "time and failures of the runs"]
    if "A" not in options.tiers:
        return auditing.document_of(about, ([], {}, ["the choice: its attack is of tier A", *left_out]), options, begun)
    sweeps = _QUICK if options.quick else _USUAL
    options.say(f"Tier A: {sweeps:,} sweeps on each of two neighbours")
    claim = claim_of(select, [one for one in cells if one is not None], told["epsilon"], told["delta"])
    with tempfile.TemporaryDirectory() as folder:
        found = chosen.attack(claim, _Published(select, len(session.every), Path(folder)), sweeps, options.confidence)
    return auditing.document_of(about, ([found], {}, left_out), options, begun)


def claim_of(select: RandomStopping, cells: Sequence[Spent], epsilon: float, delta: float) -> chosen.ChoiceClaim:
    """Return what is claimed of a choice among `cells`. A run is one of the cell with the least price at every epsilon.

    Every cell is drawn equally often, and runs of all tell as much: what the cheapest allows, all allow.
    """
    releases = [pricing.unscaled(one.releases) for one in cells]
    ones = [accountants.get("pld").profile(own, chosen.LEAST_DELTA) for own in dict.fromkeys(map(tuple, releases))]
    whole = BestOfTrials(select.priced).of_any(releases)[1]
    return chosen.ChoiceClaim(lambda at: min(one(at) for one in ones), whole, epsilon, delta, select.mean)


class _Published:
    """Scores that sweeps publish, by the sweep's own draw of runs and its own choice."""

    def __init__(self, select: RandomStopping, cells: int, folder: Path) -> None:
        self._select, self._cells, self._folder = select, cells, folder
        self._random = np.random.default_rng(_SEED)

    def __call__(self, mean: float, threshold: float, sweeps: int) -> np.ndarray:
        sign = -1 if less_is_better(self._select.metric) else 1
        cell = SimpleNamespace(directory="a", settings={})
        found = np.full(sweeps, -np.inf)
        for number in range(sweeps):
            select = self._select.changed(seed=int(self._random.integers(2**32)))
            scores = self._random.normal(mean, 1, sum(private_tuning.draw(select, self._cells)))
            rows: Any = [(cell, {"trial": j, select.metric: sign * x}) for j, x in enumerate(scores)]
            told = private_tuning.best_of(rows, select)
            if told["directory"] is not None:
                found[number] = scores[told["trial"]]
        return found
