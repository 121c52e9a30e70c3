"""PATE on Adult beside DP-SGD: numbers and the picture of its page. Table and trainings are in `page.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages.rows import MISSING, STALE, Rows
from benchmarks.pages.spec import Spec

SPEC = Spec(Path(__file__).with_name("page.yaml"))
CASES, METRICS = SPEC.cases, SPEC.metrics
PUBLISHED, NOISY, DESCENT = (case.name for case in CASES)


def said(rows: Rows) -> Mapping[str, str]:
    """The table, and the shares that the text takes from its rows."""

    def share(name: str, column: str = "test_accuracy") -> str:
        found = rows.summary("adult", name, column)
        return MISSING if found is None else f"{100 * found.mean:.1f}{STALE if found.stale else ''}"

    def mean(column: str) -> str:
        found = rows.of("adult", PUBLISHED)
        return MISSING if found is None else f"{found[column].mean():.2f}"

    return {
        **SPEC.said(rows),
        "student": share(PUBLISHED),
        "epsilon": mean("epsilon"),
        "votes": mean("nonprivate_epsilon_data_dependent"),
        "descent": share(DESCENT),
        "noisy": share(NOISY),
        "ensemble": share(PUBLISHED, "nonprivate_ensemble_right"),
        "confident_right": share(PUBLISHED, "answers_right"),
        "noisy_right": share(NOISY, "answers_right"),
    }


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Student accuracy against epsilon, as stated and by votes; labels answered, and how many of them are right."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = {case.name: rows.of("adult", case.name) for case in CASES}
    means = {name: own.mean(numeric_only=True) for name, own in found.items() if own is not None}
    for number, (case, row) in enumerate(means.items()):
        left.plot(row["epsilon"], row["test_accuracy"], "o", color=f"C{number}", label=case)
        if pd.notna(row["answered"]):
            votes = row["nonprivate_epsilon_data_dependent"]
            left.plot(votes, row["test_accuracy"], "o", mfc="none", color=f"C{number}")
            right.plot(row["answered"], row["answers_right"], "o", color=f"C{number}")
            right.plot(row["answered"], row["nonprivate_ensemble_right"], "_", color=f"C{number}", markersize=14)
    left.set(title="adult", xlabel="epsilon (full: stated; hollow: by votes, not private)", ylabel="test accuracy")
    right.set(title="dot: released; bar: no noise (not private)", xlabel="queries answered", ylabel="labels right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return {"adult": figure}
