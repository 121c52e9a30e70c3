"""Ledgers as cases: `ledger.jsonl` files by themselves, in a result directory, or of a whole sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.account.cases import DEFAULT_DELTA, Case, Epochs, noise_facts, noise_words
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.joint_composition import Run, why_apart
from dpsgd_cli.accounting.ledger import LedgerEntry, by_part, priced_parts, read_entries, read_seeds
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.results.guarantee import ADAPTIVE, EXPERIMENT, unit_words
from dpsgd_cli.results.reading import RESULT, data_and_folds, hides_start, recipe_text_of
from dpsgd_cli.results.result import Row
from dpsgd_cli.results.store import is_complete, is_hidden, missing_cells, read_whole

LEDGER = "ledger.jsonl"
ALONE = "nothing vouches for this ledger: there is no result.json beside it that says how many lines it had, and which"
STARTED = "one of these results starts from an earlier one, and only the sum of their epsilons is proved; give it alone"
GONE = "the sweep lists this cell, which has neither a result nor a record that it failed"


def read_ledgers(sources: Sequence[str], delta: float | None) -> Case | None:
    """Return the case of all trials of `sources`: .jsonl files and directories with ledgers; None for anything else.

    `delta` None means the smallest delta of the results, or 1e-5. A ledger that several sources name counts once.
    Raises DataError for a directory without ledgers, for a damaged ledger, and if a ledger's result was changed after
    it was written, since a missing part would be missing from the price.
    """
    places = [Path(source) for source in sources]
    if not all(place.is_dir() or place.suffix == ".jsonl" for place in places):
        return None
    # before the ledgers: a cell that finishes meanwhile is missing, and never neither there nor missing
    gone = [cell for place in places if place.is_dir() for cell in missing_cells(place)]
    paths = list({path.resolve(): path for place in places for path in _ledgers_in(place)}.values())
    documents = {path: _document(path) for path in paths}
    alone = [path for path, document in documents.items() if document is None]
    vouched = [document["privacy"] for document in documents.values() if document is not None]
    # records of private choices, whose other runs were removed (`sweep/private_tuning.py`)
    choices = [
        path for place in places if place.is_dir() for path in sorted(place.rglob("*.result.json")) if _chooses(path)
    ]
    label = " and ".join(dict.fromkeys(place.name or str(place) for place in places))
    starts = [privacy.get("start") for privacy in vouched]
    own = [privacy if start is None else start["own"] for privacy, start in zip(vouched, starts, strict=True)]
    delta = delta or min((float(one["delta"]) for one in own), default=DEFAULT_DELTA)
    of_several = STARTED if any(starts) and len(paths) > 1 else None
    by_ledger = [[trials[trial] for trial in sorted(trials)] for trials in map(read_entries, paths)]
    trials = [trial for own in by_ledger for trial in own]
    entries = [entry for trial in trials for entry in trial]
    units = {entry.unit for entry in entries}
    unit = units.pop() if len(units) == 1 else None
    training = [entry for entry in entries if entry.phase == "train"] or entries
    batchings = {e.release.mechanism.batching for e in training if isinstance(e.release.mechanism, GaussianSum)}
    is_budget = any(entry.budget_cap is not None for entry in entries)
    seeded = any(seed is not None for path in paths for seed in read_seeds(path) or ())
    files = f"{len(paths)} ledgers, " if len(paths) > 1 else ""
    noise = noise_words(noise_facts([entry.release for entry in trial if entry.phase == "train"] for trial in trials))

    def apart(together: int) -> str | None:
        del together  # the ledgers fix the number of trials
        if choices:
            return f"{choices[0]} records a private choice among runs that left no ledger; its price is its own"
        firsts = [own[0][0] for own in by_ledger]
        adjacencies = [adjacency_label(first.release.mechanism.adjacency, first.unit) for first in firsts]
        return why_apart(list(map(_run, paths, documents.values(), adjacencies)), len(trials))

    def by_epoch() -> list[Epochs]:
        if is_budget:
            raise UnsupportedMechanism(f"{label} has no curve by epoch: {ADAPTIVE} (see history.csv)")
        return [_by_epoch(trial) for trial in trials]

    return Case(
        label=label,
        about=f"{label}: {files}{count(len(trials), 'trial')}{noise}, delta {delta:g}{unit_words(unit)}",
        batching="+".join(sorted(batchings)) or "full",
        delta=delta,
        made=lambda: [priced_parts(trial) for trial in trials],
        epochs=by_epoch,
        apart=apart,
        unit=unit,
        own_trials=len(trials),
        recorded=True,
        refused=of_several or _shared_noise(paths, by_ledger, alone),
        start=starts[0] if len(paths) == 1 and starts else None,
        told=(
            *([f"{label}: {ADAPTIVE}"] if is_budget else []),
            *([f"{label}: {EXPERIMENT}"] if seeded else []),
            *(f"{path}: {ALONE}" for path in alone),
        ),
        uncovered=tuple(dict.fromkeys(step for privacy in vouched for step in privacy.get("uncovered_steps", ()))),
        missing=tuple(f"{path}: {GONE}" for path in gone),
        is_budget=is_budget,
    )


def _shared_noise(
    paths: Sequence[Path], by_ledger: Sequence[Sequence[Sequence[LedgerEntry]]], alone: Sequence[Path]
) -> str | None:
    """Return why a ledger without a result may record two runs of one seed as one trial; None if none does."""
    for path, trials in zip(paths, by_ledger, strict=True) if alone else ():
        seeds = read_seeds(path) if path in alone else None
        for seed, trial in zip(seeds or (), trials, strict=seeds is not None):
            lines = [(entry.phase, entry.epoch, entry.release.mechanism) for entry in trial]
            if seed is not None and len(set(lines)) < len(lines):
                return (
                    f"{path} has lines of seed {seed} twice, and no result.json beside it: they may be two runs of"
                    " one seed, which share noise; give the result's folder"
                )
    return None


def _by_epoch(trial: Sequence[LedgerEntry]) -> list[list[Release]]:
    epochs: dict[int, list[Release]] = {}
    for entry in by_part(trial)[0]:
        epochs.setdefault(entry.epoch or 0, []).append(entry.release)
    return [epochs[epoch] for epoch in sorted(epochs)]


def _ledgers_in(folder: Path) -> list[Path]:
    """Return a ledger path for every result and every ledger below `folder`, except hidden (unfinished) ones.

    A file stands for itself.
    """
    if not folder.is_dir():
        return [folder]
    found = {place.parent for name in (LEDGER, RESULT) for place in folder.rglob(name)}
    paths = sorted(place / LEDGER for place in found if not is_hidden(place, folder))
    if not paths:
        raise DataError(f"{folder}: holds no ledger.jsonl; give a result directory, a ledger or a recipe")
    return paths


def _chooses(path: Path) -> bool:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["privacy"]
        # with a seed all runs are kept, each with its ledger
        return told["choice"]["kind"] == "random-stopping" and told["all_trials"] is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _document(ledger: Path) -> Row | None:
    """Return the `result.json` of a ledger's result; None for a ledger without a result.

    Raises DataError for a damaged result, and for one trained without privacy.
    """
    if ledger.name != LEDGER or not is_complete(ledger.parent):
        return None
    document = read_whole(ledger.parent)
    if document["privacy"]["accountant"] is None:
        raise DataError(f"{ledger.parent}: was trained without privacy, so there is nothing to account for")
    if hides_start(ledger.parent, document):
        raise DataError(f"{ledger.parent}: does not say what it started from; `dpsgd check` has all verdicts")
    return document


def _run(ledger: Path, document: Row | None, adjacency: str | None) -> Run:
    """Return the run of a ledger, with its tested records from the result in the same folder."""
    name, seeds = ledger.parent.name or str(ledger.parent), read_seeds(ledger)
    if document is None:
        return Run(name, seeds, adjacency, None)
    from dpsgd_cli.results.evaluated import identities_in, records_of  # recipes; most ledgers have none

    data, folds = data_and_folds(recipe_text_of(ledger.parent / "recipe.yaml"))
    records = records_of(data, folds, identities_in(document["provenance"]))
    return Run(name, seeds, adjacency, records, document["privacy"].get("start") is not None)
