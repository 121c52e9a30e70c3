"""Results side by side: one row an entry, differences against a baseline, never two adjacencies in one column.

Not here: running what is missing (`commands/compare.py`), pictures (`pictures.py`), the page (`page.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.results import store
from dpsgd_cli.results.differences import Difference, Sample, difference, judge_together
from dpsgd_cli.results.result import Row

_FOLDS = re.compile(r"^folds: (\d+)$", re.MULTILINE)
METRICS = ("test_accuracy", "test_mae", "test_loss")
WORDS = {"test_accuracy": "test accuracy", "test_loss": "test loss", "test_mae": "mean absolute test error"}


@dataclass(frozen=True)
class Entry:
    """One result: the method's label, the budget it was matched to (None: as it is), and what it found."""

    method: str
    target: float | None
    directory: Path
    document: Row

    @property
    def privacy(self) -> Row:
        found: Row = self.document["privacy"]
        return found

    @property
    def adjacency(self) -> str:
        """The adjacency that epsilon is stated for; `none` without privacy."""
        return str(self.privacy["adjacency"] or "none")

    @property
    def epsilon(self) -> float | None:
        found: float | None = self.privacy["epsilon"]
        return found

    @cached_property
    def folds(self) -> int | None:
        """K of a cross-validation: the resolved recipe's top-level key, found without parsing thousands of them."""
        try:
            found = _FOLDS.search((self.directory / "recipe.yaml").read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{self.directory}: its recipe.yaml cannot be read: {error.strerror}") from None
        return int(found[1]) if found else None

    def sample(self, metric: str) -> Sample | None:
        """The metric of every trial; None when a trial has none."""
        trials = self.document["trials"]
        values = [row.get(metric) for row in trials]
        if not values or any(value is None for value in values):
            return None
        return Sample(tuple(values), tuple(row["seed"] for row in trials), self.folds)


def read_entries(directory: Path) -> list[Entry]:
    """The result in `directory`, or all results in it (a sweep's folder), labelled by name and settings."""
    if store.is_complete(directory):
        document = store.read_document(directory)
        return [Entry(document["name"], None, directory, document)]
    labels = _labels_of_sweeps(directory)
    with_results = sorted(path.parent for path in directory.glob("*/result.json") if path.parent.name[0] != ".")
    if not with_results:
        raise DataError(f"{directory}: holds no results")
    entries = []
    for found in with_results:
        document = store.read_document(found)
        entries.append(Entry(labels.get(found.name, found.name), None, found, document))
    return entries


def _labels_of_sweeps(directory: Path) -> dict[str, str]:
    """Result directory -> what tells its cell from the others."""
    labels = {}
    for index in directory.glob("*.sweep.json"):
        for cell in json.loads(index.read_text(encoding="utf-8"))["cells"]:
            settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in cell["settings"].items())
            name = cell["directory"].rpartition("-")[0]
            labels[cell["directory"]] = f"{name} ({settings})" if settings else name
    return labels


@dataclass(frozen=True)
class Comparison:
    """Entries and what they are compared in."""

    entries: Sequence[Entry]
    metric: str
    baseline: str

    @cached_property
    def adjacencies(self) -> list[str]:
        return sorted({entry.adjacency for entry in self.entries if entry.adjacency != "none"})

    @cached_property
    def rows(self) -> list[Row]:
        """A row an entry. Each adjacency has an epsilon column of its own."""
        judged = dict(zip(self._compared, judge_together(self._found), strict=True))
        return [self._row(index, entry, judged.get(index)) for index, entry in enumerate(self.entries)]

    def _row(self, index: int, entry: Entry, against: Difference | None) -> Row:
        metric = entry.document["metrics"].get(self.metric) or dict.fromkeys(("mean", "std", "ci95", "n"))
        row: Row = {"method": entry.method, "target_epsilon": entry.target}
        for adjacency in self.adjacencies:
            row[f"epsilon ({adjacency})"] = entry.epsilon if entry.adjacency == adjacency else None
        row |= {"delta": entry.privacy["delta"], "adjacency": entry.adjacency}
        row |= {key: entry.privacy.get(key) for key in ("batching", "accountant", "bound")}
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
        if base is None:
            return "no baseline at this budget"
        if base.adjacency != entry.adjacency and "none" not in (base.adjacency, entry.adjacency):
            return f"not compared: {entry.adjacency} and {base.adjacency} are different guarantees"
        return "not compared: not every trial stayed finite"

    @cached_property
    def _pairs(self) -> list[tuple[int, Difference]]:
        found = []
        for index, entry in enumerate(self.entries):
            base = self._base_of(entry)
            if base is None or base is entry or entry.method == self.baseline:
                continue
            if base.adjacency != entry.adjacency and "none" not in (base.adjacency, entry.adjacency):
                continue
            ours, theirs = entry.sample(self.metric), base.sample(self.metric)
            if ours is not None and theirs is not None:
                found.append((index, difference(ours, theirs)))
        return found

    @property
    def _compared(self) -> list[int]:
        return [index for index, _ in self._pairs]

    @property
    def _found(self) -> list[Difference]:
        return [difference for _, difference in self._pairs]

    def _base_of(self, entry: Entry) -> Entry | None:
        """The baseline's entry at the same target; a baseline without privacy, or as it is, serves every target."""
        return self._bases.get(entry.target, self._bases.get(None))

    @cached_property
    def _bases(self) -> dict[float | None, Entry]:
        return {entry.target: entry for entry in reversed(self.entries) if entry.method == self.baseline}


