"""What a run leaves: what anybody may see of it, what nobody may be shown as if it were public, and the tables of both.

Whatever builds a public field (`privacy`, `warnings`, `metrics`, `trials.csv`, ...) is given a `Released`, which leads
to no training row and to nothing that was computed from one without noise; so what it says is post-processing of what
the ledgers were charged for. Everything of the other record, `Unreleased`, passes `marked` on its way to a file.

Not here: rows and statements made of them (`training/assemble.py`), files (`store.py`), text (`summary.py`).
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
    from dpsgd_cli.recipe.loading import LoadedRecipe

Row = dict[str, Any]
MARK = "nonprivate_"


def marked(row: Row) -> Row:
    """The same under names that say what it is."""
    return {f"{MARK}{name}": value for name, value in row.items()}


def public(value: Any) -> Any:
    """What a result says (a document, or a part of it) without everything that is marked."""
    if isinstance(value, dict):
        return {name: public(inner) for name, inner in value.items() if not name.startswith(MARK)}
    return [public(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Stopped:
    """A training that ended before its plan: after `done` of at most `epochs` epochs.

    `watched`: metrics by epoch could be seen before the end, so the moment may have been chosen by them.
    """

    done: int
    epochs: int
    watched: bool


@dataclass(frozen=True)
class Released:
    """Functions of the recipe, of releases that the ledgers hold, and of what is declared public. R trials, T epochs.

    `metrics` are those of the published weights on rows that are declared public (R each), `epochs` the same epoch by
    epoch, T of them. `finite`: whether each trial's published weights are finite (R). `data_sha256` is of files that
    anybody can fetch. `declarations`, `uncovered_steps` and `warnings` are the data set's.
    `stopped` is None where the whole plan was trained.
    """

    loaded: LoadedRecipe
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


@dataclass(frozen=True)
class Unreleased:
    """Functions of training rows without noise; names carry no mark yet. R trials, T epochs.

    `epochs` has sums over each epoch's batches (R each, T of them), `metrics` those of the published weights on
    training rows. `timing` is here because realised batch sizes and the rows' values decide how long a step takes.
    """

    epochs: Sequence[dict[str, list[float]]]
    metrics: dict[str, list[float]]
    data_sha256: dict[str, str]
    timing: Row
    findings: Sequence[Row] | None = None


def together(public: Sequence[Row], others: Sequence[Row]) -> list[Row]:
    """Rows of both kinds side by side, those of the second marked."""
    return [{**row, **marked(other)} for row, other in zip(public, others, strict=True)]


@dataclass(frozen=True)
class Result:
    """One finished run. `trials` and `history` are rows of the two tables, `ledger` the lines of `ledger.jsonl`.

    `diverged` are trials whose published weights or test metrics show it.
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
        """The content of `result.json`."""
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
