"""What the page of Lee and Kifer 2018 says: tables and pictures of what there are rows for, from `trials.csv`.

Not here: what is trained (`cases.py`), the words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.lee2018 import cases, claims, published
from benchmarks.lee2018.cases import (
    DATA,
    EPSILONS,
    KINK,
    KINK_EPSILONS,
    LOSSES,
    METHODS,
    STUDIES,
    STUDY_EPSILONS,
    TITLES,
    named,
)
from benchmarks.lee2018.claims import OBJECTIVE
from benchmarks.pages import RESULTS
from benchmarks.pages.drawing import errorbars
from benchmarks.pages.rows import MISSING, Rows, markdown, side, summarised

CASES = cases.CASES
METRICS = ("test_accuracy", "nonprivate_train_objective")
QUOTED = ".05 .1 .76"
SHOWN = 0.1
"""The budget whose accuracies the page has; the others are in its pictures and in `trials.csv`."""


def said(rows: Rows) -> Mapping[str, str]:
    """The sections that have rows, which are named as missing where they have none, and the comparisons of the text."""
    figures = {f"{data} {loss}": f"{TITLES[data]}, {loss}" for data in DATA for loss in LOSSES}
    have = [table for table in figures if _methods(rows, table)]
    missing = [title for table, title in figures.items() if table not in have]
    missing += [f"DP-AGD by {key}" for key in STUDIES if not _values(rows, key)]
    return {
        "figures": _table(rows, {table: figures[table] for table in have}),
        "pictures": "\n\n".join(f"![{figures[table]}]({table.replace(' ', '-')}.png)" for table in have),
        "deals": ", ".join(sorted({f"{n}" for table in have for n in _deals(rows, table)})) or MISSING,
        "studies": "\n\n".join(_study(rows, key) for key in STUDIES if _values(rows, key)),
        "missing": ", ".join(missing) or "nothing",
        "verdicts": claims.verdicts(rows, figures),
        "counted": claims.counted(rows, figures),
        "tables": str(len(claims.behind(rows, figures, "dp-agd"))),
        "behind": str(sum(claims.behind(rows, figures, "dp-agd"))),
        "better_behind": str(sum(claims.behind(rows, figures, "dp-agd-better"))),
        "kink": _kink(rows),
        "kink_better": _with_budget(rows, "dp-agd-better"),
        "kink_momentum": _with_budget(rows, "dp-agd-momentum"),
        **_against(rows),
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


def _against(rows: Rows) -> dict[str, str]:
    """DP-AGD with either split, on Adult's logistic regression."""
    table, least = "adult logistic", EPSILONS[0]
    agd, better = (table, named("dp-agd", least)), (table, named("dp-agd-better", least))
    return {"agd": rows.text(*agd), "agd_better": rows.text(*better), "better_agd": rows.gain(better, agd)}


def _methods(rows: Rows, table: str) -> list[str]:
    return [method for method in METHODS if rows.of(table, named(method, EPSILONS[0])) is not None]


def _deals(rows: Rows, table: str) -> list[int]:
    """How many deals of the records the methods of a table have."""
    told = [rows.summary(table, named(method, EPSILONS[0])) for method in _methods(rows, table)]
    return sorted({one.n for one in told if one is not None})


def _table(rows: Rows, figures: Mapping[str, str]) -> str:
    """Accuracy of every method at one budget, on every data set and loss."""
    lines = [
        [
            text,
            *(
                rows.text(table, named(method, SHOWN), digits=3) if method in _methods(rows, table) else "-"
                for table in figures
            ),
        ]
        for method, text in METHODS.items()
    ]
    return markdown(("method", *figures.values()), lines)


def _values(rows: Rows, key: str) -> list[Any]:
    return [v for v in STUDIES[key] if rows.of(key, f"{v:g} {STUDY_EPSILONS[0]:g}") is not None]


def _study(rows: Rows, key: str) -> str:
    values = _values(rows, key)
    lines = [[f"eps {e:g}", *(rows.text(key, f"{v:g} {e:g}") for v in values)] for e in STUDY_EPSILONS]
    return f"## DP-AGD on Adult by {key}\n\n" + markdown(("logistic", *(f"{key} {v:g}" for v in values)), lines)


def _kink(rows: Rows) -> str:
    """Accuracy and objective up to a budget at which there is hardly any noise."""
    if rows.of("kink", named(KINK[0], KINK_EPSILONS[0])) is None:
        return MISSING
    lines = [
        [METHODS[method], *(f"{rows.text('kink', name)} ({rows.text('kink', name, OBJECTIVE, 3)})" for name in names)]
        for method in KINK
        for names in [[named(method, epsilon) for epsilon in KINK_EPSILONS]]
    ]
    return markdown(("hinge loss", *(f"eps {epsilon:g}" for epsilon in KINK_EPSILONS)), lines)


def _with_budget(rows: Rows, method: str) -> str:
    most, least = (("kink", named(method, epsilon)) for epsilon in (KINK_EPSILONS[-1], KINK_EPSILONS[0]))
    return rows.gain(most, least)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Figures 2 and 3: accuracy above, objective below, over the budget."""
    tables = [f"{data} {loss}" for data in DATA for loss in LOSSES]
    return {table.replace(" ", "-"): _picture(rows, table) for table in tables if _methods(rows, table)}


def _picture(rows: Rows, table: str) -> Figure:
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for method in _methods(rows, table):
        number = list(METHODS).index(method)
        flat = method.startswith(("non-private", "majority"))
        style: dict[str, Any] = {"ls": "--"} if flat else {"marker": "osD^v<>pP*X"[number % 11]}
        style["color"] = mpl.colormaps["tab20"](number)
        for place, column in zip(axes, METRICS, strict=True):
            told = {epsilon: rows.summary(table, named(method, epsilon), column) for epsilon in EPSILONS}
            errorbars(place, told, label=METHODS[method], capsize=2, **style)
    axes[0].set(ylabel="accuracy on held-out folds", title=table)
    axes[1].set(xscale="log", xlabel="epsilon", ylabel="training objective", yscale="log")
    axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return figure
