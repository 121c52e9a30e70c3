"""Which cell a sweep publishes, when its file says how that is chosen.

A choice by the exponential mechanism is a release: it is made once and kept in the folder. Not here: what it costs
(`pricing.py`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from dpsgd_cli.metrics import less_is_better
from dpsgd_cli.results import store
from dpsgd_cli.sweep import folder
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.schema import ExponentialChoice, RandomStopping, Sweep

CHOICE = ".choice.json"


def choose(
    sweep: Sweep, place: folder.Folder, cells: Sequence[Cell], records: Callable[[Cell], int]
) -> dict[str, Any] | None:
    """The chosen trial and its settings; None without `select:` or while cells are missing.

    `records` gives the (public) number of records that a cell trains on.
    """
    select = sweep.select
    if select is None or not all(store.is_complete(place.path / cell.directory) for cell in cells):
        return None
    kept = place.file(CHOICE)
    if kept.exists():
        return store.read_json(kept)
    trials = [(cell, row) for cell in cells for row in store.read_document(place.path / cell.directory)["trials"]]
    if isinstance(select, RandomStopping):
        chosen = _best(trials, select)
    else:
        chosen = _exponential(trials, select, records)
    if chosen is None:
        return {"directory": None, "note": "no trial chosen: none was drawn, or none stayed finite"}
    cell, row = chosen
    told = {"directory": cell.directory, "trial": row["trial"], "settings": cell.settings}
    if isinstance(select, ExponentialChoice):
        store.write_whole(kept, store.to_json(told))
    return told


def _best(trials: Sequence[tuple[Cell, Any]], select: RandomStopping) -> tuple[Cell, Any] | None:
    sign = -1 if less_is_better(select.metric) else 1
    finite = [(cell, row) for cell, row in trials if row.get(select.metric) is not None]
    return max(finite, key=lambda one: sign * one[1][select.metric], default=None)


def _exponential(
    trials: Sequence[tuple[Cell, Any]], select: ExponentialChoice, records: Callable[[Cell], int]
) -> tuple[Cell, Any] | None:
    """P(trial) proportional to exp(epsilon / 2 * count), by Gumbel noise: epsilon-DP for counts of sensitivity 1.

    A trial without a count (it diverged) counts 0, so that whether it may be chosen depends on no record.
    """
    source: random.Random = random.SystemRandom() if select.seed is None else random.Random(select.seed)
    scores = []
    for cell, row in trials:
        count = round((row.get("nonprivate_train_accuracy") or 0.0) * records(cell))
        gumbel = -math.log(-math.log(source.random() or 5e-324))
        scores.append(select.epsilon / 2 * count + gumbel)
    return max(zip(scores, range(len(trials)), trials, strict=True))[2] if trials else None
