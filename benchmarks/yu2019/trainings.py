"""The paper's figures of trainings, 4 to 15, drawn from rows. Not here: arithmetic (`accounting.py`)."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.pages.drawing import errorbars
from benchmarks.pages.rows import Rows
from benchmarks.yu2019 import NON_PRIVATE, SCHEDULES, SPEC
from benchmarks.yu2019.accounting import framed

SWEEPS = {
    "decay": ("07", "decay rate k"),
    "factor": ("08", "factor k"),
    "rate": ("09", "last learning rate"),
    "units": ("10", "hidden units"),
    "noise at 60": ("11a", "sigma_0, 60 epochs"),
    "noise": ("11b", "sigma_0, k = .015"),
}
"""The number of each figure over one setting, and what its axis says."""
COLOURS = dict(zip(SCHEDULES, ("#555555", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e"), strict=True))


def figures(rows: Rows) -> dict[str, Figure]:
    """What there are rows for."""
    made = {
        "figure-04": _curves(rows, "table2", "noise_multiplier", "noise multiplier"),
        "figure-05": _spread(rows),
        "figure-12": _curves(rows, "table2", "test_accuracy", "test accuracy"),
        "figure-13": _curves(rows, "table2", "rho", "rho spent"),
        "figure-14": _curves(rows, "cancer", "test_accuracy", "test accuracy, Cancer"),
    }
    made |= {
        f"figure-{number}": _sweep(rows, table, label) for table, (number, label) in SWEEPS.items() if rows.has(table)
    }
    if rows.has("length"):
        made["figure-06"] = _lengths(rows)
    if rows.of("cifar", "uniform") is not None and rows.of("cifar", "exponential") is not None:
        made["figure-15"] = _curves(rows, "cifar", "test_accuracy", "test accuracy, CIFAR-10")
    made["figure-12"].axes[0].set_ylim(0.85, 0.985)
    return made


def _curves(rows: Rows, table: str, column: str, label: str) -> Figure:
    figure, axes = framed()
    for kind in (*SCHEDULES, "non-private") if table == "cifar" else SCHEDULES:
        curve = rows.curve(table, kind, column)
        if curve is not None:
            axes.plot(curve.index, curve, label=kind, color=COLOURS.get(kind, "black"), linewidth=1.3)
    without = (
        rows.curve("non-private", NON_PRIVATE[0], column) if (table, column) == ("table2", "test_accuracy") else None
    )
    if without is not None:
        axes.plot(without.index, without, label="not private", color="black", linewidth=1.3)
    axes.set(xlabel="epochs", ylabel=label)
    axes.legend(fontsize=8)
    return figure


def _spread(rows: Rows) -> Figure:
    figure, axes = framed()
    names = [kind for kind in SCHEDULES if rows.of("table2", kind) is not None]
    for place, kind in enumerate(names):
        found = rows.of("table2", kind)
        assert found is not None
        values = found["test_accuracy"]
        mean = values.mean()
        error = [[mean - values.min()], [values.max() - mean]]
        axes.errorbar([place], [mean], yerr=error, marker="o", capsize=5, color=COLOURS[kind])
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("test accuracy: mean, least, largest")
    return figure


def _points(table: str, kind: str = "") -> dict[float, tuple[str, str]]:
    """Where each point of a figure was trained, by the number that ends its name."""
    places = [f"{case.table}/{case.name}" for case in SPEC.cases] + [*SPEC.content["same"]]
    names = [place.removeprefix(f"{table}/{kind}") for place in places if place.startswith(f"{table}/{kind}")]
    return {float(name): SPEC.key(f"{table}/{kind}{name}", {}) for name in sorted(names, key=float)}


def _sweep(rows: Rows, table: str, label: str) -> Figure:
    """Accuracy by one number, with intervals, and the epochs that the budget allowed."""
    figure, axes = framed()
    points = _points(table)
    told = {x: rows.summary(*key) for x, key in points.items()}
    for x, one in told.items():
        length = rows.summary(*points[x], "epochs")
        if one is not None and length is not None:
            axes.annotate(f"{length.mean:.0f}", (x, one.mean), xytext=(4, 5), textcoords="offset points", fontsize=7)
    errorbars(axes, told, marker="o", capsize=4, linewidth=1.2)
    if table == "decay":
        axes.set_xscale("log")
    axes.set(xlabel=f"{label} (beside each point: epochs)", ylabel="test accuracy, 95% interval")
    return figure


def _lengths(rows: Rows) -> Figure:
    """Accuracy by number of epochs, a curve a kind of noise."""
    figure, axes = framed()
    for kind in (*SCHEDULES[1:5], "uniform"):
        told = {epochs: rows.summary(*key) for epochs, key in _points("length", f"{kind} ").items()}
        errorbars(axes, told, marker="o", markersize=3, capsize=3, label=kind, color=COLOURS[kind])
    axes.set(xlabel="epochs", ylabel="test accuracy, 95% interval")
    axes.legend(fontsize=8)
    return figure
