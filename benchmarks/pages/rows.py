"""The rows of a page: means with intervals, paired differences, and which of them are stale."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.pages import RESULTS
from benchmarks.pages.case import Case, is_same
from dpsgd_cli.results.result import summarise

KEYS = ("table", "case", "recipe", "behaviour", "seed", "fold", "epsilon")
CURVES = ("table", "case", "seed", "epoch", "noise_multiplier", "rho", "test_accuracy")
STALE = " (stale)"
MISSING = "not run"
"""For this page; `python -m benchmarks.pages train <page>` runs it."""


@dataclass(frozen=True)
class Summary:
    """Mean and half-width of the 95% Student interval of `n` trials, or deals of folds; `stale` when one of them is."""

    mean: float
    margin: float | None
    n: int
    stale: bool = False

    @property
    def percent(self) -> Summary:
        """The same in percent, or in points of a hundredth."""
        return Summary(100 * self.mean, self.margin and 100 * self.margin, self.n, self.stale)

    def text(self, digits: int = 4, signed: bool = False) -> str:
        """As tables and sentences say it."""
        mean = f"{self.mean:{'+' if signed else ''}.{digits}f}"
        margin = "" if self.margin is None else f" ± {self.margin:.{digits}f}"
        return f"{mean}{margin}{STALE if self.stale else ''}"


class Rows:
    """`trials.csv` and `curves.csv` of a page, as its cases of today see them: rows of no case are not there."""

    def __init__(self, cases: Sequence[Case], trials: pd.DataFrame, curves: pd.DataFrame) -> None:
        self.cases = {(case.table, case.name): case for case in cases}
        self._trials = dict(iter(trials.groupby(["table", "case"], sort=False)))
        self._curves = dict(iter(curves.groupby(["table", "case"], sort=False)))

    @classmethod
    def read(cls, cases: Sequence[Case], folder: Path) -> Rows:
        """What is in a page's folder."""
        return cls(cases, *(read(folder / name) for name in ("trials.csv", "curves.csv")))

    def of(self, table: str, name: str) -> pd.DataFrame | None:
        """Trials of a case, by seed and fold; None where there are none."""
        return self._trials.get((table, name)) if (table, name) in self.cases else None

    def curve(self, table: str, name: str, column: str) -> pd.Series | None:
        """Mean of a column of the history by number of epochs, as long as all trials train; None without one."""
        found = self._curves.get((table, name)) if (table, name) in self.cases else None
        if found is None:
            return None
        by_epoch = found.groupby("epoch")[column]
        whole = by_epoch.count() == by_epoch.count().max()
        means = by_epoch.mean()[whole]
        means.index = means.index + 1
        return means

    def is_stale(self, table: str, name: str) -> bool:
        """Whether a row was trained from another recipe, or by code that does something else."""
        found, case = self._trials[table, name], self.cases[table, name]
        recipes, behaviours = set(found["recipe"]), set(found["behaviour"])
        return recipes != {case.hash} or not all(is_same(one, case.behaviour) for one in behaviours)

    def summary(self, table: str, name: str, column: str = "test_accuracy") -> Summary | None:
        """Of a case's trials."""
        found = self.of(table, name)
        if found is None:
            return None
        return self._of_deals(table, name, found, found[column], self.is_stale(table, name))

    def text(self, table: str, name: str, column: str = "test_accuracy", digits: int = 4) -> str:
        """The cell of a table."""
        found = self.summary(table, name, column)
        return MISSING if found is None else found.text(digits)

    def has(self, table: str) -> bool:
        """Whether any case of a table has rows."""
        return any(key[0] == table and self.of(*key) is not None for key in self.cases)

    def n(self, table: str, name: str) -> str:
        """The number of a case's trials, or deals of folds."""
        found = self.summary(table, name)
        return "" if found is None else str(found.n)

    def epochs(self, table: str, name: str) -> str:
        """The fewest and the most epochs of a case's trials."""
        found = self.of(table, name)
        if found is None:
            return ""
        least, most = int(found["epochs"].min()), int(found["epochs"].max())
        return str(least) if least == most else f"{least} to {most}"

    def minus(self, one: tuple[str, str], two: tuple[str, str], column: str = "test_accuracy") -> Summary | None:
        """Of the differences of trials of one seed and fold; a deal of folds is one difference."""
        ours, theirs = self.of(*one), self.of(*two)
        if ours is None or theirs is None:
            return None
        keys = ["seed", "fold"]
        pairs = ours.merge(theirs, on=keys, suffixes=("", "_other"))
        differences = pairs[column] - pairs[f"{column}_other"]
        return self._of_deals(*one, pairs, differences, self.is_stale(*one) or self.is_stale(*two))

    def _of_deals(self, table: str, name: str, trials: pd.DataFrame, values: pd.Series, stale: bool) -> Summary | None:
        """Of values of trials, where a deal of the records into folds counts as one number: the mean of its folds.

        Folds of one deal share most of their training records, so they are no independent trials; deals are, given
        these records. A deal that lacks a fold is left out; None where none is whole.
        """
        folds = self.cases[table, name].folds
        by_deal = values.groupby(trials["seed"] // folds)
        whole = by_deal.sum(min_count=folds)[by_deal.size() == folds] / folds
        return summarised(whole, stale) if len(whole) else None

    def gain(self, one: tuple[str, str], two: tuple[str, str], digits: int = 4) -> str:
        """`minus` in words."""
        found = self.minus(one, two)
        return MISSING if found is None else found.text(digits, signed=True)

    @functools.cached_property
    def stale(self) -> list[tuple[str, str]]:
        """The cases that have stale rows."""
        return [key for key in self._trials if key in self.cases and self.is_stale(*key)]


def side(found: Summary | None, of: float = 0.0) -> int | None:
    """+1 where the whole interval is above a number, -1 where it is below, 0 where it holds it; None without one."""
    if found is None or found.margin is None:
        return None
    return 1 if found.mean - found.margin > of else -1 if found.mean + found.margin < of else 0


def percent(found: Summary | None, signed: bool = False) -> str:
    """The cell of a table in percent, or in points."""
    return MISSING if found is None else found.percent.text(2, signed)


def of_page(page: str, table: str, case: str) -> pd.DataFrame | None:
    """Trials of a case of another page; None where there are none."""
    every = read(RESULTS / page / "trials.csv")
    found = every[(every["table"] == table) & (every["case"] == case)]
    return None if found.empty else found


def paired(
    ours: pd.DataFrame | None, theirs: pd.DataFrame | None, stale: bool = False
) -> tuple[Summary, Summary] | None:
    """Accuracy of `theirs`, and what `ours` add to it, over the seeds that both have; None where there are none.

    `stale` says whether a row of the page itself is; another page's test finds its own.
    """
    if ours is None or theirs is None:
        return None
    both = ours.merge(theirs, on="seed", suffixes=("", "_other"))
    if both.empty:
        return None
    base = both["test_accuracy_other"]
    return summarised(base, stale), summarised(both["test_accuracy"] - base, stale)


def summarised(values: pd.Series, stale: bool) -> Summary:
    """Mean and interval of numbers, of which there is at least one."""
    told = summarise(values.tolist())
    return Summary(told["mean"], told["ci95"], told["n"], stale)


def read(path: Path) -> pd.DataFrame:
    """A table of rows; empty where there is none yet."""
    if path.is_file():
        return pd.read_csv(path, dtype={"recipe": str, "case": str, "table": str}, keep_default_na=True)
    return pd.DataFrame(columns=[*KEYS] if path.name == "trials.csv" else [*CURVES])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
