"""The paper's figures, drawn from results. Each function draws one and says in a sentence what it shows.

Not here: the page around them (`page.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.yu2019.cases import DECAYS, LENGTHS, SCHEDULES, SOLVED
from benchmarks.yu2019.runs import Found, Results, numbers
from dpsgd_cli.privacy.plan import Facts, plan_for
from dpsgd_cli.recipe.loading import load_recipe

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = dict(
    zip(
        (*SCHEDULES, "non-private"),
        ("#555555", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e", "#000000"),
        strict=True,
    )
)
Draw = Callable[[Results, Any], str | None]


def draw(results: Results, out: Path) -> list[tuple[str, str]]:
    """Draw what there are results for; file name and caption of each picture."""
    made = []
    for name, function in FIGURES.items():
        figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=110)
        caption = function(results, axes)
        if caption is not None:
            axes.grid(alpha=0.25)
            figure.tight_layout()
            figure.savefig(out / f"{name}.png", metadata={"Software": None})
            made.append((f"{name}.png", caption))
        plt.close(figure)
    return made


@functools.cache
def solved(kind: str, epochs: int) -> float:
    """The decay rate with which `epochs` epochs spend rho 0.78125."""
    recipe = load_recipe("yu2019/mnist-exponential", (f"privacy.schedule={SOLVED[kind]}", f"epochs={epochs}")).recipe
    from dpsgd_cli.privacy.budget import solve_schedule

    assert recipe.privacy is not None
    plan = plan_for(recipe, Facts(60_000))
    answer = solve_schedule(recipe.privacy.schedule, epochs, lambda z: sum(0.5 / x**2 for x in z) - 0.78125, 1e-9)
    assert len(plan.epochs) == epochs
    return float(answer.decay)  # type: ignore[union-attr]


def _curves(results: Results, axes: Any, column: str, kinds: tuple[str, ...]) -> bool:
    drawn = False
    for kind in kinds:
        found = results.get("table2", kind)
        if found is not None:
            axes.plot(*found.curve(column), label=kind, color=COLOURS[kind], linewidth=1.4)
            drawn = True
    axes.set_xlabel("epochs")
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def _noise(results: Results, axes: Any) -> str | None:
    axes.set_ylabel("noise multiplier")
    if not _curves(results, axes, "noise_multiplier", SCHEDULES):
        return None
    return "Figure 4: the noise multiplier by epoch; each curve ends where the budget does."


def _accuracy_in_training(results: Results, axes: Any) -> str | None:
    axes.set_ylabel("test accuracy")
    axes.set_ylim(0.82, 0.985)
    drawn = _curves(results, axes, "test_accuracy", (*SCHEDULES, "non-private"))
    return "Figure 12: test accuracy while training (mean of all trials)." if drawn else None


def _privacy_in_training(results: Results, axes: Any) -> str | None:
    axes.set_ylabel("rho spent")
    drawn = _curves(results, axes, "rho", SCHEDULES)
    return "Figure 13: rho spent while training." if drawn else None


def _bars(axes: Any, points: list[tuple[float, Found]], label: str, colour: str | None = None) -> None:
    metrics = [(x, found.metric("test_accuracy")) for x, found in points]
    xs, means = [x for x, _ in metrics], [m["mean"] for _, m in metrics]
    spreads = [m["ci95"] or 0.0 for _, m in metrics]
    axes.errorbar(
        xs, means, yerr=spreads, marker="o", markersize=4, capsize=3, linewidth=1.2, label=label, color=colour
    )


def _schedules(results: Results, axes: Any) -> str | None:
    found = {kind: one for kind in SCHEDULES if (one := results.get("table2", kind)) is not None}
    for place, (kind, one) in enumerate(found.items()):
        values = [row["test_accuracy"] for row in one.document["trials"]]
        mean = sum(values) / len(values)
        spread = [[mean - min(values)], [max(values) - mean]]
        axes.errorbar([place], [mean], yerr=spread, marker="o", capsize=5, color=COLOURS[kind])
    axes.set_xticks(range(len(found)), list(found), fontsize=8)
    axes.set_ylabel("test accuracy")
    return "Figure 5: test accuracy of the schedules of Table II, mean, least and largest trial." if found else None


def _fixed_length(results: Results, axes: Any) -> str | None:
    drawn = False
    for kind in (*DECAYS, "uniform"):
        points = [(float(n), found) for n in LENGTHS if (found := results.get("length", f"{kind} {n}")) is not None]
        if points and kind == "uniform" and (whole := results.get("table2", "uniform")) is not None:
            points.append((100.0, whole))
        if points:
            _bars(axes, points, kind, COLOURS[kind])
            drawn = True
    axes.set_xlabel("epochs")
    axes.set_ylabel("test accuracy")
    if drawn:
        axes.legend(fontsize=8)
    return (
        "Figure 6: test accuracy at fixed numbers of epochs, decay rates solved for (95% intervals)." if drawn else None
    )


def _against(figure: str, label: str, also: tuple[str, str, str] | None, log: bool = False) -> Draw:
    """One accuracy against one number; `also` is another case (figure, x) and its number."""

    def function(results: Results, axes: Any) -> str | None:
        points = numbers(results.of(figure))
        if also is not None and (more := results.get(*also[:2])) is not None and points:
            points = sorted([*points, (float(also[2]), more)], key=lambda point: point[0])
        if not points:
            return None
        _bars(axes, points, "test accuracy")
        axes.set_xlabel(label)
        axes.set_ylabel("test accuracy")
        if log:
            axes.set_xscale("log")
        for x, found in points:
            axes.annotate(
                found.epochs(),
                (x, found.metric("test_accuracy")["mean"]),
                fontsize=7,
                xytext=(3, 5),
                textcoords="offset points",
            )
        return f"{CAPTIONS[figure]} (epochs beside each point; 95% intervals)."

    return function


CAPTIONS = {
    "decay": "Figure 7: the decay rate of the exponential schedule",
    "validation-decay": "Figure 8: the factor of the validation schedule",
    "learning-rate": "Figure 9: what the learning rate falls to, from 0.3 over 10 epochs",
    "hidden": "Figure 10: hidden units",
    "initial-60": "Figure 11 (a): the first noise multiplier, at 60 epochs",
    "initial-rate": "Figure 11 (b): the first noise multiplier, at decay 0.015",
}


def _other(figure: str, caption: str) -> Draw:
    def function(results: Results, axes: Any) -> str | None:
        found = results.of(figure)
        for kind, one in found.items():
            if kind in COLOURS:
                axes.plot(*one.curve("test_accuracy"), label=kind, color=COLOURS[kind], linewidth=1.4)
        axes.set_xlabel("epochs")
        axes.set_ylabel("test accuracy")
        if found:
            axes.legend(fontsize=8)
        return caption if found else None

    return function


FIGURES: dict[str, Draw] = {
    "figure-04": _noise,
    "figure-05": _schedules,
    "figure-06": _fixed_length,
    "figure-07": _against("decay", "decay rate", ("table2", "exponential", "0.01"), log=True),
    "figure-08": _against("validation-decay", "factor", ("table2", "validation", "0.7")),
    "figure-09": _against("learning-rate", "final learning rate", None),
    "figure-10": _against("hidden", "hidden units", None),
    "figure-11a": _against("initial-60", "first noise multiplier", ("length", "exponential 60", "10")),
    "figure-11b": _against("initial-rate", "first noise multiplier", None),
    "figure-12": _accuracy_in_training,
    "figure-13": _privacy_in_training,
    "figure-14": _other("cancer", "Figure 14: test accuracy on the Cancer data while training."),
    "figure-15": _other("cifar", "Figure 15: test accuracy on CIFAR-10 while training."),
}
