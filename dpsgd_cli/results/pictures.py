"""Pictures: curves by epoch from `history.csv`, and those of a comparison, as PNG and SVG.

A comparison shows the metric (and the objective) by budget, and three quantities by epoch: means over trials with 95%
intervals. Colours, markers and dashes differ, and later curves are thinner than earlier ones, so that coinciding curves
are all visible. matplotlib, which is slow to import, is imported when the first picture is drawn.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.engine.metrics import in_words
from dpsgd_cli.errors import DataError
from dpsgd_cli.results.charts import COLOURS, Chart, beside
from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.files import write_whole
from dpsgd_cli.results.result import NONPRIVATE, summarise

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST = 1 << 53
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MOST_PANELS = 4
MOST_NAMES = 60
ONE_BUDGET = 1.01
FAR_APART = 5
"""Ratio of an axis's ends above which it is logarithmic."""
Styles = dict[str, dict[str, Any]]


def read_history(path: Path) -> list[dict[str, str]]:
    """Return the rows; an empty cell is an empty text. Raises DataError if the table is not that of a result."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if None in row or None in row.values():
                raise ValueError("a row has more or fewer cells than the header")
            if not (0 <= int(row["trial"]) < _MOST and 0 <= int(row["epoch"]) < _MOST):
                raise ValueError("no number of a trial or epoch")
            for name in row:
                if name not in ("trial", "seed", "epoch") and row[name]:
                    float(row[name])
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: is no table of epochs ({type(error).__name__}); restore it, or train again") from None
    return rows


def by_epoch(rows: Sequence[dict[str, str]], column: str) -> dict[int, list[float]]:
    """Return the values of all trials by epoch, counted from 1.

    A trial that has ended keeps its last value: its weights and its spent budget stay. It has no noise multiplier any
    more.
    """
    trials: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(column):
            trials.setdefault(row["trial"], {})[int(row["epoch"]) + 1] = float(row[column])
    found: dict[int, list[float]] = {}
    for epoch in sorted({epoch for own in trials.values() for epoch in own}):
        for own in trials.values():
            if epoch in own:
                found.setdefault(epoch, []).append(own[epoch])
            elif epoch > max(own) and column != "noise_multiplier":
                found.setdefault(epoch, []).append(own[max(own)])
    return found


def _bands(values: Mapping[int, Sequence[float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return the epochs with a mean over trials, the mean at each, and the ends of its 95% interval."""
    found = {epoch: summarise(values[epoch]) for epoch in sorted(values)}
    known = [(epoch, one["mean"], one["ci95"] or 0.0) for epoch, one in found.items() if one["mean"] is not None]
    epochs, means = [epoch for epoch, _, _ in known], [mean for _, mean, _ in known]
    return epochs, means, [mean - half for _, mean, half in known], [mean + half for _, mean, half in known]


def draw_curves(panels: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Draw one panel per name: the mean over trials at each epoch, with its 95% interval where there are several.

    `panels` maps an axis title to the values of all trials by epoch. Returns the SVG element as text.
    """
    charts = []
    for title, values in panels.items():
        epochs, means, low, high = _bands(values)
        chart = Chart(430, 300, "epoch", title, whole=True)
        if low != high:
            chart.band(epochs, low, high, COLOURS[0])
        chart.line(epochs, means, COLOURS[0])
        if len(epochs) < 13:
            chart.line(epochs, means, COLOURS[0], kind="points")
        charts.append(chart)
    return beside(charts, len(charts))


def draw(comparison: Comparison, out: Path) -> dict[str, Path]:
    """Draw every picture for which there is data. Returns the PNG files by name; each has an SVG beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "dpsgd"})
    styles = _styles(comparison)
    histories = {id(entry): read_history(entry.file("history.csv")) for entry in comparison.entries}
    metric = comparison.metric
    figures = {
        "metric-by-setting": _by_setting(plt, comparison.entries, metric),
        "metric-by-epsilon": _by_budget(plt, comparison, styles),
        "metric-by-epoch": _by_epoch(plt, comparison, styles, histories, metric),
        "noise-by-epoch": _by_epoch(plt, comparison, styles, histories, "noise_multiplier"),
        "budget-by-epoch": _by_epoch(plt, comparison, styles, histories, "epsilon"),
    }
    made: dict[str, Path] = {}
    hidden = metric.startswith(NONPRIVATE)
    for name, figure in figures.items():
        if figure is None:
            continue
        for ending, metadata in (("svg", {"Date": None}), ("png", {})):
            drawn = io.BytesIO()
            figure.savefig(drawn, format=ending, dpi=150, metadata=metadata, bbox_inches="tight")
            write_whole(out / f"{name}.{ending}", drawn.getvalue(), owner_only=hidden)
        plt.close(figure)
        made[name] = out / f"{name}.png"
    return made


