"""The ledger: the append-only list of one trial's releases, guarded by a filter, and its file.

A ledger records mechanisms, never epsilons; the accountant is chosen afterwards. Call `spend` BEFORE the release that
it records.

A filter (`budget.py`) proves its budget, fixed in advance, and nothing less. If amounts, or the end, were chosen from
earlier releases, the sum of what was spent is itself a random output. It does not bound the privacy of the method that
led to it (that would take a valid odometer, which costs more than the sum: Rogers et al. 2016; Whitehouse et al. 2023).
So each entry of such a trial states the most that its filter ever admits (`budget_cap`, the key `within` of a line),
and `priced_releases` returns that instead. If everything was fixed beforehand, the releases are the bound.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dpsgd_cli.accounting.accountants.additive import total_mu_squared, total_rho
from dpsgd_cli.accounting.budget import Filter
from dpsgd_cli.accounting.mechanism import (
    GaussianSum,
    Mechanism,
    Release,
    ZeroConcentrated,
    from_record,
    mechanism_record,
    merge,
    to_record,
    whole_number,
)
from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.text_format import quoted, shortened
from dpsgd_cli.errors import BudgetExceeded, DataError, PrivacyError, UnsupportedMechanism

Phase = Literal["before", "train", "held-out"]

# Relative tolerance between two orders of adding up the same charges.
_ROUNDING = 1e-9
_TWO_RUNS = "the lines are not those of one run; give every ledger a file of its own"


@dataclass(frozen=True)
class LedgerEntry:
    """One line of a ledger: a release, and when it happened.

    `budget_cap`: a mechanism that bounds all entries of the same cap together, whatever was chosen on the way; None for
    a release that was fixed beforehand. `unit`: the name of the unit of privacy, all of whose rows may differ between
    neighbouring data; None for single records.
    """

    release: Release
    phase: Phase = "train"
    epoch: int | None = None
    budget_cap: Mechanism | None = None
    unit: str | None = None


def priced_releases(entries: Iterable[LedgerEntry]) -> list[Release]:
    """Return releases whose price bounds that of the trial which made `entries`, equal mechanisms merged.

    Guarantee: a release that was fixed beforehand is priced as it is. Releases that were chosen during the trial are
    bounded by the budget of the filter that admitted them (Feldman and Zrnic 2021, Theorem 4.3, in zCDP; Smith and
    Thakurta 2022 in Gaussian DP), however little of it was spent.
    """
    entries = list(entries)
    caps = dict.fromkeys(entry.budget_cap for entry in entries if entry.budget_cap is not None)
    return merge([*(e.release for e in entries if e.budget_cap is None), *map(Release, caps)])


def by_part(entries: Iterable[LedgerEntry]) -> list[list[LedgerEntry]]:
    """Return the entries of the training records, and then those of held-out records, if there are any.

    A record is in one part, so releases on different parts compose in parallel: the price of all of them is the
    greatest of the parts' prices, at every delta (proof: `evaluation/price.py`).
    """
    entries = list(entries)
    training = [entry for entry in entries if entry.phase != "held-out"]
    held_out = [entry for entry in entries if entry.phase == "held-out"]
    return [training, held_out] if held_out else [training]


def priced_parts(entries: Iterable[LedgerEntry]) -> list[list[Release]]:
    """Return `priced_releases` of each part; the largest of their prices bounds the trial."""
    return [priced_releases(part) for part in by_part(entries)]


def charged_by_epoch(entries: Iterable[LedgerEntry]) -> dict[int | None, list[Release]]:
    """Return the releases of each epoch, equal mechanisms merged; the key None holds those without an epoch."""
    found: dict[int | None, list[Release]] = {}
    for entry in entries:
        found.setdefault(entry.epoch, []).append(entry.release)
    return {epoch: merge(releases) for epoch, releases in found.items()}


@dataclass
class Ledger:
    """The releases of one trial, in order.

    `covers_before`: whether the filter counts private preprocessing. `budget_cap`: the most that the filter ever
    admits, if releases are chosen from earlier ones; else None. `unit`: that of every entry. `held_out`: the planned
    releases on held-out records, each of which may be made once; the filter does not count them.
    """

    filter: Filter | None = None
    covers_before: bool = True
    entries: list[LedgerEntry] = field(default_factory=list)
    budget_cap: Mechanism | None = None
    unit: str | None = None
    held_out: list[Release] = field(default_factory=list)

    def spend(self, release: Release, epoch: int | None = None, phase: Phase = "train") -> None:
        """Record `release`, which the caller makes next.

        Raises BudgetExceeded if the filter refuses it, and PrivacyError if its adjacency differs from that of the
        releases before it (no statement could cover both). In both cases nothing is recorded.
        """
        stated = self.entries[0].release.mechanism.adjacency if self.entries else release.mechanism.adjacency
        if release.mechanism.adjacency != stated:
            raise PrivacyError(f"a release stated for {release.mechanism.adjacency} cannot follow one for {stated}")
        if phase == "held-out":
            if release not in self.held_out:
                raise PrivacyError("a release on held-out records that was not planned, or was made before")
            self.held_out.remove(release)
            self.entries.append(LedgerEntry(release, phase, None, None, self.unit))
            return
        counted = phase == "train" or self.covers_before
        if self.filter is not None and counted:
            self.filter.admit(release)
        self.entries.append(LedgerEntry(release, phase, epoch, self.budget_cap if counted else None, self.unit))

    def close(self) -> None:
        """Charge the planned releases that the method did not make: it may have chosen to stop by what it released.

        Under `budget_cap`, a method may also have chosen to release nothing after private preprocessing that the cap
        does not count. Then an entry of the cap, used 0 times, is added.
        """
        if self.budget_cap is not None and self.entries and all(entry.budget_cap is None for entry in self.entries):
            self.entries.append(LedgerEntry(Release(self.budget_cap, 0), "train", 0, self.budget_cap, self.unit))
        last = max((entry.epoch or 0 for entry in self.entries), default=0)
        for release in self.filter.left if self.filter is not None else ():
            self.spend(release, last)

    def admits(self, releases: Sequence[Release]) -> bool:
        """Return whether `spend` would accept all of `releases`, one after the other. Counts nothing."""
        trial = copy.deepcopy(self.filter)
        try:
            for release in releases:
                if trial is not None:
                    trial.admit(release)
        except BudgetExceeded:
            return False
        return True

    @property
    def releases(self) -> list[Release]:
        """All releases, equal mechanisms merged."""
        return merge([entry.release for entry in self.entries])

    @property
    def training(self) -> list[LedgerEntry]:
        """The entries that are not of held-out records."""
        return [entry for entry in self.entries if entry.phase != "held-out"]


def to_lines(entries: Iterable[LedgerEntry], trial: int, seed: int | None) -> list[str]:
    """Return the entries of one trial's ledger as JSON lines."""
    lines = []
    for entry in entries:
        record = {"trial": trial, "seed": seed, "phase": entry.phase, "epoch": entry.epoch, **to_record(entry.release)}
        if entry.budget_cap is not None:
            record["within"] = mechanism_record(entry.budget_cap)
        if entry.unit is not None:
            record["unit"] = entry.unit
        lines.append(json.dumps(record))
    return lines


