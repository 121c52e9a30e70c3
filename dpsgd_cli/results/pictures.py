"""Pictures of a comparison, as PNG and SVG: accuracy and objective against epsilon, and three things by epoch.

Colours are Okabe and Ito's (distinguishable without colour vision); markers differ too. Curves by epoch are means over
trials with 95% intervals. Not here: what is compared (`comparison.py`).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.results.comparison import WORDS, Comparison, Entry
from dpsgd_cli.results.result import summarise

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
OBJECTIVES = {"nonprivate_train_objective": "training objective", "nonprivate_train_loss": "training loss"}
MOST_PANELS = 4


def draw(comparison: Comparison, out: Path) -> dict[str, Path]:
    """Draw every picture there is data for; name -> PNG file (an SVG of the same name lies beside it)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dpsgd_cli.results.leftovers import hidden_name

    plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "svg.hashsalt": "dpsgd"})
    styles = _styles(comparison)
    histories = {id(entry): _read_history(entry.directory) for entry in comparison.entries}
    metric = comparison.metric
    made: dict[str, Path] = {}
    for name, figure in (
        ("metric-by-epsilon", _by_epsilon(plt, comparison, styles, metric, WORDS.get(metric, metric))),
        ("objective-by-epsilon", _objective(plt, comparison, styles)),
        ("metric-by-epoch", _by_epoch(plt, comparison, styles, histories, metric)),
        ("noise-by-epoch", _by_epoch(plt, comparison, styles, histories, "noise_multiplier")),
        ("budget-by-epoch", _by_epoch(plt, comparison, styles, histories, "epsilon")),
    ):
        if figure is None:
            continue
        for ending in ("svg", "png"):
            place = out / f"{name}.{ending}"
            temporary = hidden_name(place)
            figure.savefig(temporary, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else {})
            temporary.replace(place)
        plt.close(figure)
        made[name] = out / f"{name}.png"
    return made


