"""Warnings about the course of a training.

Public warnings use only published weights and metrics of test records, which are declared public. Warnings that use
training rows are kept under another name. Warnings about the guarantee itself are in `accounting/statement.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dpsgd_cli.common.rounding import metric_text
from dpsgd_cli.common.text_format import count
from dpsgd_cli.engine.metrics import METRICS, in_words, less_is_better
from dpsgd_cli.results.result import Released, Unreleased

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

Columns = dict[str, list[float]]


def diverged(released: Released) -> list[int]:
    """Return the trials that diverged.

    These are trials with weights or metrics that are not finite, with a test loss that ran away, or with a final loss
    far above the baseline's.
    """
    own = {name: values for name, values in released.metrics.items() if not name.startswith("constant_")}
    lost = [
        trial
        for trial, finite in enumerate(released.finite)
        if not finite or not all(math.isfinite(values[trial]) for values in own.values())
    ]
    others = (trial for trial in range(len(released.finite)) if _ran_away(released, trial) or _worse(released, trial))
    return sorted({*lost, *others})


def warnings_of_training(released: Released) -> list[str]:
    """Return warnings that follow from published weights and metrics of public records."""
    bad, told = diverged(released), []
    if bad:
        several = f"{len(bad)} of {len(released.finite)} trials diverged (trial {', '.join(map(str, bad))})"
        who = several if len(released.finite) > 1 else "the training diverged"
        reasons = dict.fromkeys(_reason(released, trial) for trial in bad)
        told.append(f"{who}: {' or '.join(reasons)}; lower method.learning_rate")
    return told + _no_better(released.metrics)


def warnings_of_rows(unreleased: Unreleased, finite: Sequence[bool], bound: bool) -> list[str]:
    """Return warnings that reveal something about the training rows (non-private).

    `bound`: whether the clipping leaves gradients as they are within a bound that the recipe states.
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
        told.append(f"losses on training rows are not finite (trial {', '.join(lost)}); lower method.learning_rate")
    clipped, seen = (sum(sum(sums[name]) for sums in unreleased.epochs) for name in ("clipped", "examples"))
    if bound and seen and clipped >= NEARLY_ALL * seen:
        told.append(
            f"{clipped / seen:.0%} of the gradients were clipped; if that is not intended, raise privacy.clipping.norm"
            " and lower method.learning_rate by the same factor"
        )
    return told


def _reason(released: Released, trial: int) -> str:
    """Return the reason why a trial counts as diverged."""
    if _ran_away(released, trial):
        return f"the test loss rose to more than {RISE:g} times its least"
    name = _worse(released, trial)
    if name is not None:
        return f"the {in_words(f'test_{name}')} is more than {WORSE:g} times that of the baseline"
    return "weights or losses are not finite, so there is no metric"


def _worse(released: Released, trial: int) -> str | None:
    """Return the loss by which a trial ends far above the baseline; None if there is none."""
    for name in ("log_loss", "rmse"):
        ours, constant = (released.metrics.get(f"{place}_{name}") for place in ("test", "constant"))
        if ours is not None and constant is not None and ours[trial] > WORSE * constant[trial] > 0:
            return name
    return None


def _ran_away(released: Released, trial: int) -> bool:
    losses = [epoch["test_loss"][trial] for epoch in released.epochs if "test_loss" in epoch]
    own = {name: [values[trial]] for name, values in released.metrics.items()}
    return bool(losses) and losses[-1] > RISE * min(losses) > 0 and bool(_no_better(own))


def _no_better(metrics: Columns) -> list[str]:
    """Return a warning if the main metric's mean over all trials is no better than the baseline."""
    name = next((name for name in METRICS if {f"test_{name}", f"constant_{name}"} <= metrics.keys()), None)
    if name is None:
        return []
    ours, constant = (statistics.fmean(metrics[f"{place}_{name}"]) for place in ("test", "constant"))
    better = ours < constant if less_is_better(f"test_{name}") else ours > constant
    if better or not math.isfinite(ours):
        return []
    what = "majority-class" if name == "accuracy" else "mean"
    return [
        f"no better than the {what} baseline: {in_words(f'test_{name}')} {metric_text(ours)}, baseline"
        f" {metric_text(constant)}"
    ]
