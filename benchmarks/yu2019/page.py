"""What the page of Yu et al. 2019 says: its tables and numbers, from `trials.csv`, `curves.csv` and arithmetic.

Not here: what is trained (`cases.py`), arithmetic (`accounting.py`), pictures of trainings (`trainings.py`), the words
(`page.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.pages.rows import MISSING, Rows, markdown, side
from benchmarks.yu2019 import accounting, cases, sweeps, trainings
from benchmarks.yu2019.cases import CANCER_RATES, DECAYS, EPOCHS, NON_PRIVATE, SCHEDULES

CASES = cases.CASES
METRICS = ("epochs", "rho", "test_accuracy", "nonprivate_train_accuracy", "chosen_candidate", "validation_accuracy")
PUBLISHED = {
    "uniform": 0.919,
    "time": 0.931,
    "step": 0.929,
    "exponential": 0.929,
    "polynomial": 0.932,
    "validation": 0.930,
}
SAME_LENGTH = {"time": 0.925, "step": 0.925, "exponential": 0.929, "polynomial": 0.926}
WITHOUT = {
    "uniform": 0.970,
    "time": 0.957,
    "step": 0.954,
    "exponential": 0.965,
    "polynomial": 0.959,
    "validation": 0.964,
}
PUBLISHED_EPOCHS = {**EPOCHS, "validation": 64}
CANCER = {"uniform": "about .92", "exponential": "about .95", "validation": "about .94", "non-private": ".96"}
CANDIDATES = ("uniform", "exponential", "step")
QUOTED = (
    ".001953125 .01 .015 .02 .05 .07 .1 .15 .2 .4 .78125 .808 .9 .919 .931 .99 1.107 1.25 1.37 1.56 1.6 1.67 2.37 6.25"
    " 21.5 34.3"
)


def said(rows: Rows) -> Mapping[str, str]:
    """Every `${name}` of `page.md`."""
    count, hits = accounting.chance()
    return {
        "table2": _table_2(rows),
        "controls": _controls(rows),
        "as_published": _as_published(rows),
        "without": _without(rows),
        "cancer": _cancer(rows),
        "cancer_rates": _cancer_rates(rows),
        "selection": _selection(rows),
        "validation_floor": f"{_floor(rows):.1f}",
        "validation_end": _end(rows),
        "cancer_peak": _peak(rows),
        "table3": _table_3(),
        "strong": markdown(
            ("delta of a step", "slack delta", "slack delta / 2", "slack delta / k"), accounting.strong_composition()
        ),
        "conventions": f"{count:,}",
        "hits": str(hits),
        "zcdp": f"{accounting.epsilon('zcdp', 400):.4f}",
        "zcdp_rs": f"{accounting.epsilon('zcdp-rs', 400):.4f}",
        "moments": f"{accounting.epsilon('moments', 400):.4f}",
        "pld": f"{accounting.epsilon('pld', 400):.4f}",
        "crossing": str(accounting.crossing()),
        "strong_best": f"{accounting.epsilon('strong-composition', 400):.2f}",
        "stale": _stale(rows),
        "gains": _gains(rows),
        "gain_exponential": rows.gain(("table2", "exponential"), ("table2", "uniform")),
        "selection_costs": _selection_costs(rows),
        "uniform": rows.text("table2", "uniform"),
        "furthest": f"{100 * max(abs(mean - PUBLISHED[kind]) for kind, mean in _means(rows).items()):.1f}",
        "refuted": _refuted(rows),
        "verdicts": sweeps.verdicts(rows),
        "judged": sweeps.sentence(rows),
        "layers": sweeps.layers(rows),
        "cifar": sweeps.cifar(rows),
        "cifar_rates": sweeps.cifar_rates(rows),
        "cancer_exponential": rows.gain(("cancer", "exponential"), ("cancer", "uniform")),
    }


def _means(rows: Rows) -> dict[str, float]:
    told = {kind: rows.summary("table2", kind) for kind in SCHEDULES}
    return {kind: one.mean for kind, one in told.items() if one is not None}


def _refuted(rows: Rows) -> str:
    """What the intervals say of a gain of one point."""
    found = {kind: rows.minus(("table2", kind), ("table2", "uniform")) for kind in SCHEDULES if kind != "uniform"}
    below = [kind for kind, one in found.items() if side(one, 0.01) == -1]
    above = [kind for kind, one in found.items() if side(one) == 1]
    worse = [kind for kind, one in found.items() if side(one) == -1]
    return (
        f"The 95% interval is entirely below one point for {_list(below)}; above zero for {_list(above)};"
        f" below zero for {_list(worse)}."
    )


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _stale(rows: Rows) -> str:
    if not rows.stale:
        return "No row of this page is stale."
    named = ", ".join(f"{table}/{name}" for table, name in rows.stale)
    return f"Stale, and marked so, because their recipe or the code behind it has changed since: {named}."


def _gains(rows: Rows) -> str:
    """The gain of each schedule over uniform noise: at equal budget, at equal epochs, with the published noise."""
    lines = []
    for kind in SCHEDULES:
        if kind == "uniform":
            continue
        cells = [rows.gain(("table2", kind), ("table2", "uniform")), "", ""]
        if kind in DECAYS:
            cells[1:] = [
                rows.gain(("table2", kind), ("control", kind)),
                rows.gain(("as-published", kind), ("as-published", "uniform")),
            ]
        lines.append([kind, *cells])
    return markdown(("schedule", "same budget", "same epochs", "published noise, twice the budget"), lines)


def _selection_costs(rows: Rows) -> str:
    """The difference between private selection and each candidate trained on all records, paired by seed."""
    costs = {kind: rows.gain(("selection", "private selection"), ("table2", kind)) for kind in CANDIDATES}
    return ", ".join(f"{kind} {cost}" for kind, cost in costs.items())


def _rho(rows: Rows, table: str, name: str) -> str:
    found = rows.of(table, name)
    return "" if found is None else f"{found['rho'].iloc[0]:.6g}"


def _table_2(rows: Rows) -> str:
    header = ("schedule", "epochs, paper", "ours", "test accuracy, paper", "ours", "trials", "over uniform, paper",
              "ours, same seeds", "rho")  # fmt: skip
    lines = []
    for kind in SCHEDULES:
        theirs = "" if kind == "uniform" else f"{PUBLISHED[kind] - PUBLISHED['uniform']:+.3f}"
        gain = "" if kind == "uniform" else rows.gain(("table2", kind), ("table2", "uniform"))
        lines.append(
            [kind, str(PUBLISHED_EPOCHS[kind]), rows.epochs("table2", kind), f"{PUBLISHED[kind]:.3f}",
             rows.text("table2", kind), rows.n("table2", kind), theirs, gain, _rho(rows, "table2", kind)]
        )  # fmt: skip
    return markdown(header, lines)


def _controls(rows: Rows) -> str:
    if not rows.has("control"):
        return MISSING
    header = ("control of", "epochs", "test accuracy, paper", "ours", "trials", "what the decay adds, paper",
              "ours, same seeds", "what fewer epochs add, ours")  # fmt: skip
    return markdown(
        header,
        [
            [
                kind,
                str(EPOCHS[kind]),
                f"{SAME_LENGTH[kind]:.3f}",
                rows.text("control", kind),
                rows.n("control", kind),
                f"{PUBLISHED[kind] - SAME_LENGTH[kind]:+.3f}",
                rows.gain(("table2", kind), ("control", kind)),
                rows.gain(("control", kind), ("table2", "uniform")),
            ]
            for kind in DECAYS
        ],
    )


def _as_published(rows: Rows) -> str:
    if not rows.has("as-published"):
        return MISSING
    header = (
        "schedule",
        "paper",
        "ours",
        "trials",
        "over uniform, paper",
        "ours, same seeds",
        "its rho",
        "its epsilon",
    )
    lines = []
    for kind in ("uniform", *DECAYS):
        found = rows.of("as-published", kind)
        theirs = "" if kind == "uniform" else f"{PUBLISHED[kind] - PUBLISHED['uniform']:+.3f}"
        gain = "" if kind == "uniform" else rows.gain(("as-published", kind), ("as-published", "uniform"))
        spent = "" if found is None else f"{found['epsilon'].iloc[0]:.3f}"
        lines.append(
            [kind, f"{PUBLISHED[kind]:.3f}", rows.text("as-published", kind), rows.n("as-published", kind), theirs,
             gain, _rho(rows, "as-published", kind), spent]
        )  # fmt: skip
    return markdown(header, lines)


def _without(rows: Rows) -> str:
    if not rows.has("non-private"):
        return MISSING
    lines = []
    for kind in SCHEDULES:
        epochs = PUBLISHED_EPOCHS[kind]
        cells = []
        for name in NON_PRIVATE:
            curve = rows.curve("non-private", name, "test_accuracy")
            cells.append(MISSING if curve is None else f"{curve[epochs]:.4f}")
        lines.append([kind, str(epochs), f"{WITHOUT[kind]:.3f}", *cells])
    return markdown(("as long as", "epochs", "test accuracy, paper", *NON_PRIVATE), lines)


def _cancer(rows: Rows) -> str:
    lines = [
        [kind, text, rows.text("cancer", kind), rows.n("cancer", kind), rows.epochs("cancer", kind),
         "" if kind == "uniform" else rows.gain(("cancer", kind), ("cancer", "uniform"))]
        for kind, text in CANCER.items()
    ]  # fmt: skip
    return markdown(("schedule", "paper (Figure 14 and text)", "ours", "trials", "epochs", "over uniform"), lines)


def _cancer_rates(rows: Rows) -> str:
    lines = []
    for rate in CANCER_RATES:
        one, two = f"uniform, rate {rate:g}", "validation" if rate == 2 else f"validation, rate {rate:g}"
        if rows.of("cancer", one) is None:
            continue
        lines.append(
            [f"{rate:g}", rows.text("cancer", one), rows.text("cancer", two),
             rows.gain(("cancer", two), ("cancer", one)), rows.epochs("cancer", two)]
        )  # fmt: skip
    return markdown(("learning rate", "uniform", "validation", "validation over uniform", "its epochs"), lines)


def _floor(rows: Rows) -> float:
    """Where the validation schedule of Cancer would be if it fell whenever it may, for as long as any trial trains."""
    found = rows.of("cancer", "validation")
    longest = math.nan if found is None else float(found["epochs"].max())
    return 35 * 0.99 ** (longest / 50)


def _end(rows: Rows) -> str:
    noise = rows.curve("cancer", "validation", "noise_multiplier")
    return MISSING if noise is None else f"{noise.iloc[-1]:.1f}"


def _peak(rows: Rows) -> str:
    """The last epoch at which the mean curve of a private schedule of Cancer is at its best."""
    curves = [rows.curve("cancer", kind, "test_accuracy") for kind in ("uniform", "exponential", "validation")]
    return str(max((int(curve.idxmax()) for curve in curves if curve is not None), default=0))


def _selection(rows: Rows) -> str:
    found = rows.of("selection", "private selection")
    if found is None:
        return MISSING
    lines = [
        ["private selection", rows.text("selection", "private selection"), rows.n("selection", "private selection")]
    ]
    lines += [[f"{kind}, all records", rows.text("table2", kind), rows.n("table2", kind)] for kind in CANDIDATES]
    chosen = [CANDIDATES[int(index)] for index in found["chosen_candidate"]]
    return markdown(("", "test accuracy", "trials"), lines) + f"\n\nChosen: {', '.join(chosen)}."


def _table_3() -> str:
    lines = [
        [kind, *(f"{k:.4f} ({accounting.solved(kind, 30 + 10 * i):.4f})" for i, k in enumerate(row))]
        for kind, row in accounting.TABLE_3.items()
    ]
    return markdown(("decay", *(f"{n} epochs" for n in range(30, 101, 10))), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Every figure."""
    return {**{name: make() for name, make in accounting.FIGURES.items()}, **trainings.figures(rows)}
