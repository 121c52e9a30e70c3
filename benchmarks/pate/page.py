"""PATE on Adult beside DP-SGD: what is trained, and the table and picture of its page. The words are in `page.md`."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages.case import Case
from benchmarks.pages.rows import MISSING, STALE, Rows, markdown

PUBLISHED, NOISY, DESCENT = "confident-gnmax, as published", "gnmax, noise 100", "DP-SGD, full batches, epsilon 0.5"
AGGREGATION = {
    PUBLISHED: "kind: confident-gnmax, threshold: 300, threshold_noise: 200, noise: 40",
    NOISY: "kind: gnmax, noise: 100",
}
CASES = [
    *(
        Case("adult", name, "pate/adult-confident", (f"method.aggregation={{{own}}}", "method.queries=1500"), trials=5)
        for name, own in AGGREGATION.items()
    ),
    Case("adult", DESCENT, "pate/adult-dp-sgd", ("privacy.budget.epsilon=0.5",), trials=5),
]
COLUMNS = {
    "epsilon": "epsilon (stated)",
    "spent_epsilon": "spent of it",
    "nonprivate_epsilon_data_dependent": "by votes (not private)",
    "answered": "answered",
    "answers_right": "answers right",
    "test_accuracy": "student",
    "nonprivate_ensemble_right": "ensemble (not private)",
    "nonprivate_teachers_right": "mean teacher (not private)",
}
METRICS = ("test_accuracy", *(column for column in COLUMNS if column not in ("epsilon", "test_accuracy")))
QUOTED = ".5 1.90 1610.05755 1802.08908 83.7"


def said(rows: Rows) -> Mapping[str, str]:
    """The table, and the shares that the text takes from it."""

    def share(name: str, column: str = "test_accuracy") -> str:
        found = rows.summary("adult", name, column)
        return MISSING if found is None else f"{100 * found.mean:.1f}{STALE if found.stale else ''}"

    def mean(column: str) -> str:
        found = rows.of("adult", PUBLISHED)
        return MISSING if found is None else f"{found[column].mean():.2f}"

    return {
        "adult": _table(rows),
        "student": share(PUBLISHED),
        "epsilon": mean("epsilon"),
        "votes": mean("nonprivate_epsilon_data_dependent"),
        "descent": share(DESCENT),
        "noisy": share(NOISY),
        "ensemble": share(PUBLISHED, "nonprivate_ensemble_right"),
        "confident_right": share(PUBLISHED, "answers_right"),
        "noisy_right": share(NOISY, "answers_right"),
    }


def _table(rows: Rows) -> str:
    """One line a case: means over trials, and the half-width of the student's 95% interval."""
    lines = []
    for case in CASES:
        own = rows.of("adult", case.name)
        if own is None:
            continue
        cells = [f"{case.name}{STALE if rows.is_stale('adult', case.name) else ''}"]
        for column in COLUMNS:
            mean = own[column].mean()
            if pd.isna(mean):
                cells.append("")
            elif column == "test_accuracy":
                cells.append(rows.text("adult", case.name))
            else:
                cells.append(f"{mean:.0f}" if column == "answered" else f"{mean:.3f}")
        lines.append(cells)
    return markdown(("case", *COLUMNS.values()), lines)


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
