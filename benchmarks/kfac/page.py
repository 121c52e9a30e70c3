"""Networks with Kronecker factors from synthetic inputs: what is trained, and the tables of its page.

Damping, factors and learning rate are the best of a short list on training records that are held out. Not here: the
words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from benchmarks.pages import RESULTS
from benchmarks.pages.case import Case
from benchmarks.pages.drawing import errorbars
from benchmarks.pages.rows import MISSING, Rows, markdown, percent, read

WITHOUT, WITH = "without factors", "with factors"
CHOICE, FINAL = "choice", "networks"
METRICS = ("test_accuracy", "validation_accuracy", "seconds")
QUOTED = "95 98.1 98.6 59.2 63 .78125"


@dataclass(frozen=True)
class Network:
    """A recipe, what is tried for it without and with factors, and how many trials are reported."""

    recipe: str
    title: str
    options: Mapping[str, Mapping[str, tuple[str, ...]]]
    held: tuple[str, ...] = ()
    trials: int = 5

    @property
    def name(self) -> str:
        return self.recipe.replace("/", " ")


def _factors(probes: str, damping: float, factors: str = "inputs") -> str:
    return f"method.preconditioner={{kind: kfac, probes: {probes}, damping: {damping:g}, factors: {factors}}}"


def _rate(value: float) -> str:
    return f"method.learning_rate={value:g}"


CNN = Network(
    "lectures/mnist-cnn",
    "tanh CNN on MNIST, 10,000 records, 6 epochs, epsilon 3",
    {
        WITHOUT: {f"rate {rate:g}": (_rate(rate),) for rate in (2, 4)},
        WITH: {
            **{f"damping {one:g}": (_factors("strokes", one),) for one in (0.01, 0.03, 0.1, 0.3, 1)},
            "damping 0.1, both factors": (_factors("strokes", 0.1, "both"),),
            "damping 0.1, uniform probes": (_factors("uniform", 0.1),),
            "damping 0.1, rate 4": (_factors("strokes", 0.1), _rate(4)),
        },
    },
)
MLP = Network(
    "yu2019/mnist-exponential",
    "MLP of Yu et al. on MNIST, rho .78125",
    {
        WITHOUT: {f"rate {rate:g}": (_rate(rate),) for rate in (0.15, 0.4)},
        WITH: {f"damping 0.1, rate {rate:g}": (_factors("uniform", 0.1), _rate(rate)) for rate in (0.15, 0.4)},
    },
    held=("data.validation={records: 10000, public: true}",),
)
LONG = Network(
    "tramer2021/mnist-cnn",
    "tanh CNN on MNIST, 60,000 records, 40 epochs, epsilon 3",
    {WITHOUT: {"as published": ()}, WITH: {"damping 0.1": (_factors("strokes", 0.1),)}},
    trials=1,
)
NETWORKS = (CNN, MLP, LONG)


def choices(network: Network) -> list[Case]:
    """Two trials of all options of a network, judged by held-out training records."""
    return [
        Case(
            CHOICE,
            f"{network.name}: {side}, {name}",
            network.recipe,
            (*changes, *network.held, "save_model=false", "runtime.evaluate_every=100"),
            2,
        )
        for side, options in network.options.items()
        for name, changes in options.items()
        if len(options) > 1
    ]


def chosen(network: Network, side: str) -> str | None:
    """The option whose trials told most held-out records apart, the first of equals; None where one was not run."""
    trials = read(RESULTS / "kfac" / "trials.csv").reindex(columns=["table", "case", "validation_accuracy"])
    means = trials[trials["table"] == CHOICE].groupby("case")["validation_accuracy"].mean()
    names = {f"{network.name}: {side}, {option}": option for option in network.options[side]}
    if len(names) == 1:
        return next(iter(names.values()))
    return names[str(means[list(names)].idxmax())] if set(names) <= set(means.index) else None


def finals(network: Network) -> list[Case]:
    """The trials that are reported, on test records; none before the options were run."""
    more, cases = ("save_model=false", "runtime.evaluate_every=100"), []
    for side in (WITHOUT, WITH):
        if (option := chosen(network, side)) is not None:
            changes = (*network.options[side][option], *more)
            cases.append(Case(FINAL, f"{network.name}: {side}", network.recipe, changes, network.trials))
    return cases


CASES = [case for make in (choices, finals) for network in NETWORKS for case in make(network)]


def said(rows: Rows) -> Mapping[str, str]:
    """The reported trials, and the choice."""
    return {"networks": _networks(rows), "choice": _choice(rows)}


def _networks(rows: Rows) -> str:
    """A line a network: accuracy without and with factors, the paired difference, and what was chosen."""
    lines = []
    for network in NETWORKS:
        keys = [(FINAL, f"{network.name}: {side}") for side in (WITHOUT, WITH)]
        found, gain = [rows.summary(*key) for key in keys], rows.minus(keys[1], keys[0])
        trials = found[1].n if found[1] is not None else 0
        picked = chosen(network, WITH) or MISSING
        lines.append([network.title, *map(percent, found), percent(gain, True), str(trials), picked])
    return markdown(("network", WITHOUT, WITH, "difference", "trials", "settings of the factors"), lines)


def _choice(rows: Rows) -> str:
    """Accuracy on held-out training records of all options."""
    lines = [
        [network.title, side, name, percent(rows.summary(CHOICE, f"{network.name}: {side}, {name}", METRICS[1]))]
        for network in NETWORKS
        for side, options in network.options.items()
        for name in options
        if len(options) > 1
    ]
    return markdown(("network", "", "option", "held-out accuracy, two trials"), lines)


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """Differences to training without factors, with intervals where there are several trials."""
    figure = Figure(figsize=(6, 2.5), layout="constrained")
    axes = figure.subplots()
    gains = {
        float(place): rows.minus((FINAL, f"{network.name}: {WITH}"), (FINAL, f"{network.name}: {WITHOUT}"))
        for place, network in enumerate(NETWORKS)
    }
    errorbars(axes, {place: gain and gain.percent for place, gain in gains.items()}, fmt="o", capsize=3)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(list(gains), [network.name for network in NETWORKS], fontsize=7)
    axes.set_ylabel("points of accuracy")
    return {"differences": figure}
