"""What a run found: the record behind `result.json` and the tables.

Not here: files (`store.py`), text (`summary.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One finished run. `trials` and `history` are rows of the two tables, `ledger` the lines of `ledger.jsonl`.

    `theory` has a row a trial where a theorem covers the method: its bound on the excess risk, and what was measured.
    """

    name: str
    privacy: Row
    metrics: dict[str, Row]
    timing: Row
    provenance: Row
    trials: list[Row]
    history: list[Row]
    ledger: list[str]
    warnings: list[str] = field(default_factory=list)
    nonprivate_warnings: list[str] = field(default_factory=list)
    theory: list[Row] | None = None

    def document(self) -> Row:
        """The content of `result.json`."""
        theory = {} if self.theory is None else {"theory": self.theory}
        return {
            "name": self.name,
            "privacy": self.privacy,
            "metrics": self.metrics,
            **theory,
            "timing": self.timing,
            "warnings": self.warnings,
            "nonprivate_warnings": self.nonprivate_warnings,
            "provenance": self.provenance,
            "trials": self.trials,
        }


def summarise(found: Sequence[float | None]) -> Row:
    """Mean, sample standard deviation and half-width of the 95% Student interval of the mean.

    `std` and `ci95` are None for a single value; all are None when a value is missing or not finite.
    """
    n = len(found)
    values = [value for value in found if value is not None and math.isfinite(value)]
    if len(values) < n:
        return {"mean": None, "std": None, "ci95": None, "n": n}
    if n == 1:
        return {"mean": values[0], "std": None, "ci95": None, "n": 1}
    from scipy.special import stdtrit

    std = statistics.stdev(values)
    return {
        "mean": statistics.fmean(values),
        "std": std,
        "ci95": float(stdtrit(n - 1, 0.975)) * std / math.sqrt(n),
        "n": n,
    }


def summarise_columns(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Row]:
    """`summarise` of each column."""
    return {name: summarise(values) for name, values in columns.items()}
