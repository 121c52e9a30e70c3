"""Finished cases, read from their result directories: metrics, histories, and differences between trials of one seed.

Not here: what they mean (`page.py`, `pictures.py`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.yu2019.cases import Case
from dpsgd_cli.experiment import result_directory
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.results.result import Row, summarise


def interval(metric: Row) -> str:
    """Mean and half-width of its 95% interval."""
    if metric["mean"] is None:
        return "none"
    spread = "" if metric["ci95"] is None else f" ± {metric['ci95']:.4f}"
    return f"{metric['mean']:.4f}{spread}"


@dataclass(frozen=True)
class Found:
    """One finished case."""

    directory: Path

    @cached_property
    def document(self) -> Row:
        """`result.json`."""
        return store.read_document(self.directory)

    @cached_property
    def history(self) -> list[dict[str, str]]:
        """Rows of `history.csv`."""
        with (self.directory / "history.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def metric(self, name: str) -> Row:
        """Mean, deviation and interval of a metric."""
        found: Row = self.document["metrics"][name]
        return found

    def epochs(self) -> str:
        """How long the trials trained."""
        lengths = sorted({row["epochs"] for row in self.document["trials"]})
        return str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"

    def minus(self, other: Found, name: str) -> Row:
        """Mean and interval of the differences between trials of equal seeds."""
        pairs = zip(self.document["trials"], other.document["trials"], strict=True)
        return summarise([one[name] - two[name] for one, two in pairs])

    def at_epoch(self, name: str, epochs: int) -> Row:
        """A metric after that many epochs."""
        return summarise([float(row[name]) for row in self.history if int(row["epoch"]) == epochs - 1 and row[name]])

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Epochs trained, and the mean of a column over the trials that were still training."""
        values: dict[int, list[float]] = {}
        for row in self.history:
            if row.get(name):
                values.setdefault(int(row["epoch"]) + 1, []).append(float(row[name]))
        most = max(map(len, values.values()), default=0)
        kept = {epoch: found for epoch, found in sorted(values.items()) if len(found) == most}
        return list(kept), [math.fsum(found) / len(found) for found in kept.values()]


class Results:
    """The cases that are finished, by figure and what they are there."""

    def __init__(self, wanted: Sequence[Case], runs: Path) -> None:
        self._found: dict[tuple[str, str], Found] = {}
        self._wanted = len(wanted)
        for case in wanted:
            directory = _directory(case, runs)
            if directory is not None and store.is_complete(directory):
                self._found[case.figure, case.x] = Found(directory)

    def get(self, figure: str, x: str) -> Found | None:
        """One case; None when it is not finished."""
        return self._found.get((figure, x))

    def of(self, figure: str) -> dict[str, Found]:
        """All finished cases of a figure."""
        return {x: found for (name, x), found in self._found.items() if name == figure}

    def state(self) -> str:
        """How much is done."""
        if len(self._found) == self._wanted:
            return f"All {self._wanted} trainings are finished."
        return f"{len(self._found)} of {self._wanted} trainings are finished; the same command continues."


def _directory(case: Case, runs: Path) -> Path | None:
    from dpsgd_cli.errors import DpsgdError

    try:
        return result_directory(load_recipe(case.recipe, case.overrides), runs)
    except DpsgdError:
        return None


def numbers(found: dict[str, Any]) -> list[tuple[float, Any]]:
    """Cases of a figure whose names are numbers, in order."""
    return sorted((float(x), one) for x, one in found.items())
