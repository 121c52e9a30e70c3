"""What the page of Lee and Kifer 2018 says beside the tables of `page.yaml`: its claims, and pictures.

Claims are judged by paired 95% intervals, never by eye. Not here: the words (`page.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.lee2018 import published
from benchmarks.pages import RESULTS
from benchmarks.pages.claims import CONFIRMED, OPEN, REFUTED, judged
from benchmarks.pages.drawing import errorbars
from benchmarks.pages.rows import MISSING, Rows, markdown, side, summarised
from benchmarks.pages.spec import Spec

SPEC = Spec(Path(__file__).with_name("page.yaml"))
CASES, METRICS = SPEC.cases, SPEC.metrics
OBJECTIVE = METRICS[1]
FIGURES = {one["figure"]: one["title"] for one in SPEC.content["lists"]["figures"]}
LABELS = {one["name"].removesuffix(" 0.1"): one["label"] for one in SPEC.content["tables"]["figures"]["rows"]}
EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
SMALL, LARGE = EPSILONS[:2], EPSILONS[-1:]
KINK = ("dp-agd", "dp-agd-better", "dp-agd-momentum")
RIVALS = ("objective-perturbation", "output-perturbation", "privgene", "sgd-adv", "sgd-ma")
SPLITS = {"dp-agd": "as published", "dp-agd-better": "better split"}


def said(rows: Rows) -> Mapping[str, str]:
    """Every `${name}` of `page.md`."""
    agd, better = (("adult logistic", f"{method} {EPSILONS[0]:g}") for method in SPLITS)
    behind = {method: sum(-1 in _sides(rows, figure, method, SMALL) for figure in FIGURES) for method in SPLITS}
    deals = {one.n for figure in FIGURES if (one := rows.summary(figure, agd[1])) is not None}
    return {
        **SPEC.said(rows),
        "pictures": "\n\n".join(f"![{title}]({figure.replace(' ', '-')}.png)" for figure, title in FIGURES.items()),
        "deals": ", ".join(str(n) for n in sorted(deals, key=str)) or MISSING,
        "verdicts": _verdicts(rows),
        "counted": _counted(rows),
        "tables": str(len(FIGURES)),
        "behind": str(behind["dp-agd"]),
        "better_behind": str(behind["dp-agd-better"]),
        "kink": _kink(rows),
        "kink_better": rows.gain(("kink", "dp-agd-better 25.6"), ("kink", "dp-agd-better 0.1")),
        "kink_momentum": rows.gain(("kink", "dp-agd-momentum 25.6"), ("kink", "dp-agd-momentum 0.1")),
        "agd": rows.text(*agd),
        "agd_better": rows.text(*better),
        "better_agd": rows.gain(better, agd),
        **_published(),
    }


def _published() -> dict[str, str]:
    """The authors' listing with its noise on either side (`published.py`)."""
    path = RESULTS / "lee2018" / "published.csv"
    if not path.is_file():
        names = ("listed", "righted", "listed_righted", "listed_majority", "listed_trials", "side_decides")
        return dict.fromkeys(names, MISSING)
    found = pd.read_csv(path)
    stale = set(found["code"]) != {published.code()}
    by = {name: own.set_index("seed") for name, own in found.groupby("noise")}
    listed, righted = (by[name]["test_accuracy"] for name in published.SIDES)
    difference = summarised(listed - righted, stale)
    words = {1: "the wrong side explains the listing's accuracy", None: "one seed does not decide"}
    return {
        "side_decides": words.get(side(difference), "the difference is not significant"),
        "listed": summarised(listed, stale).text(),
        "righted": summarised(righted, stale).text(),
        "listed_righted": difference.text(signed=True),
        "listed_majority": summarised(listed - by["as published"]["majority"], stale).text(signed=True),
        "listed_trials": str(len(listed)),
    }


def _sides(
    rows: Rows, figure: str, one: str, epsilons: Iterable[float], others: Sequence[str] = RIVALS
) -> list[int | None]:
    """Whether a method is above each of some others, at each budget."""
    return [
        side(rows.minus((figure, f"{one} {epsilon:g}"), (figure, f"{other} {epsilon:g}")))
        for epsilon in epsilons
        for other in others
    ]


def _steps(rows: Rows, figure: str, column: str) -> list[int | None]:
    """How a column of DP-AGD moves each time the budget is doubled."""
    cases = [(figure, f"dp-agd {epsilon:g}") for epsilon in EPSILONS]
    return [side(rows.minus(more, less, column)) for less, more in itertools.pairwise(cases)]


def _falls_somewhere(rows: Rows, figure: str) -> str:
    found = _steps(rows, figure, "test_accuracy")
    if None in found:
        return MISSING
    return CONFIRMED if -1 in found else REFUTED if set(found) == {1} else OPEN


CLAIMS: dict[str, tuple[str, Callable[[Rows, str], str]]] = {
    "DP-AGD is the most accurate at epsilon .05 and .1": (
        "",
        lambda rows, figure: judged(_sides(rows, figure, "dp-agd", SMALL)),
    ),
    "DP-AGD with the better split is the most accurate at epsilon .05 and .1": (
        "",
        lambda rows, figure: judged(_sides(rows, figure, "dp-agd-better", SMALL)),
    ),
    "SGD-MA is the most accurate above epsilon .8": (
        "",
        lambda rows, figure: judged(_sides(rows, figure, "sgd-ma", LARGE, ("dp-agd", *RIVALS[:-1]))),
    ),
    "DP-AGD's objective falls whenever the budget is doubled": (
        "",
        lambda rows, figure: judged(None if one is None else -one for one in _steps(rows, figure, OBJECTIVE)),
    ),
    "DP-AGD's accuracy on an SVM sometimes falls with more budget": ("svm", _falls_somewhere),
}
"""What is claimed, for which figures (their end), and what judges it."""


def _verdicts(rows: Rows) -> str:
    """A line a claim: where it is confirmed, refuted, and not decided."""
    lines = []
    for claim, (end, judge) in CLAIMS.items():
        found = {title: judge(rows, figure) for figure, title in FIGURES.items() if figure.endswith(end)}
        words = (CONFIRMED, REFUTED, OPEN)
        lines.append([claim, *("; ".join(title for title, one in found.items() if one == word) for word in words)])
    return markdown(("claim", CONFIRMED, REFUTED, OPEN), lines)


def _counted(rows: Rows) -> str:
    """A line a figure and split: how many of the rivals DP-AGD is above, and how many are above it, at each budget."""
    lines = []
    for figure, title in FIGURES.items():
        for method, split in SPLITS.items():
            cells = [_sides(rows, figure, method, [epsilon]) for epsilon in EPSILONS]
            lines.append([title, split, *(f"{cell.count(1)} / {cell.count(-1)}" for cell in cells)])
    return markdown(("", "", *(f"eps {epsilon:g}" for epsilon in EPSILONS)), lines)


def _kink(rows: Rows) -> str:
    """Accuracy and objective up to a budget at which there is hardly any noise."""
    epsilons = SPEC.content["lists"]["kink"]
    lines = [
        [
            LABELS[method],
            *(
                f"{rows.text('kink', f'{method} {e}')} ({rows.text('kink', f'{method} {e}', OBJECTIVE, 3)})"
                for e in epsilons
            ),
        ]
        for method in KINK
    ]
    return markdown(("hinge loss", *(f"eps {epsilon}" for epsilon in epsilons)), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Figures 2 and 3: accuracy above, objective below, over the budget."""
    return {figure.replace(" ", "-"): _picture(rows, figure) for figure in FIGURES}


def _picture(rows: Rows, table: str) -> Figure:
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for number, (method, label) in enumerate(LABELS.items()):
        alone = method.startswith("non-private")
        names = {epsilon: method if alone else f"{method} {epsilon:g}" for epsilon in EPSILONS}
        if (table, names[EPSILONS[0]]) not in rows.cases:
            continue
        style: dict[str, Any] = (
            {"ls": "--"} if alone or method == "majority" else {"marker": "osD^v<>pP*X"[number % 11]}
        )
        style["color"] = mpl.colormaps["tab20"](number)
        for place, column in zip(axes, METRICS, strict=True):
            told = {epsilon: rows.summary(table, name, column) for epsilon, name in names.items()}
            errorbars(place, told, label=label, capsize=2, **style)
    axes[0].set(ylabel="accuracy on held-out folds", title=table)
    axes[1].set(xscale="log", xlabel="epsilon", ylabel="training objective", yscale="log")
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure
