"""What the page of the lectures says: measured excess risk beside what its theorem allows, from `trials.csv`.

Not here: what is trained (`page.yaml`), networks (`networks.py`), the words (`page.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.lectures import SPEC, networks
from benchmarks.pages.drawing import errorbars
from benchmarks.pages.rows import MISSING, Rows, markdown, side

CASES, METRICS = SPEC.cases, SPEC.metrics
RECORDS, EPSILONS = (140, 280, 560), (0.3, 0.9, 3.0, 9.0)
TITLES = {
    "dp-gd": "DP-GD, 300 full gradients, average",
    "single": "DP-SGD, one record a step, n^2 steps, last iterate",
    "lemma": "the same with the noise of Lemma 15.5",
    "strong": "one record a step, with an L2 term of .1",
}
EXCESS, BOUND = "nonprivate_excess_risk", "excess_risk_bound"


def said(rows: Rows) -> Mapping[str, str]:
    """Every `${name}` of `page.md`."""
    found = {f"table_{kind.replace('dp-gd', 'full')}": _table(rows, kind) for kind in TITLES}
    return {
        **found,
        **SPEC.said(rows),
        **networks.said(rows),
        "slopes": _slopes(rows),
        "pairs": str(sum(_pairs(rows).values())),
        "worse": str(_both(rows).count(1)),
        "better": str(_both(rows).count(-1)),
        "both": str(len(_both(rows))),
        "held": str(_pairs(rows)[True]),
        "least": f"{min(_looseness(rows)):.1f}",
        "most": f"{max(_looseness(rows)):,.0f}",
    }


def _budgets(kind: str) -> list[float]:
    """Lemma 15.5 is stated for epsilon below 1."""
    return [epsilon for epsilon in EPSILONS if epsilon < 1 or kind != "lemma"]


def _bound(rows: Rows, kind: str, name: str) -> float:
    found = rows.of(kind, name)
    return math.nan if found is None else float(found[BOUND].mean())


def _table(rows: Rows, kind: str) -> str:
    """A line an epsilon, a column an n: measured, and what the theorem allows."""
    lines = []
    for epsilon in _budgets(kind):
        cells = []
        for records in RECORDS:
            name = f"{records} {epsilon:g}"
            if rows.of(kind, name) is None:
                cells.append(MISSING)
                continue
            accuracy = rows.summary(kind, name)
            assert accuracy is not None
            cells.append(f"{rows.text(kind, name, EXCESS, 3)} of {_bound(rows, kind, name):,.1f} ({accuracy.mean:.3f})")
        lines.append([f"{epsilon:g}", *cells])
    return markdown(("epsilon", *(f"n = {records}" for records in RECORDS)), lines)


def _trained(rows: Rows) -> list[tuple[str, str]]:
    return [key for key in rows.cases if key[0] in TITLES and rows.of(*key) is not None]


def _pairs(rows: Rows) -> dict[bool, int]:
    """How many cases keep their bound with the whole interval, and how many do not."""
    found = {True: 0, False: 0}
    for kind, name in _trained(rows):
        measured = rows.summary(kind, name, EXCESS)
        assert measured is not None
        found[measured.mean + (measured.margin or 0.0) <= _bound(rows, kind, name)] += 1
    return found


def _both(rows: Rows) -> list[int | None]:
    """Whether one record a step leaves more risk than full gradients at the same n and epsilon, less (-1), or even."""
    names = [name for kind, name in _trained(rows) if kind == "single"]
    return [side(rows.minus(("single", name), ("dp-gd", name), EXCESS)) for name in names]


def _looseness(rows: Rows) -> list[float]:
    """Bound over measured excess risk, a case each."""
    found = []
    for kind, name in _trained(rows):
        measured = rows.summary(kind, name, EXCESS)
        assert measured is not None
        found.append(_bound(rows, kind, name) / measured.mean)
    return found or [math.nan]


def _slopes(rows: Rows) -> str:
    """Powers of n and of 1 / epsilon that measurements and theorems fall by, least squares on logarithms."""
    lines = []
    for kind, title in TITLES.items():
        points = []
        for table, name in _trained(rows):
            measured = rows.summary(table, name, EXCESS)
            if table == kind and measured is not None and measured.mean > 0:
                records, epsilon = (float(part) for part in name.split())
                points.append((records, epsilon, measured.mean, _bound(rows, kind, name)))
        frame = pd.DataFrame(points, columns=["n", "epsilon", "measured", "bound"])
        powers = [_power(frame, axis, column) for axis in ("n", "epsilon") for column in ("measured", "bound")]
        lines.append([title, *("" if math.isnan(power) else f"{power:.2f}" for power in powers)])
    return markdown(("method", "n: measured", "n: theorem", "epsilon: measured", "epsilon: theorem"), lines)


def _power(frame: pd.DataFrame, axis: str, column: str) -> float:
    """The slope over `axis` with the other held, all values of the other together."""
    other = "epsilon" if axis == "n" else "n"
    covariance = variance = 0.0
    for _, group in frame.groupby(other):
        x, y = (group[name].map(math.log) for name in (axis, column))
        covariance += float(((x - x.mean()) * (y - y.mean())).sum())
        variance += float(((x - x.mean()) ** 2).sum())
    return covariance / variance if variance else math.nan


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Of excess risk, and of networks."""
    return {"excess-risk": _risks(rows), "networks": networks.picture(rows)}


def _risks(rows: Rows) -> Figure:
    """Measured excess risk and its bound over epsilon, a line an n."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 3, sharey=True), ("dp-gd", "single", "strong"), strict=True):
        for number, records in enumerate(RECORDS):
            epsilons = [e for e in _budgets(kind) if rows.of(kind, f"{records} {e:g}") is not None]
            told = {e: rows.summary(kind, f"{records} {e:g}", EXCESS) for e in epsilons}
            bounds = [_bound(rows, kind, f"{records} {e:g}") for e in epsilons]
            errorbars(axes, told, fmt="o-", color=f"C{number}", capsize=3, label=f"n = {records}")
            axes.plot(epsilons, bounds, ":", color=f"C{number}")
        axes.set(xscale="log", yscale="log", xlabel="epsilon", title=TITLES[kind])
        axes.title.set_fontsize(8)
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel("excess risk: dots measured, dotted the bound")
    figure.axes[0].legend(fontsize=8)
    return figure
