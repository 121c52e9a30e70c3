"""PATE on MNIST and Adult beside DP-SGD: what is trained, and the tables and pictures of its page.

Cases of one pack share teachers, which are trained once a seed. Not here: the words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages.case import Case
from benchmarks.pages.rows import MISSING, STALE, Rows, markdown

NOISE = "threshold: 200, threshold_noise: 150"
OF_ADULT = "threshold: 300, threshold_noise: 200"
TRIALS = 5


def pate(data: str, name: str, aggregation: str, queries: int) -> Case:
    """PATE with other aggregation or queries than the shipped recipe's."""
    changes = (f"method.aggregation={{{aggregation}}}", f"method.queries={queries}")
    return Case(data, name, f"pate/{data}-confident", changes, TRIALS, pack=f"{data} {queries}")


def dp_gd(data: str, epsilon: float) -> Case:
    """Full-batch DP-SGD with momentum on the same features, judged by the same records."""
    name, changes = f"DP-SGD, full batches, epsilon {epsilon:g}", (f"privacy.budget.epsilon={epsilon}",)
    return Case(data, name, f"pate/{data}-dp-sgd", changes, TRIALS)


CASES = [
    pate("mnist", "confident-gnmax, as published", f"kind: confident-gnmax, {NOISE}, noise: 40", 640),
    pate("mnist", "gnmax, noise 40", "kind: gnmax, noise: 40", 640),
    pate("mnist", "lnmax, noise 20", "kind: lnmax, noise: 20", 640),
    pate("mnist", "confident-gnmax, 1,000 queries", f"kind: confident-gnmax, {NOISE}, noise: 40", 1000),
    pate("mnist", "confident-gnmax, 1,500 queries", f"kind: confident-gnmax, {NOISE}, noise: 40", 1500),
    pate("mnist", "gnmax, noise 100", "kind: gnmax, noise: 100", 1500),
    *(dp_gd("mnist", epsilon) for epsilon in (1.0, 2.0, 4.0, 6.0)),
    pate("adult", "confident-gnmax, as published", f"kind: confident-gnmax, {OF_ADULT}, noise: 40", 1500),
    pate("adult", "gnmax, noise 100", "kind: gnmax, noise: 100", 1500),
    dp_gd("adult", 0.5),
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
QUOTED = ".1 .5 1.90 1.97 1610.05755 1802.08908 83.7 98.5"


def said(rows: Rows) -> Mapping[str, str]:
    """Both tables, and the shares that the text takes from them."""

    def share(data: str, name: str, column: str = "test_accuracy") -> str:
        found = rows.summary(data, name, column)
        return MISSING if found is None else f"{100 * found.mean:.1f}{STALE if found.stale else ''}"

    published, noisy = "confident-gnmax, as published", "gnmax, noise 100"
    students = [share("mnist", case.name) for case in CASES if case.table == "mnist" and "DP-SGD" not in case.name]

    def mean(name: str, column: str) -> str:
        found = rows.of("mnist", name)
        return MISSING if found is None else f"{found[column].mean():.2f}"

    return {
        "mnist": _table(rows, "mnist"),
        "adult": _table(rows, "adult"),
        "best_student": max(students),
        "adult_student": share("adult", published),
        "adult_noisy": share("adult", noisy),
        "adult_ensemble": share("adult", published, "nonprivate_ensemble_right"),
        "confident_right": share("mnist", published, "answers_right"),
        "gnmax_right": share("mnist", "gnmax, noise 40", "answers_right"),
        "noisy_student": share("mnist", noisy),
        "noisy_epsilon": mean(noisy, "epsilon"),
        "published_student": share("mnist", published),
        "published_epsilon": mean(published, "epsilon"),
        "published_votes": mean(published, "nonprivate_epsilon_data_dependent"),
        "dp_two": share("mnist", "DP-SGD, full batches, epsilon 2"),
        "dp_four": share("mnist", "DP-SGD, full batches, epsilon 4"),
    }


def _table(rows: Rows, data: str) -> str:
    """One line a case: means over trials, and the half-width of the student's 95% interval."""
    lines = []
    for case in (case for case in CASES if case.table == data):
        own = rows.of(data, case.name)
        if own is None:
            continue
        cells = [f"{case.name}{STALE if rows.is_stale(data, case.name) else ''}"]
        for column in COLUMNS:
            mean = own[column].mean()
            if pd.isna(mean):
                cells.append("")
            elif column == "test_accuracy":
                cells.append(rows.text(data, case.name))
            else:
                cells.append(f"{mean:.0f}" if column == "answered" else f"{mean:.3f}")
        lines.append(cells)
    return markdown(("case", *COLUMNS.values()), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """One for each data set."""
    return {data: _picture(rows, data) for data in ("mnist", "adult")}


def _picture(rows: Rows, data: str) -> Figure:
    """Student accuracy against epsilon, as stated and by votes; labels answered, and how many of them are right."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    found = {case.name: rows.of(data, case.name) for case in CASES if case.table == data}
    kept = {name: own.mean(numeric_only=True) for name, own in found.items() if own is not None}
    means = pd.DataFrame(kept).transpose()
    means = means[means["test_accuracy"] > 0.5]
    votes = means[means["answered"].notna()]
    others = means[means["answered"].isna()]
    left.plot(others["epsilon"], others["test_accuracy"], "k.-", label="DP-SGD on the same features")
    for number, (case, row) in enumerate(votes.iterrows()):
        left.plot(row["epsilon"], row["test_accuracy"], "o", color=f"C{number}", label=str(case))
        if pd.notna(row["nonprivate_epsilon_data_dependent"]):
            left.plot(
                row["nonprivate_epsilon_data_dependent"], row["test_accuracy"], "o", mfc="none", color=f"C{number}"
            )
        right.plot(row["answered"], row["answers_right"], "o", color=f"C{number}")
        right.plot(row["answered"], row["nonprivate_ensemble_right"], "_", color=f"C{number}", markersize=14)
    left.set(title=data, xlabel="epsilon (full: stated; hollow: by votes, not private)", ylabel="test accuracy")
    right.set(title="dot: released; bar: no noise (not private)", xlabel="queries answered", ylabel="labels right")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure
