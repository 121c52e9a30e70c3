"""What was released, read back: `ledger.jsonl` files, alone, in a result directory, or all those of a sweep.

Not here: prices (`accountants/`), the format of a ledger (`ledger.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.privacy.cases import CHOSEN, Case
from dpsgd_cli.privacy.ledger import Entry, bounding, read_entries, read_seeds
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
    def by_ledger(self) -> list[list[list[Entry]]]:
        """The trials of each ledger, in order. Raises DataError for a missing, empty or damaged one."""
        found = map(read_entries, self.paths)
        return [[trials[trial] for trial in sorted(trials)] for trials in found]

    @property
    def entries(self) -> list[list[Entry]]:
        """Trial by trial, in order."""
        return [trial for trials in self.by_ledger for trial in trials]

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

    @cached_property
    def _apart(self) -> str | None:
        from dpsgd_cli.privacy import together

        runs = [
            together.finished(path.parent, read_seeds(path), trials[0][0].release.mechanism.adjacency)
            for path, trials in zip(self.paths, self.by_ledger, strict=True)
        ]
        return together.why_apart(runs, len(self.entries))

    def why_apart(self, trials: int) -> str | None:
        del trials  # a ledger has those that it has
        return self._apart

    def spends_a_budget(self) -> bool:
        return any(entry.within is not None for trial in self.entries for entry in trial)

    def remarks(self) -> list[str]:
        return [f"{self.label}: {CHOSEN}"] if self.spends_a_budget() else []

    def by_epoch(self) -> list[list[Release]]:
        return max(self.curves(), key=lambda epochs: sum(map(len, epochs)))

    def curves(self) -> list[list[list[Release]]]:
        if self.spends_a_budget():
            raise UnsupportedMechanism(f"{self.label} has no curve by epoch: {CHOSEN} (see history.csv)")
        return [_by_epoch(trial) for trial in self.entries]


def _by_epoch(trial: Sequence[Entry]) -> list[list[Release]]:
    epochs: dict[int, list[Release]] = {}
    for entry in trial:
        epochs.setdefault(entry.epoch or 0, []).append(entry.release)
    return [epochs[epoch] for epoch in sorted(epochs)]


def read_ledgers(source: str, delta: float | None) -> LedgerCase | None:
    """The ledgers that `source` names: a .jsonl file, or a directory that holds some; None for anything else.

    Raises DataError for a directory without any. `delta` left out: that of the result beside a ledger, else 1e-5.
    """
    path = Path(source)
    if path.is_dir():
        paths = sorted(found for found in path.rglob("ledger.jsonl") if not _is_hidden(found, path))
        if not paths:
            raise DataError(f"{source}: holds no ledger.jsonl; give a result directory, a ledger or a recipe")
    elif path.suffix == ".jsonl":
        paths = [path]
    else:
        return None
    stated = [_stated_delta(found.parent / "result.json") for found in paths]
    known = [value for value in stated if value is not None]
    return LedgerCase(tuple(paths), path.name or source, delta or min(known, default=DEFAULT_DELTA))


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether it lies in a hidden folder: results in the making, and runs that a sweep does not publish."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _stated_delta(path: Path) -> float | None:
    """The delta of a result's own statement; None where there is no result."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["privacy"]["delta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged result: {error!r}") from None
    return float(value) if value is not None else None
