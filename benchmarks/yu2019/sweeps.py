"""Figures 6 to 11 and 15 and Table IV: their tables, and a verdict on what the paper says of each, from rows.

A claim is a list of contrasts, each a paired difference that the claim says is positive. Not here: what is trained
(`cases.py`), pictures (`trainings.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from benchmarks.pages.rows import MISSING, Rows, Summary, markdown, side, summarised
from benchmarks.yu2019.cases import (
    CIFAR,
    CIFAR_RATE,
    CIFAR_RATES,
    DECAY_RATES,
    DECAYS,
    FACTORS,
    FIRST_NOISES,
    LAST_RATES,
    LAYERS,
    LENGTHS,
    SAME,
    UNITS,
)

Key = tuple[str, str]
KINDS = (*DECAYS, "uniform")
SWEEPS = {
    "decay": [f"{value:g}" for value in DECAY_RATES],
    "factor": [f"{value:g}" for value in FACTORS],
    "rate": [f"{value:g}" for value in LAST_RATES],
    "units": [str(value) for value in UNITS],
    "noise at 60": [str(value) for value in FIRST_NOISES],
    "noise": [str(value) for value in FIRST_NOISES],
    "layers": [str(value) for value in LAYERS],
}
SWEEPS_SAID = {
    "decay": "decay rate k",
    "factor": "factor k",
    "rate": "last learning rate",
    "units": "hidden units",
    "noise at 60": "sigma_0, 60 epochs",
    "noise": "sigma_0, k = .015",
}
"""What each figure's axis says."""
PUBLISHED_LAYERS = {"1": ".931", "2": ".921", "3": ".898"}
PUBLISHED_CIFAR = {"uniform": "", "exponential": "+.02", "validation": "+.04", "non-private": ".58"}
NO_LOSS = 0.005
"""Half a point: a loss that is smaller for certain counts as none."""


def at(table: str, name: object) -> Key:
    """Where a point of a figure was trained."""
    return SAME.get((table, str(name)), (table, str(name)))


@dataclass(frozen=True)
class Contrast:
    """Sum of the accuracies of `plus` less those of `less`, by seed."""

    label: str
    plus: tuple[Key, ...]
    less: tuple[Key, ...]

    def of(self, rows: Rows) -> Summary | None:
        """Over the seeds that all of them have; None where one has no rows."""
        parts = [(1, rows.of(*key)) for key in self.plus] + [(-1, rows.of(*key)) for key in self.less]
        told = [sign * found.set_index("seed")["test_accuracy"] for sign, found in parts if found is not None]
        if len(told) < len(parts):
            return None
        stale = any(rows.is_stale(*key) for key in (*self.plus, *self.less))
        return summarised(pd.concat(told, axis=1, join="inner").sum(axis=1), stale)


@dataclass(frozen=True)
class Claim:
    """What the paper says of a figure: that every contrast is above `-slack`."""

    figure: str
    words: str
    contrasts: tuple[Contrast, ...]
    slack: float = 0.0

    def found(self, rows: Rows) -> list[tuple[str, Summary]]:
        """The contrasts that have rows."""
        told = [(one.label, one.of(rows)) for one in self.contrasts]
        return [(label, one) for label, one in told if one is not None and one.margin is not None]

    def verdict(self, rows: Rows) -> str:
        """`refuted` where a whole interval is below `-slack`, `confirmed` where all are above it."""
        found = [side(one, -self.slack) for _, one in self.found(rows)]
        if not found:
            return MISSING
        if -1 in found:
            return "refuted"
        if set(found) == {1}:
            return "confirmed" if len(found) == len(self.contrasts) else "confirmed as far as it was run"
        return "not decided"

    def evidence(self, rows: Rows) -> str:
        """The differences, or of many how many are on which side."""
        found = self.found(rows)
        if len(found) <= 4:
            return "; ".join(f"{label}: {one.text(signed=True)}" for label, one in found)
        sides = [side(one) for _, one in found]
        least, most = (choose(found, key=lambda pair: pair[1].mean) for choose in (min, max))
        ends = "; ".join(f"{label}: {one.text(signed=True)}" for label, one in (least, most))
        return f"of {len(found)}, {sides.count(1)} above zero and {sides.count(-1)} below; {ends}"


def _beats(table: str, best: object, others: Sequence[object]) -> tuple[Contrast, ...]:
    return tuple(
        Contrast(f"{best} over {other}", (at(table, best),), (at(table, other),))
        for other in others
        if str(other) != str(best)
    )


