"""Beyond plain DP-SGD at equal budgets: what is trained, and the tables and pictures of its page.

Every idea is a few changes of one recipe a data set. Its learning rate is the best of a grid on training records that
are held out, at each budget, by the accuracy of one trial; then five trials train on all of them.
Not here: the words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages import RESULTS
from benchmarks.pages.case import Case
from benchmarks.pages.drawing import errorbars, over_epsilon
from benchmarks.pages.rows import MISSING, Rows, markdown, percent, read, side

TRIALS = 5
HELD = 5_000
EPSILONS = (1.0, 3.0, 8.0)
GRID = (8.0, 16.0, 32.0, 64.0, 128.0)
PLAIN = "DP-SGD"
METRICS = ("test_accuracy", "validation_accuracy", "predicted_error_ratio", "seconds")
TITLES = {
    "mnist": "MNIST, scattering features",
    "cifar10": "CIFAR-10, features that no record shaped",
    "adult": "Adult, binned columns",
}


@dataclass(frozen=True)
class Idea:
    """What is done otherwise than by plain DP-SGD: changes of the recipe, and with whom it can be compared."""

    changes: tuple[str, ...] = ()
    against: str = PLAIN
    scale: float = 1.0
    """Of the grid of learning rates: what a step is as long as DP-SGD's at."""
    epochs: int = 10


AVERAGE = "method.averaging={kind: tail}"
REPLACED = "DP-SGD, replace-one"
INDEPENDENT = "privacy.noise={kind: independent}"
ALLOCATED = ("method.batching=random-allocation", "method.batch_size=500")
IDEAS: Mapping[str, Idea] = {
    PLAIN: Idea((INDEPENDENT,)),
    "average of the last half": Idea((INDEPENDENT, AVERAGE)),
    "exponential schedule": Idea((INDEPENDENT, "privacy.schedule={kind: exponential, initial: auto, decay: 0.07}")),
    "influence schedule": Idea(
        (INDEPENDENT, "privacy.schedule={kind: influence, initial: auto, weights: {contraction: 0.5}}")
    ),
    "banded noise": Idea(),
    "banded noise, averaged": Idea((AVERAGE,), "average of the last half"),
    "banded noise, allocated, averaged": Idea((*ALLOCATED, AVERAGE), "average of the last half"),
    "full batches, 60 steps": Idea((INDEPENDENT, "method.batching=full", "method.batch_size=null"), epochs=60),
    "automatic clipping": Idea((INDEPENDENT, "privacy.clipping={kind: automatic, norm: 0.5}")),
    "quantile clipping": Idea(
        (INDEPENDENT, "privacy.clipping={kind: quantile, quantile: 0.5, count_noise: 25.6, initial: 0.5}")
    ),
    "truncated batches": Idea((INDEPENDENT, "method.batching=truncated-poisson", "method.largest_batch=600")),
    "random allocation": Idea((INDEPENDENT, "method.batching=random-allocation")),
    REPLACED: Idea((INDEPENDENT, "privacy.adjacency=replace-one"), REPLACED),
    "batches of one size, replace-one": Idea(
        (INDEPENDENT, "privacy.adjacency=replace-one", "method.batching=fixed"), REPLACED
    ),
}


def name_of(idea: str, epsilon: float) -> str:
    return f"{idea}, epsilon {epsilon:g}"


def choices(data: str, idea: str) -> list[Case]:
    """One trial of every learning rate of the grid at every budget, judged by held-out training records."""
    own = IDEAS[idea]
    return [
        Case(
            f"{data}-choice",
            f"{name_of(idea, epsilon)}, rate {rate:g}",
            f"beyond/{data}-banded",
            (
                *own.changes,
                f"epochs={own.epochs}",
                f"privacy.budget.epsilon={epsilon:g}",
                f"method.learning_rate={rate * own.scale:g}",
                f"data.validation={{records: {HELD}, public: true}}",
                "save_model=false",
                f"runtime.evaluate_every={own.epochs}",
            ),
            1,
            pack=f"{data} {idea} choice",
        )
        for epsilon in EPSILONS
        for rate in GRID
    ]


def chosen(trials: pd.DataFrame, data: str, idea: str, epsilon: float) -> float | None:
    """The rate whose trial told most held-out records apart, the lowest of equals; None where one was not run."""
    own = (
        trials[trials["table"] == f"{data}-choice"].set_index("case").reindex(columns=[*METRICS])["validation_accuracy"]
    )
    names = {f"{name_of(idea, epsilon)}, rate {rate:g}": rate for rate in GRID}
    if not set(names) <= set(own.index):
        return None
    return names[str(own[list(names)].idxmax())]


def finals(data: str, idea: str) -> list[Case]:
    """Five trials at every budget, on all training records, with the rate that was chosen; none before it was."""
    own, trials = IDEAS[idea], read(RESULTS / "beyond" / "trials.csv")
    rates = {epsilon: chosen(trials, data, idea, epsilon) for epsilon in EPSILONS}
    return [
        Case(
            data,
            name_of(idea, epsilon),
            f"beyond/{data}-banded",
            (
                *own.changes,
                f"epochs={own.epochs}",
                f"privacy.budget.epsilon={epsilon:g}",
                f"method.learning_rate={rate * own.scale:g}",
                "save_model=false",
                f"runtime.evaluate_every={own.epochs}",
            ),
            TRIALS,
            pack=f"{data} {idea}",
        )
        for epsilon, rate in rates.items()
        if rate is not None
    ]


UNITS = {"all rows of a person": (), "one row at a time": ("privacy.unit=null",)}
PEOPLE = [
    Case(
        "people",
        name_of(unit, epsilon),
        "beyond/adult-users",
        (*changes, f"privacy.budget.epsilon={epsilon:g}", "save_model=false"),
        TRIALS,
        pack=unit,
    )
    for unit, changes in UNITS.items()
    for epsilon in EPSILONS
]
CASES = PEOPLE + [case for make in (choices, finals) for data in TITLES for idea in IDEAS for case in make(data, idea)]
QUOTED = "0.5"


def said(rows: Rows) -> Mapping[str, str]:
    """A table for each data set, what helped where, and the learning rates."""
    tables = {data: _table(rows, data) for data in TITLES}
    people = [[unit, *(percent(rows.summary("people", name_of(unit, e))) for e in EPSILONS)] for unit in UNITS]
    tables["people"] = markdown(("protected", *(f"epsilon {one:g}" for one in EPSILONS)), people)
    return tables | {"rates": _rates(), "helped": _helped(rows), "predicted": _predicted(rows)}


def _table(rows: Rows, data: str) -> str:
    """A line an idea: accuracy of five trials at each budget, and the paired difference to what it is against."""
    lines = []
    for idea, own in IDEAS.items():
        cells = [idea]
        for epsilon in EPSILONS:
            accuracy = percent(rows.summary(data, name_of(idea, epsilon)))
            gain = rows.minus((data, name_of(idea, epsilon)), (data, name_of(own.against, epsilon)))
            cells.append(accuracy if idea == own.against or gain is None else f"{accuracy} ({percent(gain, True)})")
        lines.append([*cells, "" if idea == own.against else own.against])
    return markdown(("idea", *(f"epsilon {one:g}" for one in EPSILONS), "difference to"), lines)


def _helped(rows: Rows) -> str:
    """Of each idea: at how many of the settings its interval is above, or below, 0."""
    told = []
    for idea, own in IDEAS.items():
        gains = [
            rows.minus((data, name_of(idea, epsilon)), (data, name_of(own.against, epsilon)))
            for data in TITLES
            for epsilon in EPSILONS
        ]
        known = [gain for gain in gains if gain is not None and gain.margin is not None]
        if idea == own.against or not known:
            continue
        sides = [side(gain) for gain in known]
        mean = 100 * sum(gain.mean for gain in known) / len(known)
        told.append([idea, f"{sides.count(1)} of {len(known)}", f"{sides.count(-1)} of {len(known)}", f"{mean:+.2f}"])
    return markdown(("idea", "better at", "worse at", "mean difference, points"), told)


def _predicted(rows: Rows) -> str:
    """Predicted error of banded noise, over that of independent noise, beside what the accuracy made of it."""
    lines = []
    for data, title in TITLES.items():
        for epsilon in EPSILONS:
            found = rows.summary(data, name_of("banded noise", epsilon), "predicted_error_ratio")
            gains = [
                rows.minus((data, name_of(idea, epsilon)), (data, name_of(IDEAS[idea].against, epsilon)))
                for idea in ("banded noise", "banded noise, averaged")
            ]
            ratio = MISSING if found is None or found.mean is None else f"{found.mean:.2f}"
            lines.append([title, f"{epsilon:g}", ratio, *(percent(gain, True) for gain in gains)])
    return markdown(("data", "epsilon", "predicted error", "gain", "gain, both averaged"), lines)


def _rates() -> str:
    """The learning rates of all rows."""
    trials = read(RESULTS / "beyond" / "trials.csv")
    lines = []
    for data, title in TITLES.items():
        for idea, own in IDEAS.items():
            rates = [chosen(trials, data, idea, epsilon) for epsilon in EPSILONS]
            lines.append([title, idea, *(MISSING if rate is None else f"{rate * own.scale:g}" for rate in rates)])
    return markdown(("data", "idea", *(f"epsilon {one:g}" for one in EPSILONS)), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Differences to plain DP-SGD at each budget, with intervals: one panel a data set."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, (data, title) in zip(figure.subplots(1, len(TITLES)), TITLES.items(), strict=True):
        for number, idea in enumerate(one for one in IDEAS if one != PLAIN):
            shift = 1 + 0.025 * (number - len(IDEAS) / 2)
            gains = {e * shift: rows.minus((data, name_of(idea, e)), (data, name_of(PLAIN, e))) for e in EPSILONS}
            points = {x: gain and gain.percent for x, gain in gains.items()}
            marker = "osD^v<>"[number % 7]
            errorbars(axes, points, color=f"C{number % 10}", marker=marker, capsize=2, label=idea)
        axes.axhline(0, color="black", lw=0.8)
        over_epsilon(axes, EPSILONS, title=title.partition(",")[0])
    figure.axes[0].set_ylabel("points of accuracy above DP-SGD")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return {"differences": figure}
