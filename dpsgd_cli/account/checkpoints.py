"""Checkpoints as cases: an unfinished run, priced like the result of its last checkpoint.

The file format is in `training/checkpoint.py`; `dpsgd train --finish` makes that result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dpsgd_cli.account.ledgers import LedgerCase
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.joint_composition import Run, why_apart
from dpsgd_cli.accounting.ledger import LedgerEntry, entries_from_lines
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import DataError
from dpsgd_cli.results.evaluated import records_of
from dpsgd_cli.results.guarantee import ADAPTIVE, EXPERIMENT
from dpsgd_cli.results.reading import data_in, folds_in
from dpsgd_cli.training.checkpoint import Charges, read_released

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointCase(LedgerCase):
    """All trials of a checkpoint's recipes; `released` is the content of the file."""

    released: Charges | None = None

    @property
    def told(self) -> Charges:
        assert self.released is not None
        return self.released

    @cached_property
    def by_ledger(self) -> list[list[list[LedgerEntry]]]:
        """Ledger entries of each recipe's trials, in order; the charges of `Charges.rest` come last."""
        path = self.paths[0]
        trials = []
        for trial, lines in enumerate(self.told.ledgers):
            found = entries_from_lines([*lines, *self.told.rest[trial]], f"{path}: trial {trial}")
            if list(found) != [trial]:
                raise DataError(f"{path}: trial {trial} has no ledger, or that of another trial; train again")
            trials.append(found[trial])
        return _by_recipe(trials, self.told.trials)

    @cached_property
    def seeds(self) -> list[int | None]:
        """Seed of each trial; None for noise from the operating system."""
        if not self.by_ledger:  # raises DataError for damaged lines
            return []
        both = zip(self.told.ledgers, self.told.rest, strict=True)
        return [json.loads([*made, *rest][0]).get("seed") for made, rest in both]

    @cached_property
    def _apart(self) -> str | None:
        runs = []
        seeds = _by_recipe(self.seeds, self.told.trials)
        for text, trials, own in zip(self.told.recipes, self.by_ledger, seeds, strict=True):
            records = records_of(data_in(text), folds_in(text), self.told.data)
            mechanism, unit = trials[0][0].release.mechanism, trials[0][0].unit
            runs.append(Run(self.label, own, adjacency_label(mechanism.adjacency, unit), records))
        return why_apart(runs, len(self.entries))

    def own_remarks(self) -> list[str]:
        told, whole = self.told, self.told.watched or self.spends_a_budget()
        what = "its whole plan, because the end may depend on what was released" if whole else "these epochs"
        remarks = [
            f"{self.label}: stands after {told.done} of at most {count(told.epochs, 'epoch')}; the statement is of"
            f" {what}. Epochs that a killed process trained after it were never released"
        ]
        remarks += [f"{self.label}: {ADAPTIVE}"] if self.spends_a_budget() else []
        return remarks + ([f"{self.label}: {EXPERIMENT}"] if any(seed is not None for seed in self.seeds) else [])

    def uncovered(self) -> list[str]:
        return list(self.told.uncovered_steps)


def _by_recipe(trials: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Split a list with one item per trial into one list per recipe; `sizes` are the recipes' numbers of trials."""
    found, begin = [], 0
    for size in sizes:
        found.append(list(trials[begin : begin + size]))
        begin += size
    return found


def read_checkpoint(path: Path, delta: float | None) -> CheckpointCase:
    """Return the case of a checkpoint; `delta` None means the smallest delta of its recipes.

    Raises DataError for a missing file or training without privacy, RunError for a damaged file.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such checkpoint; give a result directory, a ledger, a checkpoint or a recipe")
    released = read_released(path)
    stated = [value for value in released.deltas if value is not None]
    if not stated:
        raise DataError(f"{path}: was trained without privacy, so there is nothing to account for")
    return CheckpointCase((path,), path.name, delta or min(stated), released=released)
