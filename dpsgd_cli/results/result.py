"""Result of a run: a public part, a non-private part, and the tables that hold both.

Code that builds a public field (`privacy`, `warnings`, `metrics`, `trials.csv`, ...) gets a `Released`. From it, no
training row can be reached, and no value that was computed from one without noise. Public fields are therefore
post-processing of the releases in the ledgers. Every field of the other record, `Unreleased`, is marked by `marked`
before it is written.

`assemble.py` builds rows and statements, `store.py` writes files, and `summary.py` prints text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd_cli.accounting.ledger import Ledger
    from dpsgd_cli.accounting.plan import Plan
    from dpsgd_cli.recipe.loading import SettledRecipe

Row = dict[str, Any]
NONPRIVATE = "nonprivate_"


def mark_nonprivate(row: Row) -> Row:
    """Return the row with the mark for non-private values before every name."""
    return {f"{NONPRIVATE}{name}": value for name, value in row.items()}


def public(value: Any) -> Any:
    """Return the public part of a result's document, or of a part of it: everything that is not marked."""
    if isinstance(value, dict):
        return {name: public(inner) for name, inner in value.items() if not name.startswith(NONPRIVATE)}
    return [public(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Stopped:
    """A training that ended before its plan: after `done` of at most `epochs` epochs.

    `watched`: metrics by epoch were visible before the end, so they may have influenced the moment of stopping.
    """

    done: int
    epochs: int
    watched: bool


@dataclass(frozen=True)
class Released:
    """Public values: functions of the recipe, of the releases in the ledgers, and of declared public data.

    R is the number of trials, T of epochs.

    - `metrics`: of the published weights on rows that are declared public, (R,) each; `epochs`: T such dictionaries.
    - `finite`: whether each trial's published weights are finite (R).
    - `data_sha256`: hashes of files that anybody can fetch.
    - `declarations`, `uncovered_steps`, `warnings`: those of the data set.
    - `discovered`: bounds and categories that were released, a line for each column, by trial (R); or empty.
    - `stopped`: None if the whole plan was trained.
    """

    loaded: SettledRecipe
    plan: Plan | None
    ledgers: Sequence[Ledger]
    reproducible: bool
    declarations: Sequence[str]
    uncovered_steps: Sequence[str]
    warnings: Sequence[str]
    data_sha256: dict[str, str]
    device: str
    epochs: Sequence[dict[str, list[float]]]
    metrics: dict[str, list[float]]
    finite: Sequence[bool]
    timing: Row
    findings: Sequence[Row] | None = None
    stopped: Stopped | None = None
    discovered: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Unreleased:
    """Non-private values: functions of training rows without noise. Their names are not marked yet.

    R is the number of trials, T of epochs.

    - `epochs`: T dictionaries of sums over an epoch's batches, (R,) each.
    - `metrics`: of the published weights on training rows, (R,) each.
    - `timing`: a step's time depends on the realised batch size and on the values of rows.
    """

    epochs: Sequence[dict[str, list[float]]]
    metrics: dict[str, list[float]]
    data_sha256: dict[str, str]
    timing: Row
    findings: Sequence[Row] | None = None


def together(public: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Join public rows with non-private rows, which are marked."""
    return [{**row, **mark_nonprivate(other)} for row, other in zip(public, others, strict=True)]


@dataclass(frozen=True)
class Result:
    """A finished run. `trials` and `history` are rows of the two tables, `ledger` the lines of `ledger.jsonl`.

    `diverged`: trials whose published weights or test metrics show divergence.
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
    diverged: list[int] = field(default_factory=list)

    def document(self) -> Row:
        """Return the content of `result.json`."""
        return {
            "name": self.name,
            "privacy": self.privacy,
            "metrics": self.metrics,
            "timing": self.timing,
            "diverged": self.diverged,
            "warnings": self.warnings,
            "nonprivate_warnings": self.nonprivate_warnings,
            "provenance": self.provenance,
            "trials": self.trials,
        }


def summarise(found: Sequence[float | None]) -> Row:
    """Return the mean, the sample standard deviation and the half-width of the 95% Student interval of the mean.

    `std` and `ci95` are None for a single value; all are None if a value is missing or not finite.
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
    """Return `summarise` of each column."""
    return {name: summarise(values) for name, values in columns.items()}
