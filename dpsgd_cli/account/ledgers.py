"""Ledgers as cases: `ledger.jsonl` files by themselves, in a result directory, or of a whole sweep; and checkpoints.

A checkpoint, of an unfinished run, is priced like the result that `dpsgd train --finish` makes of it
(`training/checkpoint.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dpsgd_cli.account.cases import Case
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.joint_composition import Run, why_apart
from dpsgd_cli.accounting.ledger import LedgerEntry, by_part, entries_from_lines, priced_parts, read_entries, read_seeds
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.results.guarantee import ADAPTIVE, EXPERIMENT, unit_words
from dpsgd_cli.results.reading import RESULT, data_in, folds_in, recipe_text_of
from dpsgd_cli.results.store import is_complete, is_hidden, missing_cells, read_whole
from dpsgd_cli.training.checkpoint import Charges, read_released

T = TypeVar("T")

DEFAULT_DELTA = 1e-5
LEDGER = "ledger.jsonl"
ALONE = "nothing vouches for this ledger: there is no result.json beside it that says how many lines it had, and which"
GONE = "the sweep lists this cell, which has neither a result nor a record that it failed"


@dataclass(frozen=True)
class LedgerCase(Case):
    """All trials of some ledgers.

    - `alone`: ledgers without a result in their folder.
    - `gone`: results that a sweep lists and that are missing.
    - `choices`: records of private choices whose other runs were removed and only the best one published
      (`sweep/private_tuning.py`).
    """

    paths: tuple[Path, ...]
    label: str
    delta: float
    alone: tuple[Path, ...] = ()
    choices: tuple[Path, ...] = ()
    gone: tuple[Path, ...] = ()
    together: int | None = None

    recorded = True

    def joined(self, others: Sequence[Case]) -> LedgerCase:
        """Return one case with the ledgers of several sources, each file once, at their smallest delta."""
        cases = [self, *(case for case in others if isinstance(case, LedgerCase))]
        if len(cases) <= len(others):
            super().joined(others)

        def every(name: str) -> tuple[Path, ...]:
            return tuple({path.resolve(): path for case in cases for path in getattr(case, name)}.values())

        label = " and ".join(dict.fromkeys(case.label for case in cases))
        delta = min(case.delta for case in cases)
        return LedgerCase(every("paths"), label, delta, every("alone"), every("choices"), every("gone"))

    def own_trials(self) -> int:
        return len(self.entries)

    @cached_property
    def by_ledger(self) -> list[list[list[LedgerEntry]]]:
        """Entries of each ledger's trials, in order. Raises DataError for a missing, empty or damaged ledger."""
        found = map(read_entries, self.paths)
        return [[trials[trial] for trial in sorted(trials)] for trials in found]

    @property
    def entries(self) -> list[list[LedgerEntry]]:
        """Entries of all trials, in order."""
        return [trial for trials in self.by_ledger for trial in trials]

    @property
    def described(self) -> str:  # type: ignore[override]
        """Description of the ledgers and their trials."""
        files = f"{len(self.paths)} ledgers, " if len(self.paths) > 1 else ""
        trials = count(len(self.entries), "trial")
        stated = "; the most expensive trial is stated" if len(self.entries) > 1 else ""
        return f"{self.label}: {files}{trials}, delta {self.delta:g}{unit_words(self.unit)}{stated}"

    @property
    def unit(self) -> str | None:
        """Unit of privacy whose rows are protected together; None for single records, or if ledgers differ."""
        found = {entry.unit for trial in self.entries for entry in trial}
        return found.pop() if len(found) == 1 else None

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Batchings of training, joined by +."""
        entries = [entry for trial in self.entries for entry in trial]
        training = [entry for entry in entries if entry.phase == "train"] or entries
        names = {e.release.mechanism.batching for e in training if isinstance(e.release.mechanism, GaussianSum)}
        return "+".join(sorted(names)) or "full"

    def each_trial(self) -> list[list[list[Release]]]:
        return [priced_parts(trial) for trial in self.entries]

    @cached_property
    def _apart(self) -> str | None:
        if self.choices:
            return f"{self.choices[0]} records a private choice among runs that left no ledger; its price is its own"
        runs = [
            _run(
                path.parent,
                read_seeds(path),
                adjacency_label(trials[0][0].release.mechanism.adjacency, trials[0][0].unit),
            )
            for path, trials in zip(self.paths, self.by_ledger, strict=True)
        ]
        return why_apart(runs, len(self.entries))

    def no_statement(self) -> str | None:
        """Return why no accountant can state a guarantee, even for one trial; None if one may.

        A ledger without a result may record two runs with one seed as one trial.
        """
        for path, trials in zip(self.paths, self.by_ledger, strict=True) if self.alone else ():
            seeds = read_seeds(path) if path in self.alone else None
            for seed, trial in zip(seeds or (), trials, strict=seeds is not None):
                lines = [(entry.phase, entry.epoch, entry.release.mechanism) for entry in trial]
                if seed is not None and len(set(lines)) < len(lines):
                    return (
                        f"{path} has lines of seed {seed} twice, and no result.json beside it: they may be two runs of"
                        " one seed, which share noise; give the result's folder"
                    )
        return super().no_statement()

    def why_apart(self, trials: int) -> str | None:
        del trials  # the ledgers fix the number of trials
        return self._apart

    def has_held_out(self) -> bool:
        return any(entry.phase == "held-out" for trial in self.entries for entry in trial)

    def spends_a_budget(self) -> bool:
        return any(entry.budget_cap is not None for trial in self.entries for entry in trial)

    def missing(self) -> list[str]:
        return [f"{path}: {GONE}" for path in self.gone]

    def own_remarks(self) -> list[str]:
        told = [f"{self.label}: {ADAPTIVE}"] if self.spends_a_budget() else []
        seeded = any(seed is not None for path in self.paths for seed in read_seeds(path) or ())
        told += [f"{self.label}: {EXPERIMENT}"] if seeded else []
        return told + [f"{path}: {ALONE}" for path in self.alone] + self.missing()

    def uncovered(self) -> list[str]:
        stated = [read_whole(path.parent)["privacy"] for path in self.paths if path not in self.alone]
        return list(dict.fromkeys(step for privacy in stated for step in privacy.get("uncovered_steps", ())))

    def each_curve(self) -> list[list[list[Release]]]:
        if self.spends_a_budget():
            raise UnsupportedMechanism(f"{self.label} has no curve by epoch: {ADAPTIVE} (see history.csv)")
        return [_by_epoch(trial) for trial in self.entries]


def _by_epoch(trial: Sequence[LedgerEntry]) -> list[list[Release]]:
    epochs: dict[int, list[Release]] = {}
    for entry in by_part(trial)[0]:
        epochs.setdefault(entry.epoch or 0, []).append(entry.release)
    return [epochs[epoch] for epoch in sorted(epochs)]


def read_ledgers(source: str, delta: float | None) -> LedgerCase | None:
    """Return the ledgers of `source`, a .jsonl file or a directory with ledgers; None for anything else.

    `delta` None means the smallest delta of the results, or 1e-5. Raises DataError for a directory without ledgers, and
    if a ledger's result was changed after it was written, since a missing part would be missing from the price.
    """
    path = Path(source)
    if path.is_dir():
        paths = _ledgers_in(path)
        if not paths:
            raise DataError(f"{source}: holds no ledger.jsonl; give a result directory, a ledger or a recipe")
    elif path.suffix == ".jsonl":
        paths = [path]
    else:
        return None
    stated = [_stated_delta(found) for found in paths]
    alone = tuple(found for found, value in zip(paths, stated, strict=True) if value is None)
    known = [value for value in stated if value is not None]
    # the results of random stopping
    choices = tuple(filter(_chooses, sorted(path.rglob("*.result.json")))) if path.is_dir() else ()
    gone = tuple(missing_cells(path)) if path.is_dir() else ()
    delta = delta or min(known, default=DEFAULT_DELTA)
    return LedgerCase(tuple(paths), path.name or source, delta, alone, choices, gone)


def _ledgers_in(folder: Path) -> list[Path]:
    """Return a ledger path for every result and every ledger below `folder`, except hidden (unfinished) ones."""
    found = {place.parent for name in (LEDGER, RESULT) for place in folder.rglob(name)}
    return sorted(place / LEDGER for place in found if not is_hidden(place, folder))


def _chooses(path: Path) -> bool:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["privacy"]
        # with a seed all runs are kept, each with its ledger
        return told["choice"]["kind"] == "random-stopping" and told["all_trials"] is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _stated_delta(ledger: Path) -> float | None:
    """Return the delta that a ledger's result states; None for a ledger without a result.

    Raises DataError for a result trained without privacy.
    """
    if ledger.name != LEDGER or not is_complete(ledger.parent):
        return None
    privacy = read_whole(ledger.parent)["privacy"]
    if privacy["accountant"] is None:
        raise DataError(f"{ledger.parent}: was trained without privacy, so there is nothing to account for")
    return float(privacy["delta"])


def _run(directory: Path, seeds: Sequence[int | None] | None, adjacency: str | None) -> Run:
    """Return the run of a ledger, with its tested records from the result in the same folder.

    Raises DataError for a damaged result.
    """
    name = directory.name or str(directory)
    if not is_complete(directory):
        return Run(name, seeds, adjacency, None)
    from dpsgd_cli.results.evaluated import identities_in, records_of  # recipes; most ledgers have none

    provenance = read_whole(directory)["provenance"]
    text = recipe_text_of(directory / "recipe.yaml")
    return Run(name, seeds, adjacency, records_of(data_in(text), folds_in(text), identities_in(provenance)))


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
        from dpsgd_cli.results.evaluated import records_of

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
