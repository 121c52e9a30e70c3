"""Result of a run: a public part, a non-private part, and the tables that hold both.

Code that builds a public field (`privacy`, `warnings`, `metrics`, `trials.csv`, ...) gets a `Released`. From it, no
training row can be reached, and no value that was computed from one without noise. Public fields are therefore
post-processing of the releases in the ledgers. Every field of the other record, `Unreleased`, is marked by `marked`
before it is written.

Warnings about the course of a training are of the same two kinds: public ones use published weights and metrics of test
records, which are declared public; the others use training rows. Warnings about the guarantee are in
`accounting/statement.py`.

`training/assemble.py` builds rows and statements, `store.py` writes files, and `summary.py` prints text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dpsgd_cli.common.text_format import count, metric_text
from dpsgd_cli.engine.metrics import METRICS, in_words, less_is_better

if TYPE_CHECKING:
    from dpsgd_cli.accounting.ledger import Ledger
    from dpsgd_cli.accounting.plan import Plan
    from dpsgd_cli.evaluation.estimates import Measured
    from dpsgd_cli.recipe.loading import SettledRecipe

Row = dict[str, Any]
NONPRIVATE = "nonprivate_"
RISE = 3.0
"""Multiple of a test loss's least value over epochs above which a training has diverged.

This applies only if the model is also no better than the majority-class (mean) baseline.
"""
WORSE = 2.0
"""A final log loss (RMSE of targets) above this multiple of the baseline's means divergence, whatever the accuracy is.

The baseline always answers each class's share (the mean target), so its loss is the cost of using no feature. A weak
model at a small epsilon ends near it: within a few standard errors, which are far below the baseline itself on any test
set of some dozens of records. Twice is out of reach of that, and is what too long steps or too much noise lead to.
"""
NEARLY_ALL = 0.95
"""Share of clipped gradients from which a warning is given."""

_TRY = "a larger budget, more records, fewer columns, or narrower public bounds"
_TRY_BY_METRIC = {
    "accuracy": "; if one class is rare, look at average precision and recall",
    "mae": "; or data.target_transform: log, or model.loss: quantile (kind: convex), which predicts medians",
}
"""Advice for a model that is no better than the baseline."""

Columns = dict[str, list[float]]


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
    """A training that ended before its plan: after `done` of at most `epochs` epochs."""

    done: int
    epochs: int


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
    - `start`: the statement of the earlier result that the trials started from, which is added to theirs.
    - `measured`: what was released of the held-out records, by trial, if they are private (`data.evaluation`).
    """

    loaded: SettledRecipe
    plan: Plan | None
    ledgers: Sequence[Ledger]
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
    measured: Sequence[Measured] = ()
    start: Row | None = None


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
class ResultContent:
    """A finished run. `trials` and `history` are rows of the two tables, `ledger` the lines of `ledger.jsonl`.

    `diverged`: trials whose published weights or test metrics show divergence. `recipe` is the text of the resolved
    recipe, `model` the content of `model.safetensors` (`engine/bundle.py`).
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
    recipe: str = ""
    model: bytes | None = None
    evaluation: list[Row] = field(default_factory=list)

    def document(self) -> Row:
        """Return the content of `result.json`."""
        names = ["name", "privacy", "metrics", "timing", "diverged", "warnings", "nonprivate_warnings", "provenance"]
        return {name: getattr(self, name) for name in (*names, "trials", *(["evaluation"] if self.evaluation else []))}


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


def baseline_of(metrics: Row, name: str) -> Row | None:
    """Return the summary of the baseline's metric, to stand beside the test metric `name`; None if it is not known."""
    found: Row | None = metrics.get(name.replace("test_", "constant_", 1)) if name.startswith("test_") else None
    return None if found is None or found["mean"] is None else found


def summarise_columns(columns: Mapping[str, Sequence[float | None]]) -> dict[str, Row]:
    """Return `summarise` of each column."""
    return {name: summarise(values) for name, values in columns.items()}


def diverged(released: Released) -> list[int]:
    """Return the trials that diverged.

    These are trials with weights or metrics that are not finite, with a test loss that ran away, or with a final loss
    far above the baseline's.
    """
    return [trial for trial in range(len(released.finite)) if _why_diverged(released, trial) is not None]


