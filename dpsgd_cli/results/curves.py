"""Curves by epoch: reading of `history.csv`, and drawing as one SVG element for a page.

matplotlib is imported when the first is drawn; pyplot is not used, because it is slow to import. `pictures.py` draws
comparisons.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import DataError
from dpsgd_cli.results.result import summarise

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
_MOST = 1 << 53


def read(path: Path) -> list[dict[str, str]]:
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


def draw(panels: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Draw one panel per name: the mean over trials at each epoch, with its 95% interval where there are several.

    `panels` maps an axis title to the values of all trials by epoch. Returns the SVG element as text.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpsgd", "font.size": 10}):
        figure = Figure(figsize=(4.6 * len(panels), 3.2))
        # margins by hand: a layout engine draws everything twice, which doubles the time
        figure.subplots_adjust(left=0.17 / len(panels), right=0.98, bottom=0.16, top=0.96, wspace=0.3)
        FigureCanvasSVG(figure)
        for axes, (title, values) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            found = {epoch: summarise(values[epoch]) for epoch in sorted(values)}
            points = {epoch: one for epoch, one in found.items() if one["mean"] is not None}
            means = [one["mean"] for one in points.values()]
            spreads = [one["ci95"] or 0.0 for one in points.values()]
            axes.plot(list(points), means, color=COLOURS[0], marker="o" if len(points) < 13 else "", markersize=3)
            if any(spreads):
                low = [mean - half for mean, half in zip(means, spreads, strict=True)]
                high = [mean + half for mean, half in zip(means, spreads, strict=True)]
                axes.fill_between(list(points), low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
            axes.set(xlabel="epoch", ylabel=title)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
