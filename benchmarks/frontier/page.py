"""Accuracy against epsilon on features that no record shaped: the tables and pictures of its page.

Not here: what is trained (`page.yaml`), the words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from scipy.optimize import brentq

from benchmarks.pages.drawing import errorbars, over_epsilon
from benchmarks.pages.rows import MISSING, Rows, markdown, percent
from benchmarks.pages.spec import Spec
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.training.auto_rule import MOMENTS

SPEC = Spec(Path(__file__).with_name("page.yaml"))
CASES, METRICS = SPEC.cases, SPEC.metrics
METHODS = ("preconditioned", "DP-GD", "DP least squares")


@dataclass(frozen=True)
class Published:
    """Points of another paper, in percent, on the official test records."""

    data: str
    name: str
    points: Mapping[float, float]


PUBLISHED = (
    Published("mnist", "scattering, linear (Tramer and Boneh 2021)", {3: 98.7}),
    Published("mnist", "tanh CNN (Tramer and Boneh 2021)", {3: 98.1}),
    Published("cifar10", "scattering, CNN (Tramer and Boneh 2021)", {3: 69.3}),
    Published("cifar10", "tanh CNN (Tramer and Boneh 2021)", {3: 59.2}),
    Published("cifar10", "priors from random processes, GPUs (Tang et al. 2023)", {1: 72.3}),
    Published("cifar10", "residual network, GPUs (Klause et al. 2022)", {8: 82.5}),
)
AIMS = {"mnist": {0.3: 98.2, 1.0: 98.9, 3.0: 99.2}, "cifar10": {1.0: 74.0, 3.0: 78.5, 8.0: 81.0}} | {
    "cifar10-held": {1.0: 72.5, 3.0: 77.5, 8.0: 80.0}
}
DELTA = 1e-5
BOARD = {
    "mnist": {
        1.2: ("scattering, linear (Tramer and Boneh 2021)", 98.1),
        2.0: ("scattering, linear (Tramer and Boneh 2021)", 98.5),
        2.93: ("scattering, linear (Tramer and Boneh 2021)", 98.7),
    },
    "cifar10": {
        1.0: ("Wide-ResNet (De et al. 2022)", 56.8),
        2.0: ("Wide-ResNet (De et al. 2022)", 65.9),
        3.0: ("scattering, CNN (Tramer and Boneh 2021)", 69.3),
        4.0: ("Wide-ResNet (De et al. 2022)", 73.5),
        8.0: ("Wide-ResNet (De et al. 2022)", 81.4),
    },
}
"""Best entries without public data of the leaderboard private-machinelearning.github.io, by data set and epsilon."""
NAMES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10 (1,000 official records)",
    "cifar10-held": "CIFAR-10 (10,000 held out, 40,000 for training)",
}
TITLES = {"mnist": "MNIST, 60,000 for training, 10,000 official test records judge"} | {
    "cifar10": "CIFAR-10, 50,000 for training, 1,000 official test records judge",
    "cifar10-held": "CIFAR-10, 40,000 for training, 10,000 others of the training part judge",
}
PRINCIPAL = "preconditioned, principal directions"


def said(rows: Rows) -> Mapping[str, str]:
    """A table for each data set and what judges it."""
    tables = {name.replace("-", "_"): _table(rows, name) for name in TITLES}
    told = {
        case.name.replace(" ", "_"): percent(rows.summary(case.table, case.name))
        for case in CASES
        if case.table == "yu"
    }
    told |= {"share": f"{MOMENTS.share:g}"}
    boards = {f"board_{data}": _board(rows, data) for data in BOARD}
    return tables | told | boards | {"gaps": _gaps(rows)}


def _board(rows: Rows, data: str) -> str:
    """A line for each epsilon of the leaderboard: its best entry and ours, and what two accountants say of ours."""
    lines = []
    for epsilon, (other, published) in BOARD[data].items():
        name = f"preconditioned, epsilon {epsilon:g}"
        took = rows.summary(data, name, "seconds")
        # all releases are Gaussian sums over all records, so together they are one, which is as hard to tell
        mu = brentq(lambda mu, epsilon=epsilon: gaussian_epsilon(mu, DELTA) - epsilon, 1e-3, 10)
        together = [Release(GaussianSum(1 / mu, "add-remove"))]
        by = [accountants.get(one).epsilon(together, DELTA) for one in ("pld", "rdp")]
        seconds = MISSING if took is None else f"{took.mean:.0f}"
        ours = percent(rows.summary(data, name))
        lines.append([f"{epsilon:g}", ours, *(f"{one:.3f}" for one in by), seconds, f"{published}", other])
    return markdown(
        ("epsilon", "dpsgd, accuracy %", "epsilon by pld", "by rdp", "seconds a trial", "board", "its entry"), lines
    )


def _gaps(rows: Rows) -> str:
    """The best method's accuracy minus the aim, in points: a line for each data set, a column for each epsilon."""
    epsilons = sorted({epsilon for aims in AIMS.values() for epsilon in aims})
    lines = [[NAMES[table], *(_gap(rows, table, epsilon) for epsilon in epsilons)] for table in TITLES]
    return markdown(("data", *(f"epsilon {epsilon:g}" for epsilon in epsilons)), lines)