def warnings_of_training(released: Released, advice: str) -> list[str]:
    """Return warnings that follow from published weights and metrics of public records. `advice` is for divergence."""
    bad, told = diverged(released), []
    if bad:
        several = f"{len(bad)} of {len(released.finite)} trials diverged (trial {', '.join(map(str, bad))})"
        who = several if len(released.finite) > 1 else "the training diverged"
        reasons = dict.fromkeys(filter(None, (_why_diverged(released, trial) for trial in bad)))
        told.append(f"{who}: {' or '.join(reasons)}; {advice}")
    return told + (_no_gain(released.measured[0]) if released.measured else _no_better(released.metrics))


def warnings_of_rows(unreleased: Unreleased, finite: Sequence[bool], bound: bool, advice: str) -> list[str]:
    """Return warnings that reveal something about the training rows (non-private).

    `bound`: whether the clipping leaves gradients as they are within a bound that the recipe states. `advice` is for
    losses that are not finite.
    """
    told, bad = [], int(sum(sum(sums["nonfinite"]) for sums in unreleased.epochs))
    if bad:
        told.append(f"not finite and replaced by zero: {count(bad, 'per-example gradient')}")
    lost = [
        str(trial)
        for trial, well in enumerate(finite)
        if well and not all(math.isfinite(values[trial]) for values in unreleased.metrics.values())
    ]
    if lost:
        told.append(f"losses on training rows are not finite (trial {', '.join(lost)}); {advice}")
    clipped, seen = (sum(sum(sums[name]) for sums in unreleased.epochs) for name in ("clipped", "examples"))
    if bound and seen and clipped >= NEARLY_ALL * seen:
        told.append(
            f"{clipped / seen:.0%} of the gradients were clipped; if that is not intended, raise privacy.clipping.norm"
            + " and lower method.learning_rate by the same factor" * ("learning_rate" in advice)
        )
    return told


def _why_diverged(released: Released, trial: int) -> str | None:
    """Return the reason why a trial counts as diverged; None for a trial that does not."""
    own = {name: values[trial] for name, values in released.metrics.items()}
    losses = [epoch["test_loss"][trial] for epoch in released.epochs if "test_loss" in epoch]
    alone = {name: [value] for name, value in own.items()}
    if losses and losses[-1] > RISE * min(losses) > 0 and _no_better(alone):
        return f"the test loss rose to more than {RISE:g} times its least"
    for name in ("log_loss", "rmse"):
        ours, constant = own.get(f"test_{name}"), own.get(f"constant_{name}")
        if ours is not None and constant is not None and ours > WORSE * constant > 0:
            return f"the {in_words(f'test_{name}')} is more than {WORSE:g} times that of the baseline"
    known = all(math.isfinite(value) for name, value in own.items() if not name.startswith("constant_"))
    return None if released.finite[trial] and known else "weights or losses are not finite, so there is no metric"


def _no_gain(measured: Measured) -> list[str]:
    """Return a warning if a private measurement does not show that the model is better than the best constant."""
    gain = measured.gain
    if gain is None or gain.low > 0:
        return []
    name, best, advice = "accuracy", "majority-class", "a larger budget, more records, or fewer columns"
    if measured.kind == "numbers":
        name, best = "rmse", "mean"
    elif (auc := measured.metrics.get("auc")) is not None and auc.low > 0.5:
        advice = "data.costs, to name the rarer class more often: the model does order records (AUC above .5)"
    constant = measured.constants[name].value
    beside = "too noisy to say" if constant is None else metric_text(constant)
    by = f"{name if name == 'accuracy' else 'R2'}: {metric_text(gain.low)} to {metric_text(gain.high)}"
    how = "worse than" if gain.high < 0 else "not shown to be better than"
    return [f"{how} the {best} baseline ({name} {beside}; gain in {by}); try {advice}"]


def _no_better(metrics: Columns) -> list[str]:
    """Return a warning if the main metric's mean over all trials is no better than the baseline."""
    name = next((name for name in METRICS if {f"test_{name}", f"constant_{name}"} <= metrics.keys()), None)
    if name is None:
        return []
    ours, constant = (statistics.fmean(metrics[f"{place}_{name}"]) for place in ("test", "constant"))
    better = ours < constant if less_is_better(f"test_{name}") else ours > constant
    if better or not math.isfinite(ours):
        return []
    what = {"mae": "median", "perplexity": "most-frequent-token"}.get(name, "majority-class")
    return [
        f"no better than the {what} baseline: {in_words(f'test_{name}')} {metric_text(ours)}, baseline"
        f" {metric_text(constant)}; try {_TRY}{_TRY_BY_METRIC.get(name, '')}"
    ]
