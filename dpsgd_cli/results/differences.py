"""Differences between methods: which results may be subtracted, intervals, and significance.

One result is subtracted from another only on the same test records, at equal budgets, for one adjacency. Budgets are
equal if both recipes name the same one (and release the same outside of it), otherwise if the stated epsilons agree to
1% at one delta. A result without privacy has no budget and is compared at every budget.

Trials with the same seeds (and folds) are compared in pairs, which removes what they share: initial weights, batches,
the split. Others are compared by Welch's test. In both cases, trials of one cross-validation share training rows. Their
variance is widened as in Nadeau and Bengio 2003 ("corrected resampled t-test"): by test over training records. Several
differences of one table are judged together by Holm's 1979 procedure at 5%.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.data.step_settings import PREPROCESS
from dpsgd_cli.results.evaluated import Evaluated
from dpsgd_cli.results.result import Row

LEVEL = 0.05
AGREEMENT = 0.01


@dataclass(frozen=True)
class Sample:
    """One metric of the trials of one entry. `folds` is K for cross-validation, else None."""

    values: tuple[float, ...]
    seeds: tuple[int | None, ...]
    folds: int | None = None


@dataclass(frozen=True)
class Difference:
    """Mean of a minus mean of b: half-width of its 95% interval, p-value, and the test.

    `ci95` and `p` are None for single trials; `adjusted` is p after Holm's correction.
    """

    mean: float
    ci95: float | None
    p: float | None
    kind: str
    n: int
    adjusted: float | None = None

    @property
    def verdict(self) -> str:
        """Return `significant`, `not significant`, or `unknown` for single trials."""
        if self.adjusted is None:
            return "unknown"
        return "significant" if self.adjusted < LEVEL else "not significant"


def difference(a: Sample, b: Sample) -> Difference:
    """Compare two samples, in pairs if their seeds and folds agree.

    >>> difference(Sample((0.9, 0.8, 0.85), (0, 1, 2)), Sample((0.88, 0.79, 0.82), (0, 1, 2))).kind
    'paired'
    """
    if a.seeds == b.seeds and None not in a.seeds and a.folds == b.folds:
        return _paired(a, b)
    return _welch(a, b)


def _paired(a: Sample, b: Sample) -> Difference:
    gaps = [x - y for x, y in zip(a.values, b.values, strict=True)]
    n = len(gaps)
    if n < 2:
        return Difference(statistics.fmean(gaps), None, None, "single trials", n)
    error = statistics.stdev(gaps) * math.sqrt(1 / n + _overlap(a))
    kind = "paired, corrected for shared folds" if a.folds else "paired"
    return _by_student(statistics.fmean(gaps), error, n - 1, kind, n)


def _overlap(sample: Sample) -> float:
    """Return test records over training records of a fold; 0 if trials share no training rows by design."""
    return 1 / (sample.folds - 1) if sample.folds else 0.0


def _welch(a: Sample, b: Sample) -> Difference:
    mean = statistics.fmean(a.values) - statistics.fmean(b.values)
    sizes = [len(a.values), len(b.values)]
    n = min(sizes)
    if n < 2:
        return Difference(mean, None, None, "single trials", n)
    kind = "unpaired, corrected for shared folds" if a.folds or b.folds else "unpaired"
    parts = [
        statistics.variance(one.values) * (1 / size + _overlap(one)) for one, size in zip((a, b), sizes, strict=True)
    ]
    total = sum(parts)
    if total == 0:
        return _by_student(mean, 0.0, sum(sizes) - 2, kind, n)
    freedom = total**2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    return _by_student(mean, math.sqrt(total), freedom, kind, n)


def _by_student(mean: float, error: float, freedom: float, kind: str, n: int) -> Difference:
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    p = (1.0 if mean == 0 else 0.0) if error == 0 else 2 * float(stdtr(freedom, -abs(mean) / error))
    return Difference(mean, half, p, kind, n)


def judge_together(found: Sequence[Difference]) -> list[Difference]:
    """Adjust p-values by Holm's procedure.

    The i-th smallest of m p-values (i from 0) is multiplied by m - i, and is never less than the one before.
    """
    known = sorted((d.p, i) for i, d in enumerate(found) if d.p is not None)
    judged, worst = list(found), 0.0
    for rank, (p, index) in enumerate(known):
        worst = max(worst, min(1.0, p * (len(known) - rank)))
        judged[index] = replace(found[index], adjusted=worst)
    return judged


def reasons(ours: tuple[Evaluated, Row], theirs: tuple[Evaluated, Row]) -> list[str]:
    """Return the reasons why two results are not compared; empty if they are.

    Each result is given by its test data and its `privacy`.
    """
    (tested, privacy), (base, base_privacy) = ours, theirs
    found = []
    if tested.source != base.source:
        found.append("different data")
    elif tested.records != base.records:
        found.append("different test records")
    own, other = privacy["adjacency"], base_privacy["adjacency"]
    if None in (own, other):
        return found
    own, other = adjacency_label(own, privacy.get("unit")), adjacency_label(other, base_privacy.get("unit"))
    if own != other:
        found.append(f"{own} and {other} are different guarantees")
    elif not equal_budgets(privacy, base_privacy):
        found.append("different budgets")
    return found


def equal_budgets(a: Row, b: Row) -> bool:
    """Return whether two private results were allowed to spend the same; an unspent rest does not matter."""
    if a.get("budget") and _terms(a) == _terms(b):
        return True
    if a["epsilon"] is None or b["epsilon"] is None:
        return bool(a["epsilon"] is b["epsilon"])
    return a["delta"] == b["delta"] and math.isclose(a["epsilon"], b["epsilon"], rel_tol=AGREEMENT)


def _terms(privacy: Row) -> tuple[Any, ...]:
    """Return the budget that a recipe names, what it covers, and the releases outside of it."""
    covers = privacy.get("budget_covers", "total")
    # if a method chooses its releases, `parts` is what it spent; its preprocessing is fixed all the same
    parts = privacy.get("parts") or (privacy.get("spent") or {}).get("parts", {})
    before = {label: part for label, part in parts.items() if label in PREPROCESS}
    return privacy.get("budget"), covers, before if covers == "training" else {}