def compare(entries: Sequence[Entry], metric: str | None, baseline: str | None) -> Comparison:
    """Put entries side by side. UsageError for a metric or a baseline that none of them has."""
    known = list(dict.fromkeys(name for entry in entries for name in entry.document["metrics"]))
    chosen = metric or next((name for name in METRICS if name in known), known[0] if known else "")
    if chosen not in known:
        raise UsageError(f"--metric {metric}: no result has it; there are {', '.join(known)}")
    methods = list(dict.fromkeys(entry.method for entry in entries))
    # a label may go on with what was solved for, which nobody has to type
    base = next((m for m in methods if baseline in (None, m, m.partition(" (")[0])), None)
    if base is None:
        raise UsageError(f"--baseline {baseline}: not compared here; there are {', '.join(methods)}")
    return Comparison(entries, chosen, base)


def to_markdown(comparison: Comparison) -> str:
    """The table for people, with what its columns mean."""
    rows, metric = comparison.rows, comparison.metric
    epsilons = [f"epsilon ({adjacency})" for adjacency in comparison.adjacencies]
    columns = ["method", *epsilons, metric, f"difference from {comparison.baseline}", "verdict"]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [row["method"], *(_epsilon(row, name) for name in epsilons), _spread(row[metric], row["ci95"], "")]
        cells += [_spread(row["difference"], row["difference_ci95"], "+"), row["verdict"]]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, "", *notes(comparison)]) + "\n"


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know to judge the table."""
    told = [
        "Values are means over trials with 95% intervals (Student). Each epsilon is of one trial on its own: trials"
        " that share a seed share noise, so nothing is stated of several published together."
    ]
    if len(comparison.adjacencies) > 1:
        told.append(
            f"Epsilons for {' and '.join(comparison.adjacencies)} are different guarantees and stand in columns of"
            " their own; methods are compared only with a baseline of their own adjacency."
        )
    estimates = [e.method for e in comparison.entries if e.privacy.get("bound") == "estimate"]
    if estimates:
        told.append(f"Epsilon is an estimate, not an upper bound, for {', '.join(dict.fromkeys(estimates))}.")
    count = len(comparison._found)
    if count:
        told.append(f"{count} differences are judged together at 5% (Holm).")
    return told


def _epsilon(row: Row, name: str) -> str:
    value = row[name]
    return "" if value is None else f"{'about ' if row['bound'] == 'estimate' else ''}{value:.4g}"


def _spread(mean: float | None, half: float | None, sign: str) -> str:
    if mean is None:
        return ""
    return f"{mean:{sign}.4f}" + ("" if half is None else f" +- {half:.4f}")


def write(comparison: Comparison, out: Path, stem: str = "comparison") -> list[Path]:
    """Write `.csv`, `.json` and `.md`; returns their paths."""
    from dpsgd_cli.sweep.folder import write_whole

    out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "metric": comparison.metric,
        "baseline": comparison.baseline,
        "notes": notes(comparison),
        "rows": comparison.rows,
        "privacy": {str(e.directory): e.privacy for e in comparison.entries},
    }
    content = {"csv": store.to_csv(comparison.rows), "json": store.to_json(document), "md": to_markdown(comparison)}
    for ending, text in content.items():
        write_whole(out / f"{stem}.{ending}", text)
    return [out / f"{stem}.{ending}" for ending in content]