def entries_from_lines(lines: Iterable[str], source: str) -> dict[int, list[LedgerEntry]]:
    """Return the entries of each trial of a file, the inverse of `to_lines`. Raises DataError with the damaged line."""
    found: dict[int, list[LedgerEntry]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            entry = _entry(record)
            found.setdefault(whole_number("trial", record.get("trial", 0)), []).append(entry)
        except (ValueError, RecursionError, PrivacyError) as error:
            raise DataError(f"{source}:{number}: not a ledger line: {shortened(str(error), 200)}") from None
    return found


def read_seeds(path: Path) -> list[int | None] | None:
    """Return the seed of each trial of a ledger, in the order of the trial numbers; None if a line names no seed.

    Raises DataError if a seed is invalid, or if lines of one trial differ in it: they come from several runs.
    """
    found: dict[int, int | None] = {}
    for record in [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]:
        seed, trial = record.get("seed", "unsaid"), whole_number("trial", record.get("trial", 0))
        if seed == "unsaid":
            return None
        if seed is not None and not (isinstance(seed, int) and seed >= 0):
            raise DataError(f"{path}: seed is {seed!r}, but must be a whole number >= 0 or null")
        if found.setdefault(trial, seed) != seed:
            raise DataError(f"{path}: trial {trial} has several seeds: {_TWO_RUNS}")
    return [found[trial] for trial in sorted(found)]


def _entry(record: dict[str, Any]) -> LedgerEntry:
    release = from_record(record)
    phase, epoch = record.get("phase", "train"), record.get("epoch")
    if phase not in get_args(Phase):
        raise PrivacyError(f"phase is {quoted(phase)}, but must be one of {', '.join(get_args(Phase))}")
    within, unit = record.get("within"), record.get("unit")
    if unit is not None and not isinstance(unit, str):
        raise PrivacyError(f"unit is {quoted(unit)}, but must be text")
    cap = None if within is None else from_record(within, counted=False).mechanism
    stated = release.mechanism.adjacency
    if cap is not None and cap.adjacency != stated:
        raise PrivacyError(f"within is stated for {cap.adjacency}, but must be for {stated}, as its release is")
    return LedgerEntry(release, phase, None if epoch is None else whole_number("epoch", epoch), cap, unit)


def _check_order(entries: Iterable[LedgerEntry], source: str) -> None:
    """Raise DataError if the epochs of `entries` go back: the file then holds two runs, which may share noise."""
    last = {"before": -1.0, "held-out": math.inf}
    times = [last.get(entry.phase, entry.epoch or 0) for entry in entries]
    if times != sorted(times):
        raise DataError(f"{source}: its epochs go back: {_TWO_RUNS}")


def _check_caps(entries: Iterable[LedgerEntry], source: str) -> None:
    """Raise DataError if entries exceed the cap that they state: then no single filter admitted them all.

    This finds two runs in one file, as `cat` makes it, which would otherwise be stated as one.
    """
    spent: dict[Mechanism, list[LedgerEntry]] = {}
    for entry in entries:
        if entry.budget_cap is not None:
            spent.setdefault(entry.budget_cap, []).append(entry)
    for cap, within in spent.items():
        releases = [entry.release for entry in within]
        try:
            cost, most = _cost_in(cap, merge(releases)), _cost_in(cap, [Release(cap)])
        except UnsupportedMechanism as error:
            raise DataError(f"{source}: no filter admits these releases within {cap}: {error}") from None
        if cost > most * (1 + _ROUNDING):
            raise DataError(f"{source}: releases of {cost:.6g} in all say to be within {most:.6g} ({cap}): {_TWO_RUNS}")


def _cost_in(cap: Mechanism, releases: Sequence[Release]) -> float:
    """Return the cost of `releases` in the unit of the filter that enforces `cap`: mu^2, or rho."""
    if isinstance(cap, GaussianSum):
        return total_mu_squared(releases)
    if isinstance(cap, ZeroConcentrated):
        return total_rho(releases)
    raise UnsupportedMechanism("a budget is one Gaussian on full batches, or zero-concentrated")


def read_ledgers(path: Path) -> dict[int, list[Release]]:
    """Return, for each trial of a `ledger.jsonl`, the releases whose price bounds it (see `priced_releases`).

    Raises DataError for a missing, empty or damaged file.
    """
    return {trial: priced_releases(entries) for trial, entries in read_entries(path).items()}


def read_entries(path: Path) -> dict[int, list[LedgerEntry]]:
    """Return the entries of each trial of a `ledger.jsonl`, in order.

    Raises DataError for a missing, empty or damaged file, and for lines of several runs.
    """
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the ledger: {error}") from None
    trials = entries_from_lines(text.splitlines(), str(path))
    if not trials:
        raise DataError(f"{path}: the ledger is empty")
    if len({entry.unit for entries in trials.values() for entry in entries}) > 1:
        raise DataError(f"{path}: some lines are about single records, others about users: {_TWO_RUNS}")
    for trial, entries in trials.items():
        _check_order(entries, f"{path}: trial {trial}")
        _check_caps(entries, f"{path}: trial {trial}")
    return trials