def claims() -> Iterator[Claim]:
    """What the paper says of each figure."""
    controls = tuple(Contrast(f"{kind}, as in Table II", (("table2", kind),), (("control", kind),)) for kind in DECAYS)
    same_length = controls + tuple(
        Contrast(f"{kind}, {epochs} epochs", (at("length", f"{kind} {epochs}"),), (at("length", f"uniform {epochs}"),))
        for epochs in LENGTHS
        for kind in DECAYS
    )
    yield Claim("Figure 6", "at a fixed number of epochs every decay beats uniform noise", same_length)
    tops = tuple(
        Contrast(f"{kind}, 60 over {other}", (at("length", f"{kind} 60"),), (at("length", f"{kind} {other}"),))
        for kind in DECAYS
        for other in (30, 100)
    )
    yield Claim("Figure 6", "accuracy rises from 30 epochs to 50 or 60, and falls to 100", tops)
    yield Claim("Figure 7", "the best exponential rate is .2", _beats("decay", "0.2", SWEEPS["decay"]))
    yield Claim("Figure 7", "it is .02, if .2 is a misprint", _beats("decay", "0.02", SWEEPS["decay"]))
    lowest = tuple(
        Contrast(f"{value} over 0.005", (at("decay", value),), (at("decay", "0.005"),)) for value in SWEEPS["decay"][1:]
    )
    yield Claim("Figure 7", "the lowest rate is the worst", lowest)
    yield Claim(
        "Figure 8", "the best factor of the validation schedule is .7", _beats("factor", "0.7", SWEEPS["factor"])
    )
    yield Claim(
        "Figure 9",
        "a last learning rate of .01 is too small, of .07 too large",
        _beats("rate", "0.05", ("0.01", "0.07")),
    )
    more = tuple(
        Contrast(f"{units} over 200", (at("units", units),), (at("units", 200),)) for units in SWEEPS["units"][1:]
    )
    yield Claim("Figure 10", "more hidden units cost no accuracy (half a point)", more, NO_LOSS)
    for table, words in (("noise at 60", "at 60 epochs"), ("noise", "at a decay rate of .015")):
        pairs = tuple(Contrast(f"7 over {value}", (at(table, 7),), (at(table, value),)) for value in FIRST_NOISES[1:])
        yield Claim("Figure 11", f"more noise at the start costs accuracy {words}", pairs)
    less = Contrast(
        "7 over 20, at a rate less at 60 epochs",
        (at("noise", 7), at("noise at 60", 20)),
        (at("noise", 20), at("noise at 60", 7)),
    )
    yield Claim("Figure 11", "it costs less at a fixed number of epochs", (less,))
    layers = (*_beats("layers", 1, (2,)), *_beats("layers", 2, (3,)))
    yield Claim("Table IV", "one hidden layer is better than two, two than three (here: in few epochs)", layers)
    for kind in ("exponential", "validation"):
        gain = Contrast(f"{kind} over uniform", (at("cifar", kind),), (at("cifar", "uniform"),))
        yield Claim("Figure 15", f"the {kind} schedule beats uniform noise on CIFAR-10", (gain,))


def verdicts(rows: Rows) -> str:
    """Claim by claim."""
    lines = [[one.figure, one.words, one.evidence(rows), one.verdict(rows)] for one in claims()]
    return markdown(("where", "the paper says", "here, same seeds", "verdict"), lines)


def sentence(rows: Rows) -> str:
    """The number of claims with each verdict, of those that were run."""
    found = [one.verdict(rows) for one in claims()]
    words = sorted({verdict for verdict in found if verdict != MISSING})
    return ", ".join(f"{found.count(word)} are {word}" for word in words)


def _cells(rows: Rows, key: Key) -> list[str]:
    found = rows.of(*key)
    if found is None:
        return [MISSING, "", "", ""]
    return [rows.text(*key), rows.n(*key), rows.epochs(*key), f"{found['rho'].iloc[0]:.4g}"]


def layers(rows: Rows) -> str:
    """Table IV."""
    if all(rows.of("layers", str(count)) is None for count in LAYERS):
        return MISSING
    lines = [[name, PUBLISHED_LAYERS[name], *_cells(rows, at("layers", name))] for name in SWEEPS["layers"]]
    return markdown(("hidden layers", "paper", "ours", "trials", "epochs", "rho"), lines)


def cifar(rows: Rows) -> str:
    """Figure 15, beside what the text says of it."""
    if any(rows.of("cifar", kind) is None for kind in ("uniform", "exponential")):
        return MISSING
    lines = []
    for kind in CIFAR:
        gain, share = "", ""
        if kind in ("exponential", "validation"):
            gain, share = rows.gain(("cifar", kind), ("cifar", "uniform")), _share(rows, kind)
        test, trials, epochs, _ = _cells(rows, ("cifar", kind))
        lines.append([kind, PUBLISHED_CIFAR[kind], test, trials, epochs, gain, share])
    header = ("schedule", "paper: over uniform; without privacy", "ours", "trials", "epochs", "over uniform, ours",
              "share of the gap, ours")  # fmt: skip
    return markdown(header, lines)


def _share(rows: Rows, kind: str) -> str:
    """What part of the gap between uniform noise and none a schedule closes, of means."""
    gain = rows.minus(("cifar", kind), ("cifar", "uniform"))
    gap = rows.minus(("cifar", "non-private"), ("cifar", "uniform"))
    return MISSING if gain is None or gap is None else f"{gain.mean / gap.mean:.0%}"


def cifar_rates(rows: Rows) -> str:
    """What was tried, on validation records, and whether what is trained is its best."""
    told = []
    for kind, rates in CIFAR_RATES.items():
        found = {rate: rows.summary("cifar rate", f"{kind} {rate:g}", "validation_accuracy") for rate in rates}
        means = {rate: one.mean for rate, one in found.items() if one is not None}
        if not means:
            continue
        listed = ", ".join(f"{rate:g}: {mean:.4f}" for rate, mean in means.items())
        best = max(means, key=lambda rate: means[rate])
        fits = "taken" if best == CIFAR_RATE[kind] else f"not taken: {CIFAR_RATE[kind]:g} was"
        told.append(f"{kind} by learning rate {listed} (the best, {best:g}, was {fits})")
    return "; ".join(told) or MISSING