def _styles(comparison: Comparison) -> Styles:
    """Return the style of each method. Its label names the adjacency and the data if there are several."""
    styles = {}
    guarantees, data = len(comparison.adjacencies) > 1, len(comparison.data) > 1
    for number, entry in enumerate({entry.method: entry for entry in comparison.entries}.values()):
        label = f"{entry.method} ({entry.adjacency})" if guarantees and entry.adjacency != "none" else entry.method
        label = f"{entry.method} (no privacy)" if entry.adjacency == "none" else label
        styles[entry.method] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": max(2.6 - 0.4 * number, 1.2),
            "label": f"{label} on {entry.evaluated.name}" if data else label,
        }
    return styles


def _by_setting(plt: Any, entries: Sequence[Entry], metric: str) -> Any:
    """Draw the metric over the one key that a sweep varied, if its values are numbers."""
    keys = {key for entry in entries for key in entry.settings}
    given = [value for entry in entries for value in entry.settings.values() if type(value) in (int, float)]
    if len(keys) != 1 or len(set(given)) < len(entries):
        return None
    found = [entry.document["metrics"].get(metric) or {"mean": None} for entry in entries]
    both = zip(given, found, strict=True)
    points = sorted((x, one["mean"], one["ci95"] or 0.0) for x, one in both if one["mean"] is not None)
    if not points:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    axes.errorbar(*zip(*points, strict=True), capsize=3, markersize=5, marker="o", color=COLOURS[0])
    _scaled(plt, axes.xaxis, axes.set_xscale)
    axes.set_xlabel(keys.pop())
    axes.set_ylabel(f"{in_words(metric)} (mean, 95% interval)")
    _within_accuracies(axes.get_ylim, axes.set_ylim, metric)
    return figure


def _by_budget(plt: Any, comparison: Comparison, styles: Styles) -> Any:
    """Draw the metric by epsilon; by method if all budgets are equal."""
    metric = comparison.metric
    entries = [e for e in comparison.entries if (e.document["metrics"].get(metric) or {}).get("mean") is not None]
    budgets = sorted({_budget(entry) for entry in entries if entry.epsilon})
    if not budgets:
        return None
    deltas = sorted({entry.privacy["delta"] for entry in entries if entry.privacy["delta"]})
    only = f" ({comparison.adjacencies[0]})" if len(comparison.adjacencies) == 1 else ""
    at = f"at delta {', '.join(f'{delta:g}' for delta in deltas)}{only}"
    same = budgets[-1] / budgets[0] < ONE_BUDGET
    words = f"{in_words(metric)} (mean, 95% interval)"
    return (_by_method if same else _by_epsilon)(plt, entries, styles, metric, words, at)


def _budget(entry: Entry) -> float:
    """Return the target epsilon of an entry; without a target, the epsilon that it spent."""
    return entry.target or entry.epsilon or 0.0


def _by_method(plt: Any, entries: Sequence[Entry], styles: Styles, metric: str, words: str, at: str) -> Any:
    """Draw one row for each method. All have the same budget, so epsilon needs no axis."""
    longest = max(len(styles[entry.method]["label"]) for entry in entries)
    size = (max(7, 4 + 0.075 * longest), min(1.3 + 0.42 * len(entries), 24))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for place, entry in enumerate(entries):
        found, style = entry.document["metrics"][metric], styles[entry.method]
        colour, marker, half = style["color"], style["marker"], found["ci95"] or 0.0
        axes.errorbar([found["mean"]], [place], xerr=[half], capsize=3, markersize=6, color=colour, marker=marker)
        if entry.epsilon is None:
            axes.axvline(found["mean"], color=colour, ls=":", lw=1, zorder=0)
    if len(entries) <= MOST_NAMES:
        axes.set_yticks(range(len(entries)), [styles[entry.method]["label"] for entry in entries])
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{len(entries)} results, in the order of the table")
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    first = next(entry for entry in entries if entry.epsilon)
    budget = f"{first.target:g}" if first.target else epsilon_text(_budget(first))
    axes.set_xlabel(words)
    axes.set_title(f"epsilon {budget} {at}", fontsize=10)
    _within_accuracies(axes.get_xlim, axes.set_xlim, metric)
    return figure


