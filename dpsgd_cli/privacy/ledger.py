"""The append-only list of what one trial released, and the filter that refuses before a budget is passed.

A ledger records mechanisms, never epsilons; the accountant is chosen afterwards. `spend` is called BEFORE
the release that it records. Three filters exist, each with its theorem:

- `RhoFilter`: stops at a total of zCDP. Sound when every release is chosen after seeing all earlier ones
  (fully adaptive composition of Renyi divergence bounds: Feldman and Zrnic 2021, Theorem 4.3).
- `GaussianFilter`: stops at an exact (epsilon, delta). Every release is mu-Gaussian-DP for a mu of its own; the sum
  of mu^2 is capped at the one whose Gaussian trade-off meets the budget; fully adaptive (Smith and Thakurta 2022,
  "Fully adaptive composition for Gaussian differential privacy").
- `PlannedFilter`: allows exactly the releases that were priced beforehand, in order. Needed for accountants
  without a fully adaptive filter (pld, rdp with a free order); sound because nothing is adaptive.

A filter keeps a running total (`ExactSum`), so that a release costs the same whether it is the first or the
ten-thousandth, and the total is rounded once, not once a release.

Not here: any price (`accountants/`), what to release (`plan.py`, `methods/`).
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dpsgd_cli.errors import BudgetExceeded, DataError, PrivacyError
from dpsgd_cli.privacy.exact_sum import ExactSum
from dpsgd_cli.privacy.mechanism import Release, from_record, merge, to_record

Phase = Literal["before", "train"]


@dataclass(frozen=True)
class Entry:
    """One line of a ledger: a release, and when it happened."""

    release: Release
    phase: Phase = "train"
    epoch: int | None = None


class Filter(ABC):
    """Decides whether a release may still happen. It counts what it admitted, so each ledger has its own."""

    @abstractmethod
    def admit(self, release: Release) -> None:
        """Count `release`. Raises BudgetExceeded, and counts nothing, when it would pass the budget."""


class RhoFilter(Filter):
    """Total zCDP at most `rho`."""

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._spent = ExactSum()

    def admit(self, release: Release) -> None:
        from dpsgd_cli.privacy.accountants.zcdp import total_rho

        cost = total_rho([release])
        if self._spent.passes(self.rho, cost):
            total = self._spent.total(cost)
            raise BudgetExceeded(f"this release would bring rho to {total:.6g}, over the budget {self.rho:.6g}")
        self._spent.add(cost)


class GaussianFilter(Filter):
    """Exact composition of unsampled Gaussians: the sum of mu^2 (1 / z^2 each) stays at most `mu_squared`."""

    def __init__(self, mu_squared: float) -> None:
        self.mu_squared = mu_squared
        self._spent = ExactSum()

    def admit(self, release: Release) -> None:
        cost = mu_squared_of(release)
        if self._spent.passes(self.mu_squared, cost):
            total = self._spent.total(cost)
            raise BudgetExceeded(f"this release would bring mu^2 to {total:.6g}, over the budget {self.mu_squared:.6g}")
        self._spent.add(cost)


def mu_squared_of(release: Release) -> float:
    """What a release adds to the Gaussian-DP parameter mu^2; UnsupportedMechanism for sampled batches."""
    from dpsgd_cli.privacy.accountants.gaussian import Gaussian, mechanism_mu

    Gaussian().check([release])
    return release.count * mechanism_mu(release.mechanism) ** 2 if release.count else 0.0


class PlannedFilter(Filter):
    """Exactly these releases, in this order; `planned` was priced as a whole before training."""

    def __init__(self, planned: Sequence[Release]) -> None:
        self.planned = planned
        self._done = 0

    def admit(self, release: Release) -> None:
        if self._done >= len(self.planned):
            raise BudgetExceeded(f"all {self._done} releases that the plan priced were made; there is none left")
        if release != self.planned[self._done]:
            raise BudgetExceeded(f"release {self._done + 1} is {release}, which is not what the plan priced")
        self._done += 1


@dataclass
class Ledger:
    """What one trial released, in order. `covers_before`: whether the filter counts private preprocessing."""

    filter: Filter | None = None
    covers_before: bool = True
    entries: list[Entry] = field(default_factory=list)

    def spend(self, release: Release, epoch: int | None = None, phase: Phase = "train") -> None:
        """Record `release`, which the caller makes next.

        Raises BudgetExceeded when the filter refuses it, and PrivacyError when its adjacency is not that of the
        releases before it (there would be nothing to state about both); then nothing is recorded.
        """
        stated = self.entries[0].release.mechanism.adjacency if self.entries else release.mechanism.adjacency
        if release.mechanism.adjacency != stated:
            raise PrivacyError(f"a release stated for {release.mechanism.adjacency} cannot follow one for {stated}")
        if self.filter is not None and (phase == "train" or self.covers_before):
            self.filter.admit(release)
        self.entries.append(Entry(release, phase, epoch))

    def admits(self, releases: Sequence[Release]) -> bool:
        """Whether `spend` would accept all of `releases`, one after the other. Counts nothing."""
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
        """Everything released, equal mechanisms merged."""
        return merge([entry.release for entry in self.entries])


def to_lines(entries: Iterable[Entry], trial: int, seed: int | None) -> list[str]:
    """The entries of one trial's ledger as JSON lines."""
    return [
        json.dumps({"trial": trial, "seed": seed, "phase": e.phase, "epoch": e.epoch, **to_record(e.release)})
        for e in entries
    ]


def entries_from_lines(lines: Iterable[str], source: str) -> dict[int, list[Entry]]:
    """Inverse of `to_lines` for all trials of a file; DataError names the damaged line."""
    found: dict[int, list[Entry]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found.setdefault(_trial(record), []).append(_entry(record))
        except (ValueError, TypeError, AttributeError, PrivacyError) as error:
            raise DataError(f"{source}:{number}: not a ledger line: {error}") from None
    return found


def _trial(record: dict[str, Any]) -> int:
    return int(record.get("trial", 0))


def _entry(record: dict[str, Any]) -> Entry:
    phase, epoch = record.get("phase", "train"), record.get("epoch")
    if phase not in get_args(Phase):
        raise PrivacyError(f"phase is {phase!r}, but must be one of {', '.join(get_args(Phase))}")
    if epoch is not None and (not isinstance(epoch, int) or epoch < 0):
        raise PrivacyError(f"epoch is {epoch!r}, but must be a whole number >= 0 or null")
    return Entry(from_record(record), phase, epoch)


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
