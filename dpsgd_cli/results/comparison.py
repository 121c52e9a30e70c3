"""Comparison of results: one row per entry, differences from a baseline, one epsilon column per adjacency.

`cli/compare.py` runs missing entries; `comparison_report.py` and `pictures.py` show a comparison.

One result is subtracted from another only on the same test records, at equal budgets, for one adjacency. Budgets are
equal if both recipes name the same one (and release the same outside of it), otherwise if the stated epsilons agree to
1% at one delta. A result without privacy has no budget and is compared at every budget.

Trials with the same seeds (and folds) are compared in pairs, which removes what they share: initial weights, batches,
the split. Others are compared by Welch's test. In both cases, trials of one cross-validation share training rows. Their
variance is widened as in Nadeau and Bengio 2003 ("corrected resampled t-test"): by test over training records. Several
differences of one table are judged together by Holm's 1979 procedure at 5%.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting import joint_composition
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.tradeoff import RATES
from dpsgd_cli.data.step_settings import PREPROCESS
from dpsgd_cli.engine.metrics import usual_metric
from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.results import files, prices, reading, store
from dpsgd_cli.results.evaluated import Evaluated, evaluated_on, identities_in, records_of
from dpsgd_cli.results.result import NONPRIVATE, Row

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


@dataclass(frozen=True)
class Entry:
    """One result: its method's label, the target epsilon (None: the recipe's own budget), and its document.

    `settings`: the keys by which a sweep told its cells apart.
    """

    method: str
    target: float | None
    directory: Path
    document: Row
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def privacy(self) -> Row:
        found: Row = self.document["privacy"]
        return found

    @property
    def adjacency(self) -> str:
        """The adjacency that epsilon is stated for, with the unit of privacy; `none` without privacy."""
        return adjacency_label(self.privacy["adjacency"] or "none", self.privacy.get("unit"))

    @property
    def epsilon(self) -> float | None:
        found: float | None = self.privacy["epsilon"]
        return found

    def file(self, name: str) -> Path:
        """Return the path of a file of the result. Raises DataError if it is missing or was changed."""
        return reading.checked(self.directory, self.document, name)

    @cached_property
    def recipe_text(self) -> str:
        """Text of the resolved recipe."""
        return reading.recipe_text_of(self.file("recipe.yaml"))

    @cached_property
    def _tested(self) -> tuple[Mapping[str, Any], int | None, dict[str, str]]:
        """The `data:` section, the number of folds or None, and the hash of each file that was read."""
        files = identities_in(self.document.get("provenance", {}))
        return *reading.data_and_folds(self.recipe_text), files

    @cached_property
    def evaluated(self) -> Evaluated:
        """Records that the metrics were measured on."""
        return evaluated_on(*self._tested)

    @property
    def compared(self) -> tuple[Evaluated, Row]:
        """Facts that decide if a difference from another entry is stated."""
        return self.evaluated, self.privacy

    @cached_property
    def run(self) -> joint_composition.Run:
        """Seeds, records and adjacency: the facts that decide if a joint statement with other results is possible."""
        seeds = [row["seed"] for row in self.document["trials"]]
        records = records_of(*self._tested)
        adjacency = self.privacy["adjacency"]
        return joint_composition.Run(
            self.directory.name, seeds, adjacency and adjacency_label(adjacency, self.privacy.get("unit")), records,
            self.privacy.get("start") is not None,
        )  # fmt: skip

    def sample(self, metric: str) -> Sample | None:
        """Return the metric of every trial; None if a trial has no value."""
        trials = self.document["trials"]
        values = [row.get(metric) for row in trials]
        if not values or any(value is None for value in values):
            return None
        return Sample(tuple(values), tuple(row["seed"] for row in trials), self._tested[1])


def read_entries(directory: Path) -> list[Entry]:
    """Read the result in `directory`, or all results in it (a sweep's folder, in its order), by name and settings.

    For a folder of results, only each `result.json` and its ledger are checked here. The other files are checked when
    they are read, because there may be thousands. Raises DataError if there is no result, or if one claims less than
    its ledger costs.
    """
    if store.is_complete(directory):
        document = store.read_whole(directory)
        prices.refuse_false(directory, document)
        name, settings = _cells_of_sweeps(directory.resolve().parent).get(directory.name, (document["name"], {}))
        return [Entry(name, None, directory, document, settings)]
    cells = _cells_of_sweeps(directory)
    with_results = sorted(path.parent for path in directory.glob("*/result.json") if path.parent.name[0] != ".")
    if not with_results:
        raise DataError(f"{directory}: holds no results")
    entries, places = [], list(cells)  # in the order of the sweep
    for found in sorted(with_results, key=lambda path: places.index(path.name) if path.name in cells else -1):
        document = store.read_document(found)
        reading.checked(found, document, "ledger.jsonl")
        prices.refuse_false(found, document)
        name, settings = cells.get(found.name, (found.name, {}))
        entries.append(Entry(name, None, found, document, settings))
    return entries


def _cells_of_sweeps(directory: Path) -> dict[str, tuple[str, Row]]:
    """Map the directory name of each cell of the sweeps in `directory` to a label with its settings, and to these."""
    found = {}
    for index in directory.glob(f"*{store.INDEX}"):
        for cell in files.read_json(index)["cells"]:
            settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in cell["settings"].items())
            name = cell["directory"].rpartition("-")[0]
            found[cell["directory"]] = (f"{name} ({settings})" if settings else name), cell["settings"]
    return found


@dataclass(frozen=True)
class Comparison:
    """Entries, the metric that compares them, and the label of the baseline method."""

    entries: Sequence[Entry]
    metric: str
    baseline: str

    @cached_property
    def adjacencies(self) -> list[str]:
        return sorted({entry.adjacency for entry in self.entries if entry.adjacency != "none"})

    @cached_property
    def data(self) -> list[str]:
        """Names of the data sets, one for each distinct content."""
        return [name for _, name in dict.fromkeys((e.evaluated.source, e.evaluated.name) for e in self.entries)]

    @cached_property
    def why_apart(self) -> str | None:
        """The reason why no joint guarantee is given for all these trials; None where their ledgers compose."""
        return joint_composition.why_apart(list({entry.directory: entry.run for entry in self.entries}.values()))

    @cached_property
    def folder(self) -> str:
        """Folder name, a function of the entries, the metric and the baseline."""
        told = [f"{entry.directory.name} {entry.method} {entry.target}" for entry in self.entries]
        digest = hashlib.sha256("\n".join([*told, self.metric, self.baseline]).encode()).hexdigest()[:8]
        names = list(dict.fromkeys(entry.document["name"] for entry in self.entries))
        words = "-".join([*names[:3], *(["others"] if len(names) > 3 else [])])
        return f"comparison-{words[:80]}-{digest}"

    @cached_property
    def rows(self) -> list[Row]:
        """One row per entry. Each adjacency has its own epsilon column."""
        places, found = [index for index, _ in self._pairs], [found for _, found in self._pairs]
        judged = dict(zip(places, judge_together(found), strict=True))
        return [self._row(index, entry, judged.get(index)) for index, entry in enumerate(self.entries)]

    def _row(self, index: int, entry: Entry, against: Difference | None) -> Row:
        metric = entry.document["metrics"].get(self.metric) or dict.fromkeys(("mean", "std", "ci95", "n"))
        found = entry.evaluated
        row: Row = {"method": entry.method, "target_epsilon": entry.target}
        row |= {"data": found.name, "test_records": found.records}
        for adjacency in self.adjacencies:
            row[f"epsilon ({adjacency})"] = entry.epsilon if entry.adjacency == adjacency else None
        row |= {"delta": entry.privacy["delta"], "adjacency": entry.adjacency}
        row |= {key: entry.privacy.get(key) for key in ("batching", "accountant", "bound")}
        attacker = entry.privacy.get("attacker") or {"mu": None, "regret": None, "true_positives": {}}
        row |= {"mu": attacker["mu"], "regret": attacker["regret"]}
        row |= {f"true_positives_at_{rate:g}": attacker["true_positives"].get(f"{rate:g}") for rate in RATES}
        row |= {self.metric: metric["mean"], "ci95": metric["ci95"], "n": metric["n"]}
        told: Row = {"difference": None, "difference_ci95": None, "p_holm": None, "verdict": self._no_verdict(entry)}
        if against is not None:
            told = {"difference": against.mean, "difference_ci95": against.ci95, "p_holm": against.adjusted,
                    "verdict": f"{against.verdict} ({against.kind})"}  # fmt: skip
        return {**row, **told, "directory": str(entry.directory)}

    def _no_verdict(self, entry: Entry) -> str:
        if entry.method == self.baseline:
            return "baseline"
        base = self._base_of(entry)
        if base is None and entry.adjacency == "none":
            return "without privacy; --baseline compares all with it"
        if base is None:
            return "no baseline at this budget"
        why = reasons(entry.compared, base.compared) or ["not every trial stayed finite"]
        return f"not compared: {', '.join(why)}"

    @cached_property
    def _pairs(self) -> list[tuple[int, Difference]]:
        found = []
        for index, entry in enumerate(self.entries):
            base = self._base_of(entry)
            if base is None or entry.method == self.baseline or reasons(entry.compared, base.compared):
                continue
            ours, theirs = entry.sample(self.metric), base.sample(self.metric)
            if ours is not None and theirs is not None:
                found.append((index, difference(ours, theirs)))
        return found

    @property
    def differences(self) -> int:
        """Number of differences that are judged together."""
        return len(self._pairs)

    def _base_of(self, entry: Entry) -> Entry | None:
        """Return the baseline's entry for the target of `entry`; None if there is none.

        A baseline without a target (without privacy, or at its recipe's own budget) is used for every target. An entry
        without a target is compared with the baseline's only entry.
        """
        only = next(iter(self._bases.values())) if entry.target is None and len(self._bases) == 1 else None
        return self._bases.get(entry.target, self._bases.get(None, only))

    @cached_property
    def _bases(self) -> dict[float | None, Entry]:
        return {entry.target: entry for entry in reversed(self.entries) if entry.method == self.baseline}


def compare(entries: Sequence[Entry], metric: str | None, baseline: str | None) -> Comparison:
    """Build a comparison of the entries. Raises UsageError for a metric or a baseline that none of them has."""
    known = list(dict.fromkeys(name for entry in entries for name in entry.document["metrics"]))
    chosen = metric or usual_metric(known) or next((name for name in known if not name.startswith(NONPRIVATE)), "")
    if not known:
        raise UsageError(
            "no result has a metric, so there is nothing to compare: train with test or validation records"
        )
    if chosen not in known:
        what = (
            "the metrics of these results are not private, so none is chosen" if metric is None else "no result has it"
        )
        raise UsageError(f"--metric{'' if metric is None else f' {metric}'}: {what}; there are {', '.join(known)}")
    methods = list(dict.fromkeys(entry.method for entry in entries))
    # a label may end with solved settings in parentheses, which --baseline may omit
    base = next((m for m in methods if baseline in (None, m, m.partition(" (")[0])), None)
    if base is None:
        raise UsageError(f"--baseline {baseline}: not compared here; there are {', '.join(methods)}")
    return Comparison(entries, chosen, base)


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
    """Return the budget that a recipe names, what it covers, and what is outside of it."""
    covers = privacy.get("budget_covers", "total")
    # if a method chooses its releases, `parts` is what it spent; its preprocessing is fixed all the same
    parts = privacy.get("parts") or (privacy.get("spent") or {}).get("parts", {})
    before = {label: part for label, part in parts.items() if label in PREPROCESS}
    return privacy.get("budget"), covers, before if covers == "training" else {}, privacy.get("start")
