"""The page of tables, from `trials.csv` alone. Its words are in `page.md`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.pages.rows import markdown
from benchmarks.tabular import peers, problems
from dpsgd_cli.results.result import summarise

RULE = "dpsgd, by rule"
EPSILONS = (0.1, 1.0, 8.0)
DIAMONDS = ("diamonds", "diamonds, log link")


@dataclass(frozen=True)
class Measure:
    """A metric as the page shows it: how often it is multiplied, with how many decimals, and if less is better."""

    name: str
    words: str
    times: float = 1.0
    decimals: int = 3
    less: bool = False

    def shown(self, value: float) -> str:
        value *= self.times
        decimals = self.decimals if self.name != "mae" else max(0, 2 - math.floor(math.log10(max(abs(value), 1e-9))))
        return f"{value:,.{decimals}f}"


MEASURES = {
    one.name: one
    for one in (
        Measure("accuracy", "accuracy", 100.0, 2),
        Measure("auc", "AUC"),
        Measure("r2", "R2"),
        Measure("mae", "MAE", less=True),
    )
}
AIMS = {
    "adult": {"accuracy": (0.855, 0.860, 0.862)},
    "bank": {"accuracy": (0.898, 0.904, 0.906), "auc": (0.898, 0.923, 0.930)},
    "ipums": {"accuracy": (0.768, 0.776, 0.779)},
    "diamonds": {"r2": (0.925, 0.930, 0.970), "mae": (630, 600, 370)},
    "diamonds, log link": {"r2": (0.955, 0.970, 0.974), "mae": (420, 340, 315)},
}
PRIVATE = [name for name, peer in peers.PEERS.items() if peer.private]


def measures_of(rows: pd.DataFrame) -> list[Measure]:
    """The metrics that these rows have: two of classes, or two of numbers."""
    return [measure for name, measure in MEASURES.items() if rows[name].notna().any()]


def interval(values: pd.Series) -> tuple[float, float]:
    """Mean, and half of its 95% interval over folds."""
    told = summarise(values.tolist())
    return float(told["mean"] or 0.0), float(told["ci95"] or 0.0)


def table(rows: pd.DataFrame, tables: Sequence[str], epsilon: float = 1.0) -> str:
    """A line a tool: on each table both metrics, the first with its interval, and seconds a fold."""
    own = rows[rows["data"].isin(tables) & rows["epsilon"].isin([epsilon, math.inf])]
    first, second = measures_of(own)
    lines = []
    for tool, of_tool in own.groupby("tool", sort=False):
        cells = [_shown(str(tool))]
        for data in tables:
            here, cell = of_tool[of_tool["data"] == data], ""
            if len(here):
                mean, half = interval(here[first.name])
                other, seconds = second.shown(here[second.name].mean()), here["seconds"].mean()
                cell = f"{first.shown(mean)} ± {first.shown(half)}, {other}, {seconds:.1f}"
            cells.append(cell)
        lines.append(cells)
    return markdown((f"{first.words}, {second.words}, seconds", *tables), lines)


def _shown(tool: str) -> str:
    return tool.replace("by rule", "automatic")


def overview(rows: pd.DataFrame, of_numbers: bool) -> str:
    """A line a table: both metrics of dpsgd, and of the best private and the best other peer, at each epsilon."""
    first, second = list(MEASURES.values())[2 * of_numbers :][:2]
    own = rows[rows[first.name].notna()]
    tools = {"dpsgd": [RULE], "DP-EBM": [name for name in PRIVATE if "EBM" in name]}
    tools |= (
        {"AdaSSP": ["AdaSSP"], "boosted": ["AdaSSP, boosted"]}
        if of_numbers
        else {"diffprivlib": ["diffprivlib, linear"]}
    )
    heads = [f"{name} {epsilon:g}" for name in tools for epsilon in EPSILONS]
    lines = []
    for data, of_data in own.groupby("data", sort=False):
        cells = [_best(of_data, names, epsilon, first, second) for names in tools.values() for epsilon in EPSILONS]
        cells.append(_best(of_data, ["boosting without privacy"], math.inf, first, second))
        folds = of_data[of_data["tool"] == RULE]["trial"].nunique()
        lines.append([str(data), str(folds), *cells])
    return markdown((f"{first.words}, {second.words}", "folds", *heads, "boosting"), lines)


def _best(rows: pd.DataFrame, tools: list[str], epsilon: float, first: Measure, second: Measure) -> str:
    """The means of the tool that is best by the first metric."""
    here = rows[rows["tool"].isin(tools) & (rows["epsilon"] == epsilon)]
    if here.empty:
        return ""
    means = here.groupby("tool")[[first.name, second.name]].mean().sort_values(first.name).iloc[-1]
    return f"{first.shown(means[first.name])}, {second.shown(means[second.name])}"


@dataclass(frozen=True)
class Comparison:
    """How far the rule is ahead of the best private peer on a table, in the unit of a metric, and its interval."""

    where: str
    measure: Measure
    ours: float
    theirs: float
    peer: str
    half: float

    @property
    def ahead(self) -> float:
        return (self.theirs - self.ours) if self.measure.less else (self.ours - self.theirs)

    @property
    def told(self) -> str:
        here = self.measure.shown
        within = "" if self.ahead < -self.half else ", within the interval of their differences over folds"
        words = f"{self.measure.words} {here(self.ours)}, {_shown(self.peer)} {here(self.theirs)}"
        return f"{self.where}: {words}{within}"


def comparisons(rows: pd.DataFrame) -> Iterator[Comparison]:
    """The rule beside the private peer with the best mean, on the folds that both have."""
    for (data, epsilon), own in rows[rows["epsilon"] < math.inf].groupby(["data", "epsilon"], sort=False):
        for measure in measures_of(own):
            trials = own.pivot_table(index="trial", columns="tool", values=measure.name)
            others = [name for name in PRIVATE if name in trials]
            if RULE not in trials or not others:
                continue
            means = trials[others].mean()
            peer = str(means.idxmin() if measure.less else means.idxmax())
            both = trials[[RULE, peer]].dropna()
            _, half = interval(both[RULE] - both[peer])
            where = f"{data} at epsilon {epsilon:g}"
            yield Comparison(where, measure, both[RULE].mean(), both[peer].mean(), peer, half)


def findings(rows: pd.DataFrame) -> str:
    """Where the rule is behind a private peer, and how often it is ahead of all."""
    found = list(comparisons(rows))
    behind = [one for one in found if one.ahead < 0]
    tables = rows["data"].nunique()
    lines = [f"- {one.told}" for one in sorted(behind, key=lambda one: one.ahead >= -one.half)]
    counts = "; ".join(
        f"{measure.words} {sum(one.ahead >= 0 for one in found if one.measure is measure)} of"
        f" {sum(one.measure is measure for one in found)}"
        for measure in MEASURES.values()
    )
    head = f"dpsgd with automatic settings is behind a private peer in {len(behind)} of {len(found)} comparisons:"
    said = [head, "", *lines, ""] if behind else []
    clear = sum(one.ahead > one.half for one in found)
    return "\n".join(
        [
            *said,
            f"It is ahead of every private peer, or equal, in the others ({tables} tables, three budgets; {counts}), in"
            f" {clear} of them by more than the interval of the differences over folds.",
        ]
    )


def declines(rows: pd.DataFrame) -> str:
    """Where the rule does worse at a larger epsilon, on the same folds, by more than the interval of differences."""
    found, asked = [], 0
    for data, own in rows[(rows["tool"] == RULE)].groupby("data", sort=False):
        for measure in measures_of(own):
            trials = own.pivot_table(index="trial", columns="epsilon", values=measure.name)
            for less, more in itertools.combinations(sorted(trials), 2):
                gained = (trials[more] - trials[less]).dropna() * (-1 if measure.less else 1)
                mean, half = interval(gained)
                asked += 1
                if mean < -half:
                    one, other = (measure.shown(trials[epsilon].mean()) for epsilon in (less, more))
                    found.append(f"{data}, {measure.words} {one} at {less:g} and {other} at {more:g}")
    head = f"With more budget it does worse in {len(found)} of {asked} pairs of budgets, by more than that interval"
    return _listed(head, found)


def short(rows: pd.DataFrame) -> str:
    """Where the rule misses what was aimed at, and whether the aim is within the interval over folds."""
    found, asked = [], 0
    for data, told in AIMS.items():
        for name, aims in told.items():
            for epsilon, aim in zip(EPSILONS, aims, strict=True):
                here = (rows["data"] == data) & (rows["tool"] == RULE) & (rows["epsilon"] == epsilon)
                if not here.any():
                    continue
                asked += 1
                measure, (mean, half) = MEASURES[name], interval(rows[here][name])
                missing = (mean - aim) if measure.less else (aim - mean)
                if missing * measure.times >= 0.5 * 10.0 ** -(measure.decimals if not measure.less else 0):
                    inside = "within" if missing <= half else "outside"
                    found.append(
                        f"{data} at epsilon {epsilon:g}: {measure.words} {measure.shown(mean)} of {measure.shown(aim)},"
                        f" {inside} the interval"
                    )
    return _listed(f"{asked - len(found)} of {asked} aims are met; missed", found)


def _listed(head: str, found: list[str]) -> str:
    return "\n".join([f"{head}:", "", *(f"- {one}" for one in found)]) if found else f"{head}: none."


def read(path: Path) -> pd.DataFrame:
    """The rows of a `trials.csv`, but those of tools that are not for such a target, or have no guarantee for it."""
    rows = pd.read_csv(path)
    fits = [
        tool not in peers.PEERS or number in peers.PEERS[tool].of
        for tool, number in zip(rows["tool"], rows["r2"].notna(), strict=True)
    ]
    return rows[fits]


def write(out: Path) -> None:
    """The page, from `trials.csv`."""
    rows = read(out / "trials.csv")
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    missing = [name for name in peers.PEERS if name not in set(rows["tool"])]
    told = f"Could not be imported where this page was made, so left out: {', '.join(missing)}." if missing else ""
    later = [name for name in problems.names() if name not in set(rows["data"])]
    unmeasured = f"Of `tables.yaml`, these tables were not measured yet: {'; '.join(later)}." if later else ""
    parts = {
        "unmeasured": unmeasured,
        "findings": findings(rows),
        "short": short(rows),
        "declines": declines(rows),
        "classes": overview(rows, of_numbers=False),
        "numbers": overview(rows, of_numbers=True),
        "tools of classes": table(rows, tuple(problems.SHIPPED)),
        "tools of numbers": table(rows, DIAMONDS),
        "missing": told,
    }
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    (out / "README.md").write_text(page, encoding="utf-8")