def _styles(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Colour, marker and label of each method; the label names the adjacency where there is more than one."""
    styles = {}
    several = len(comparison.adjacencies) > 1
    for number, entry in enumerate({entry.method: entry for entry in comparison.entries}.values()):
        label = f"{entry.method} ({entry.adjacency})" if several and entry.adjacency != "none" else entry.method
        label = f"{entry.method} (no privacy)" if entry.adjacency == "none" else label
        styles[entry.method] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "label": label,
        }
    return styles


def _by_epsilon(plt: Any, comparison: Comparison, styles: dict[str, dict[str, Any]], metric: str, words: str) -> Any:
    with_metric = [e for e in comparison.entries if (e.document["metrics"].get(metric) or {}).get("mean") is not None]
    private = [entry for entry in with_metric if entry.epsilon is not None]
    if not private:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for number, (method, style) in enumerate(styles.items()):
        apart = 1 + 0.012 * (number - (len(styles) - 1) / 2)  # so that intervals do not hide each other
        points = sorted(((e.epsilon or 0.0), e.document["metrics"][metric]) for e in private if e.method == method)
        if points:
            spread = [found["ci95"] or 0.0 for _, found in points]
            means = [found["mean"] for _, found in points]
            axes.errorbar([x * apart for x, _ in points], means, spread, capsize=3, markersize=5, **style)
        for entry in with_metric:
            if entry.method == method and entry.epsilon is None:
                axes.axhline(
                    entry.document["metrics"][metric]["mean"], color=style["color"], ls="--", label=style["label"]
                )
    values = sorted({entry.epsilon for entry in private if entry.epsilon})
    if len(values) > 1 and values[-1] / values[0] > 5:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(plt.FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(plt.NullFormatter())
        targets = sorted({entry.target for entry in private if entry.target}) or values
        axes.set_xticks(targets if len(targets) <= 10 else targets[:: len(targets) // 10])
    deltas = sorted({entry.privacy["delta"] for entry in private if entry.privacy["delta"]})
    axes.set_xlabel(f"epsilon at delta {', '.join(f'{delta:g}' for delta in deltas)}{_one_adjacency(comparison)}")
    axes.set_ylabel(f"{words} (mean, 95% interval)")
    _within_accuracies(axes, metric)
    _legend(axes, styles)
    return figure


def _one_adjacency(comparison: Comparison) -> str:
    return f" ({comparison.adjacencies[0]})" if len(comparison.adjacencies) == 1 else ""


def _legend(axes: Any, styles: dict[str, Any]) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    if len(unique) <= 2 * len(COLOURS) and unique:
        axes.legend(unique.values(), unique.keys(), fontsize=8, framealpha=0.9)


def _objective(plt: Any, comparison: Comparison, styles: dict[str, dict[str, Any]]) -> Any:
    """What all have: objectives, which know their own penalties only, or losses."""
    for name, words in OBJECTIVES.items():
        if all(name in entry.document["metrics"] for entry in comparison.entries):
            return _by_epsilon(plt, comparison, styles, name, f"{words}, not private")
    return None


def _by_epoch(
    plt: Any, comparison: Comparison, styles: dict[str, dict[str, Any]], histories: dict[int, Any], column: str
) -> Any:
    """One panel for each budget, most of them side by side; means over trials with a band of 95%."""
    titles: dict[float | None, list[Entry]] = {}
    for entry in comparison.entries:
        if any(column in row and row[column] for row in histories[id(entry)]):
            titles.setdefault(entry.target, []).append(entry)
    if len(titles) > 1:
        # what was not matched to a budget stands beside every budget
        everywhere = titles.pop(None, [])
        titles = {target: [*entries, *everywhere] for target, entries in titles.items()}
    panels = sorted(titles.items(), key=lambda one: -1.0 if one[0] is None else one[0])[-MOST_PANELS:]
    if not panels:
        return None
    width = 7 if len(panels) == 1 else 3.6 * len(panels)
    figure, grid = plt.subplots(1, len(panels), figsize=(width, 4), sharey=column != "epsilon", squeeze=False,
                                layout="constrained")  # fmt: skip
    for axes, (target, entries) in zip(grid[0], panels, strict=True):
        for entry in entries:
            _curve(axes, histories[id(entry)], column, styles[entry.method])
        axes.set_xlabel("epoch")
        axes.set_title("" if target is None else f"epsilon {target:g}", fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
    if column == "noise_multiplier":
        grid[0][0].set_yscale("log")
        for axes in grid[0]:
            axes.yaxis.set_major_formatter(plt.FuncFormatter(lambda y, _: f"{y:g}"))
            axes.yaxis.set_minor_formatter(plt.FuncFormatter(lambda y, _: f"{y:g}" if f"{y:g}"[0] in "25" else ""))
    names = {"noise_multiplier": "noise multiplier", "epsilon": "epsilon spent"}
    grid[0][0].set_ylabel(names.get(column, WORDS.get(column, column)))
    _within_accuracies(grid[0][0], column)
    _legend(grid[0][-1], styles)
    return figure


def _curve(axes: Any, history: Sequence[dict[str, str]], column: str, style: dict[str, Any]) -> None:
    by_epoch = _by_epoch_of_all(history, column)
    epochs = sorted(by_epoch)
    found = [summarise(by_epoch[epoch]) for epoch in epochs]
    means = [one["mean"] for one in found]
    if len(epochs) == 1 and "(no privacy)" in style["label"]:
        axes.axhline(means[0], color=style["color"], ls="--", label=style["label"])
        return
    alone = {"marker": style["marker"], "markersize": 5} if len(epochs) == 1 else {}
    axes.plot(epochs, means, color=style["color"], label=style["label"], **alone)
    spread = [one["ci95"] or 0.0 for one in found]
    if any(spread) and column != "noise_multiplier":
        low = [mean - half for mean, half in zip(means, spread, strict=True)]
        high = [mean + half for mean, half in zip(means, spread, strict=True)]
        axes.fill_between(epochs, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _by_epoch_of_all(history: Sequence[dict[str, str]], column: str) -> dict[int, list[float]]:
    """Epoch -> values. A trial that has ended still has its weights and has spent its budget; it adds noise no more."""
    trials: dict[str, dict[int, float]] = {}
    for row in history:
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


def _within_accuracies(axes: Any, metric: str) -> None:
    """Student's intervals may pass 0 and 1, which no accuracy does."""
    if metric.endswith("accuracy"):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0.0), min(high, 1.0))


def _read_history(directory: Path) -> list[dict[str, str]]:
    with (directory / "history.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
