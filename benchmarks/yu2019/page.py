"""What the page of Yu et al. 2019 says beside the tables and claims of `page.yaml`: numbers of sentences, figures.

Not here: arithmetic (`accounting.py`), pictures of trainings (`trainings.py`), the words (`page.md`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from benchmarks.pages import claims
from benchmarks.pages.rows import MISSING, Rows, markdown, side
from benchmarks.yu2019 import NON_PRIVATE, SCHEDULES, SPEC, accounting, trainings

CASES, METRICS = SPEC.cases, SPEC.metrics
PUBLISHED = {one["kind"]: float(one["paper"]) for one in SPEC.content["tables"]["table2"]["rows"]}
LENGTHS = {one["kind"]: one["length"] for one in SPEC.content["tables"]["table2"]["rows"]}
WITHOUT = {
    "uniform": 0.970,
    "time": 0.957,
    "step": 0.954,
    "exponential": 0.965,
    "polynomial": 0.959,
    "validation": 0.964,
}
CANDIDATES = ("uniform", "exponential", "step")
PUBLISHED_CIFAR = {"uniform": "", "exponential": "+.02", "validation": "+.04", "non-private": ".58"}


def said(rows: Rows) -> Mapping[str, str]:
    """Every `${name}` of `page.md`."""
    count, hits = accounting.chance()
    tables = SPEC.said(rows)
    return tables | {
        "without": _without(rows),
        "selection": tables["selection"] + _chosen(rows),
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
        "gain_exponential": rows.gain(("table2", "exponential"), ("table2", "uniform")),
        "selection_costs": _selection_costs(rows),
        "uniform": rows.text("table2", "uniform"),
        "furthest": f"{100 * max(abs(mean - PUBLISHED[kind]) for kind, mean in _means(rows).items()):.1f}",
        "refuted": _refuted(rows),
        "verdicts": claims.verdicts(rows, SPEC.claims),
        "judged": claims.sentence(rows, SPEC.claims),
        "cifar": _cifar(rows),
        "cifar_rates": _cifar_rates(rows),
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


def _selection_costs(rows: Rows) -> str:
    """The difference between private selection and each candidate trained on all records, paired by seed."""
    costs = {kind: rows.gain(("selection", "private selection"), ("table2", kind)) for kind in CANDIDATES}
    return ", ".join(f"{kind} {cost}" for kind, cost in costs.items())


def _without(rows: Rows) -> str:
    if not rows.has("non-private"):
        return MISSING
    lines = []
    for kind in SCHEDULES:
        epochs = LENGTHS[kind]
        cells = []
        for name in NON_PRIVATE:
            curve = rows.curve("non-private", name, "test_accuracy")
            cells.append(MISSING if curve is None else f"{curve[epochs]:.4f}")
        lines.append([kind, str(epochs), f"{WITHOUT[kind]:.3f}", *cells])
    return markdown(("as long as", "epochs", "test accuracy, paper", *NON_PRIVATE), lines)


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


def _chosen(rows: Rows) -> str:
    """Which candidates private selection took."""
    found = rows.of("selection", "private selection")
    return (
        "" if found is None else f"\n\nChosen: {', '.join(CANDIDATES[int(one)] for one in found['chosen_candidate'])}."
    )


def _table_3() -> str:
    lines = [
        [kind, *(f"{k:.4f} ({accounting.solved(kind, 30 + 10 * i):.4f})" for i, k in enumerate(row))]
        for kind, row in accounting.TABLE_3.items()
    ]
    return markdown(("decay", *(f"{n} epochs" for n in range(30, 101, 10))), lines)


def _cifar(rows: Rows) -> str:
    """Figure 15, beside what the text says of it."""
    if any(rows.of("cifar", kind) is None for kind in ("uniform", "exponential")):
        return MISSING
    lines = []
    for kind, paper in PUBLISHED_CIFAR.items():
        key, gain, share = ("cifar", kind), "", ""
        if kind in ("exponential", "validation"):
            gain, share = rows.gain(key, ("cifar", "uniform")), _share(rows, kind)
        trained = [MISSING, "", ""] if rows.of(*key) is None else [rows.text(*key), rows.n(*key), rows.epochs(*key)]
        lines.append([kind, paper, *trained, gain, share])
    header = ("schedule", "paper: over uniform; without privacy", "ours", "trials", "epochs", "over uniform, ours",
              "share of the gap, ours")  # fmt: skip
    return markdown(header, lines)


def _share(rows: Rows, kind: str) -> str:
    """What part of the gap between uniform noise and none a schedule closes, of means."""
    gain = rows.minus(("cifar", kind), ("cifar", "uniform"))
    gap = rows.minus(("cifar", "non-private"), ("cifar", "uniform"))
    return MISSING if gain is None or gap is None else f"{gain.mean / gap.mean:.0%}"


def _cifar_rates(rows: Rows) -> str:
    """What was tried, on validation records, and whether what is trained is its best."""
    tried: dict[str, dict[float, float]] = {}
    for table, name in rows.cases:
        found = rows.summary(table, name, "validation_accuracy") if table == "cifar rate" else None
        if found is not None:
            kind, _, rate = name.rpartition(" ")
            tried.setdefault(kind, {})[float(rate)] = found.mean
    taken = {one["kind"]: one["rate"] for one in SPEC.content["cases"][-1]["for"]["taken"]}
    told = []
    for kind, means in tried.items():
        listed = ", ".join(f"{rate:g}: {mean:.4f}" for rate, mean in means.items())
        best = max(means, key=lambda rate: means[rate])
        fits = "taken" if best == taken[kind] else f"not taken: {taken[kind]:g} was"
        told.append(f"{kind} by learning rate {listed} (the best, {best:g}, was {fits})")
    return "; ".join(told) or MISSING


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Every figure."""
    return {**{name: make() for name, make in accounting.FIGURES.items()}, **trainings.figures(rows)}