def _by_epsilon(plt: Any, entries: Sequence[Entry], styles: Styles, metric: str, words: str, at: str) -> Any:
    """Draw the metric over epsilon. Methods with equal targets are drawn side by side, to keep intervals visible."""
    private = [entry for entry in entries if entry.epsilon]
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    matched = list(dict.fromkeys(entry.method for entry in private if entry.target))
    for method, style in styles.items():
        aside = 1 + 0.012 * (matched.index(method) - (len(matched) - 1) / 2) if method in matched else 1.0
        found = [(_budget(e) * aside, e.document["metrics"][metric]) for e in private if e.method == method]
        points = sorted((x, one["mean"], one["ci95"] or 0.0) for x, one in found)
        if points:
            axes.errorbar(*zip(*points, strict=True), capsize=3, markersize=5, **(style | {"linewidth": 1.5}))
        for entry in entries:
            if entry.method == method and entry.epsilon is None:
                mean = entry.document["metrics"][metric]["mean"]
                axes.axhline(mean, color=style["color"], ls=style["linestyle"], label=style["label"])
    _scaled(plt, axes.xaxis, axes.set_xscale)
    targets = sorted({entry.target for entry in private if entry.target})
    if targets:
        axes.set_xticks(targets if len(targets) <= 10 else targets[:: len(targets) // 10])
    axes.set_xlabel(f"epsilon {'(budget) ' if targets else ''}{at}")
    axes.set_ylabel(words)
    _within_accuracies(axes.get_ylim, axes.set_ylim, metric)
    _legend(axes, styles)
    return figure


def _scaled(plt: Any, axis: Any, set_scale: Any) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks, if its ends are far apart."""
    low, high = axis.get_data_interval()
    if high > FAR_APART * low > 0:
        set_scale("log")
        axis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(plt.NullLocator())
    axis.set_major_formatter(plt.FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(axes: Any, styles: Styles) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if 0 < len(unique) <= 2 * len(COLOURS):
        axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.9)


def _by_epoch(plt: Any, comparison: Comparison, styles: Styles, histories: dict[int, Any], column: str) -> Any:
    """Draw one panel for each budget, up to `MOST_PANELS` of the largest: means over trials with 95% bands."""
    titles: dict[float | None, list[Entry]] = {}
    for entry in comparison.entries:
        if any(column in row and row[column] for row in histories[id(entry)]):
            titles.setdefault(entry.target, []).append(entry)
    if len(titles) > 1:
        # entries without a target budget are shown at every budget
        everywhere = titles.pop(None, [])
        titles = {target: [*entries, *everywhere] for target, entries in titles.items()}
    panels = sorted(titles.items(), key=lambda one: -1.0 if one[0] is None else one[0])[-MOST_PANELS:]
    if not panels:
        return None
    width = 7 if len(panels) == 1 else 3.6 * len(panels)
    shared = {"sharey": column != "epsilon", "squeeze": False, "layout": "constrained"}
    figure, grid = plt.subplots(1, len(panels), figsize=(width, 4), **shared)
    for axes, (target, entries) in zip(grid[0], panels, strict=True):
        for number, entry in enumerate(entries):
            _curve(axes, by_epoch(histories[id(entry)], column), column, styles[entry.method], number / len(entries))
        axes.set_xlabel("epoch")
        axes.set_title("" if target is None else f"epsilon {target:g}", fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if column == "noise_multiplier":
            _scaled(plt, axes.yaxis, axes.set_yscale)
    names = {"noise_multiplier": "noise multiplier", "epsilon": "epsilon spent"}
    grid[0][0].set_ylabel(names.get(column, in_words(column)))
    _within_accuracies(grid[0][0].get_ylim, grid[0][0].set_ylim, column)
    _legend(grid[0][-1], styles)
    return figure


def _curve(axes: Any, values: Mapping[int, Sequence[float]], column: str, style: dict[str, Any], share: float) -> None:
    """Draw one curve with about eight markers, the first of them after a `share` of the way to the second."""
    epochs, means, low, high = _bands(values)
    if len(epochs) == 1 and "(no privacy)" in style["label"]:
        axes.axhline(means[0], color=style["color"], ls=style["linestyle"], label=style["label"])
        return
    every = max(1, -(-len(epochs) // 8))
    marked = (int(share * every), every)
    axes.plot(epochs, means, markersize=6, markerfacecolor="none", markevery=marked, **style)
    if low != high and column != "noise_multiplier":
        axes.fill_between(epochs, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _within_accuracies(limits: Any, set_limits: Any, metric: str) -> None:
    """Limit an axis of accuracies to 0 to 1, which Student's intervals may exceed."""
    if metric.endswith("accuracy"):
        low, high = limits()
        set_limits(max(low, 0.0), min(high, 1.0))
