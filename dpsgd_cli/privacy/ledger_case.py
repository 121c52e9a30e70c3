"""What was released, read back: `ledger.jsonl` files, alone, in a result directory, or all those of a sweep.

Not here: prices (`accountants/`), the format of a ledger (`ledger.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.privacy.cases import CHOSEN, Case
from dpsgd_cli.privacy.ledger import Entry, bounding, read_entries
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.wording import count

DEFAULT_DELTA = 1e-5


@dataclass(frozen=True)
class LedgerCase(Case):
    """Every trial of some ledgers."""

    paths: tuple[Path, ...]
    label: str
    delta: float

    @cached_property
    def entries(self) -> list[list[Entry]]:
        """Trial by trial, in order. Raises DataError for a missing, empty or damaged ledger."""
        found: list[list[Entry]] = []
        for path in self.paths:
            trials = read_entries(path)
            found.extend(trials[trial] for trial in sorted(trials))
        return found

    @property
    def subject(self) -> str:  # type: ignore[override]
        """What was found."""
        files = f"{len(self.paths)} ledgers, " if len(self.paths) > 1 else ""
        trials = count(len(self.entries), "trial")
        stated = "; the most expensive trial is stated" if len(self.entries) > 1 else ""
        return f"{self.label}: {files}{trials}, delta {self.delta:g}{stated}"

    @property
    def batching(self) -> str:  # type: ignore[override]
        """The batchings of training, joined by +."""
        entries = [entry for trial in self.entries for entry in trial]
        training = [entry for entry in entries if entry.phase == "train"] or entries
        names = {e.release.mechanism.batching for e in training if isinstance(e.release.mechanism, GaussianSum)}
        return "+".join(sorted(names)) or "full"

    def trials(self) -> list[list[Release]]:
        return [bounding(trial) for trial in self.entries]

    def spends_a_budget(self) -> bool:
        return any(entry.within is not None for trial in self.entries for entry in trial)

    def remarks(self) -> list[str]:
        return [f"{self.label}: {CHOSEN}"] if self.spends_a_budget() else []

    def by_epoch(self) -> list[list[Release]]:
        if self.spends_a_budget():
            raise UnsupportedMechanism(f"{self.label} has no curve by epoch: {CHOSEN} (see history.csv)")
        longest = max(self.entries, key=len)
        epochs: dict[int, list[Release]] = {}
        for entry in longest:
            epochs.setdefault(entry.epoch or 0, []).append(entry.release)
        return [epochs[epoch] for epoch in sorted(epochs)]


def read_ledgers(source: str, delta: float | None) -> LedgerCase | None:
    """The ledgers that `source` names: a .jsonl file, or a directory that holds some; None for anything else.

    Raises DataError for a directory without any. `delta` left out: that of the result beside a ledger, else 1e-5.
    """
    path = Path(source)
    if path.is_dir():
        paths = sorted(path.rglob("ledger.jsonl"))
        if not paths:
            raise DataError(f"{source}: holds no ledger.jsonl; give a result directory, a ledger or a recipe")
    elif path.suffix == ".jsonl":
        paths = [path]
    else:
        return None
    stated = [_stated_delta(found.parent / "result.json") for found in paths]
    known = [value for value in stated if value is not None]
    return LedgerCase(tuple(paths), path.name or source, delta or min(known, default=DEFAULT_DELTA))


def _stated_delta(path: Path) -> float | None:
    """The delta of a result's own statement; None where there is no result."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["privacy"]["delta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged result: {error!r}") from None
    return float(value) if value is not None else None