def _gap(rows: Rows, table: str, epsilon: float) -> str:
    """The best method's accuracy minus the aim at one epsilon, in points; empty where there is no aim."""
    if epsilon not in AIMS[table]:
        return ""
    found = [rows.summary(table, f"{method}, epsilon {epsilon:g}") for method in METHODS]
    means = [100 * one.mean for one in found if one is not None]
    return f"{max(means) - AIMS[table][epsilon]:+.2f}" if means else "not run"


def _table(rows: Rows, table: str) -> str:
    """One line a method: accuracy in percent at each epsilon, seconds a trial; aims, and other papers' points."""
    lines = []
    for method in (*METHODS, *((PRINCIPAL,) if table == "mnist" else ())):
        cells, seconds = [method], []
        for epsilon in AIMS[table]:
            name = f"{method}, epsilon {epsilon:g}"
            cells.append(percent(rows.summary(table, name)))
            took = rows.summary(table, name, "seconds")
            seconds += [] if took is None else [took.mean]
        if seconds:
            lines.append([*cells, f"{sum(seconds) / len(seconds):.0f}"])
    lines.append(["aim", *(f"{aim:.1f}" for aim in AIMS[table].values()), ""])
    for other in PUBLISHED:
        if other.data == table:
            points = [f"{other.points[one]:.1f}" if one in other.points else "" for one in AIMS[table]]
            lines.append([f"published: {other.name}", *points, ""])
    return markdown(("method", *(f"epsilon {one:g}" for one in AIMS[table]), "seconds a trial"), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """One for each table."""
    return {table: _picture(rows, table) for table in TITLES}


def _picture(rows: Rows, table: str) -> Figure:
    """Accuracy against epsilon: a line a method, bars for aims, stars for the points of other papers."""
    data = table.removesuffix("-held")
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(METHODS):
        found = {e: rows.summary(table, f"{method}, epsilon {e:g}") for e in AIMS[table]}
        points = {e: one and one.percent for e, one in found.items()}
        errorbars(axes, points, color=f"C{number}", marker="o", capsize=3, label=method)
    axes.plot(list(AIMS[table]), list(AIMS[table].values()), "k_", markersize=18, label="aim")
    for number, other in enumerate(one for one in PUBLISHED if one.data == data):
        axes.plot(list(other.points), list(other.points.values()), "*", color=f"C{number + 4}", ms=12, label=other.name)
    over_epsilon(axes, [*AIMS[table]], xlabel="epsilon (delta 1e-5)", ylabel="accuracy %", title=TITLES[table])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure
