"""The append-only list of what one trial released, and the filter that refuses before a budget is passed.

A ledger records mechanisms, never epsilons; the accountant is chosen afterwards. `spend` is called BEFORE
the release that it records. Three filters exist, each with its theorem:

- `RhoFilter`: stops at a total of zCDP. Sound when every release is chosen after seeing all earlier ones
  (fully adaptive composition of Renyi divergence bounds: Feldman and Zrnic 2021, Theorem 4.3).
- `GaussianFilter`: stops at an exact (epsilon, delta) for full and shuffled Gaussian releases. The sum of
  1 / z^2 is capped at the mu^2 whose Gaussian trade-off meets the budget; fully adaptive (Smith and
  Thakurta 2022, "Fully adaptive composition for Gaussian differential privacy").
- `PlannedFilter`: allows exactly the releases that were priced beforehand, in order. Needed for accountants
  without a fully adaptive filter (pld, rdp with a free order); sound because nothing is adaptive.

Not here: any price (`accountants/`), what to release (`plan.py`, `methods/`).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dpsgd_cli.errors import BudgetExceeded, DataError, PrivacyError
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release, from_record, merge, to_record

Phase = Literal["before", "train"]


@dataclass(frozen=True)
class Entry:
    """One line of a ledger: a release, and when it happened."""

    release: Release
    phase: Phase = "train"
    epoch: int | None = None


class Filter(ABC):
    """Decides whether a release may still happen."""

    @abstractmethod
    def check(self, spent: Sequence[Release], extra: Release) -> None:
        """Raise BudgetExceeded when `extra` on top of `spent` would pass the budget."""


@dataclass(frozen=True)
class RhoFilter(Filter):
    """Total zCDP at most `rho`."""

    rho: float

    def check(self, spent: Sequence[Release], extra: Release) -> None:
        from dpsgd_cli.privacy.accountants.zcdp import total_rho

        total = total_rho([*spent, extra])
        if total > self.rho:
            raise BudgetExceeded(f"this release would bring rho to {total:.6g}, over the budget {self.rho:.6g}")


@dataclass(frozen=True)
class GaussianFilter(Filter):
    """Exact composition of unsampled Gaussians: the sum of 1 / z^2 stays at most `mu_squared`."""

    mu_squared: float

    def check(self, spent: Sequence[Release], extra: Release) -> None:
        total = math.fsum(r.count / _unsampled(r.mechanism).noise_multiplier ** 2 for r in [*spent, extra])
        if total > self.mu_squared:
            raise BudgetExceeded(f"this release would bring mu^2 to {total:.6g}, over the budget {self.mu_squared:.6g}")


def _unsampled(mechanism: Mechanism) -> GaussianSum:
    if not isinstance(mechanism, GaussianSum) or mechanism.batching not in ("full", "shuffle"):
        raise PrivacyError(f"the exact Gaussian filter covers full and shuffled Gaussian sums only, not {mechanism}")
    return mechanism


@dataclass(frozen=True)
class PlannedFilter(Filter):
    """Exactly these releases, in this order; `planned` was priced as a whole before training."""

    planned: tuple[Release, ...]

    def check(self, spent: Sequence[Release], extra: Release) -> None:
        done = len(spent)
        if done >= len(self.planned) or extra != self.planned[done]:
            raise BudgetExceeded(f"release {done + 1} is {extra}, which is not what the plan priced")


@dataclass
class Ledger:
    """What one trial released, in order. `covers_before`: whether the filter counts private preprocessing."""

    filter: Filter | None = None
    covers_before: bool = True
    entries: list[Entry] = field(default_factory=list)
    _counted: list[Release] = field(default_factory=list)

    def spend(self, release: Release, epoch: int | None = None, phase: Phase = "train") -> None:
        """Record `release`, which the caller makes next.

        Raises BudgetExceeded, and records nothing, when the filter refuses it.
        """
        if phase == "train" or self.covers_before:
            if self.filter is not None:
                self.filter.check(self._counted, release)
            self._counted.append(release)
        self.entries.append(Entry(release, phase, epoch))

    @property
    def releases(self) -> list[Release]:
        """Everything released, equal mechanisms merged."""
        return merge([entry.release for entry in self.entries])


def to_lines(ledger: Ledger, trial: int, seed: int | None) -> list[str]:
    """The ledger as JSON lines."""
    return [
        json.dumps({"trial": trial, "seed": seed, "phase": e.phase, "epoch": e.epoch, **to_record(e.release)})
        for e in ledger.entries
    ]


def entries_from_lines(lines: Iterable[str], source: str) -> dict[int, list[Entry]]:
    """Inverse of `to_lines` for all trials of a file; DataError names the damaged line."""
    found: dict[int, list[Entry]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            entry = Entry(from_record(record), record.get("phase", "train"), record.get("epoch"))
            found.setdefault(int(record.get("trial", 0)), []).append(entry)
        except (ValueError, TypeError, AttributeError, PrivacyError) as error:
            raise DataError(f"{source}:{number}: not a ledger line: {error}") from None
    return found


def read_ledgers(path: Path) -> dict[int, list[Release]]:
    """Releases of each trial of a `ledger.jsonl`, in order, equal mechanisms merged.

    Raises DataError for a missing, empty or damaged file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the ledger: {error}") from None
    trials = entries_from_lines(text.splitlines(), str(path))
    if not trials:
        raise DataError(f"{path}: the ledger is empty")
    return {trial: merge([e.release for e in entries]) for trial, entries in trials.items()}
