"""Networks with Kronecker factors from synthetic inputs: what is trained, and the tables of its page.

Damping, factors and learning rate are the best of a short list on training records that are held out. Not here: the
words (`page.md`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.pages import RESULTS
from benchmarks.pages.case import Case
from benchmarks.pages.rows import MISSING, Rows, markdown, of_page, paired, percent
from dpsgd_cli.preconditioning.settings import Kfac

WITHOUT, WITH = "without factors", "with factors"
CHOICE, FINAL = "choice", "networks"
METRICS = ("test_accuracy", "validation_accuracy", "seconds")
QUOTED = ".78125 98.1 98.6 59.2"


def _factors(probes: str, damping: float = 0.1, factors: str = "inputs") -> str:
    return f"method.preconditioner={{kind: kfac, probes: {probes}, damping: {damping:g}, factors: {factors}}}"


def _rate(value: float) -> str:
    return f"method.learning_rate={value:g}"


@dataclass(frozen=True)
class Network:
    """A recipe with factors, and the rows without them: (page, table, case) of trials with the same seeds.

    `changes` make the factors; `both` has other changes of the recipe, which the rows without factors share.
    """

    title: str
    recipe: str
    changes: tuple[str, ...]
    without: tuple[str, str, str]
    trials: int
    both: tuple[str, ...] = ()


def automatic(batching: str) -> tuple[str, ...]:
    """Changes that leave all settings of a recipe's method to the rule."""
    return (
        f"method={{kind: dp-sgd, batching: {batching}}}",
        "privacy.clipping={kind: flat}",
        "privacy.schedule={kind: auto}",
        "epochs=auto",
    )


MNIST = "tanh CNN on MNIST, 60,000 records, 40 epochs, epsilon 3"
CIFAR = "tanh CNN on CIFAR-10, 50,000 records, 30 epochs, epsilon 3"
CIFAR_BEGUN = "tanh CNN on CIFAR-10, 50,000 records, first 21 of 30 epochs, epsilon 2.48"
BEGUN = (
    "epochs=21",
    "privacy.schedule={kind: uniform, initial: 1.3231149370017696}",  # with which 30 epochs fit epsilon 3
    "privacy.budget=null",
    "privacy.delta=1e-5",
)
NETWORKS = (
    *(
        Network(
            f"tanh CNN on MNIST, 10,000 records, 6 epochs, epsilon {epsilon}",
            "lectures/mnist-cnn",
            (_factors("strokes"), f"privacy.budget.epsilon={epsilon}"),
            ("lectures", "mnist-cnn", f"tanh, epsilon {epsilon}"),
            5,
        )
        for epsilon in (1, 3)
    ),
    Network(
        "MLP of Yu et al. on MNIST, rho .78125",
        "yu2019/mnist-exponential",
        (_factors("uniform"),),
        ("yu2019", "table2", "exponential"),
        3,
    ),
    Network(
        "MLP of Yu et al. on MNIST, rho .78125, automatic settings",
        "yu2019/mnist-uniform",
        (_factors("uniform"),),
        ("kfac", FINAL, f"MLP of Yu et al. on MNIST, rho .78125, automatic settings, {WITHOUT}"),
        5,
        automatic("shuffle"),
    ),
    *(
        Network(title, recipe, (_factors(probes),), ("kfac", FINAL, f"{title}, {WITHOUT}"), trials, both)
        for title, recipe, probes, trials, both in (
            (MNIST, "tramer2021/mnist-cnn", "strokes", 5, ()),
            (f"{MNIST}, automatic settings", "tramer2021/mnist-cnn", "strokes", 5, automatic("poisson")),
            (CIFAR_BEGUN, "tramer2021/cifar10-cnn", "dead-leaves", 1, BEGUN),
            (CIFAR, "tramer2021/cifar10-cnn", "dead-leaves", 5, ()),
        )
    ),
)
OPTIONS: Mapping[str, tuple[str, ...]] = {
    **{f"{WITHOUT}, rate {rate:g}": (_rate(rate),) for rate in (2, 4)},
    **{f"{WITH}, damping {one:g}": (_factors("strokes", one),) for one in (0.01, 0.03, 0.1, 0.3, 1)},
    f"{WITH}, damping 0.1, both factors": (_factors("strokes", 0.1, "both"),),
    f"{WITH}, damping 0.1, uniform probes": (_factors("uniform"),),
    f"{WITH}, damping 0.1, rate 4": (_factors("strokes"), _rate(4)),
}
"""What was tried for the CNN at epsilon 3, judged by the 50,000 training records that its recipe holds out."""
PLAIN_PIXELS = ("data.preprocess=null", "data.validation={records: 5000, public: true}")
LARGE = ("method.batch_size=4096", "method.averaging={kind: ema}")
PHOTOGRAPHS: Mapping[str, tuple[str, ...]] = {
    f"{WITHOUT}, batches of 1,024, rate 1": (),
    f"{WITH}, batches of 1,024, rate 1, damping 0.1": (_factors("dead-leaves"),),
    f"{WITHOUT}, batches of 4,096, rate 2": (_rate(2), *LARGE),
    f"{WITHOUT}, batches of 4,096, rate 4": (_rate(4), *LARGE),
    f"{WITH}, batches of 4,096, rate 4, damping 0.1": (_factors("dead-leaves"), _rate(4), *LARGE),
    f"{WITH}, batches of 4,096, rate 4, damping 0.3": (_factors("dead-leaves", 0.3), _rate(4), *LARGE),
}
"""The CNN on CIFAR-10 with pixels in [0, 1], one trial each; 45,000 records train it."""
DIGITS = (
    "model={kind: mlp, hidden: [64], activation: tanh}",
    "privacy.clipping={kind: flat, norm: 0.5}",
    "epochs=20",
    "save_model=false",
    "runtime.evaluate_every=100",
)
GRID = (1, 4, 16)
KINDS: Mapping[str, str | None] = {WITHOUT: None, f"{WITH}, damping 1": "1", f"{WITH}, damping 0.1": "0.1"}
LAST = ("save_model=false", "runtime.evaluate_every=100")


def _descent(rate: int, damping: str | None) -> str:
    factors = "null" if damping is None else f"{{kind: kfac, probes: strokes, damping: {damping}}}"
    return (
        f"method={{kind: dp-sgd, batching: poisson, batch_size: 256, learning_rate: {rate}, preconditioner: {factors}}}"
    )


CASES = [
    *(
        Case(CHOICE, f"lectures mnist-cnn: {name}", "lectures/mnist-cnn", (*own, *LAST), 2)
        for name, own in OPTIONS.items()
    ),
    *(
        Case("digits", f"{kind}, rate {rate}", "quickstart", (*DIGITS, _descent(rate, damping)), 5, pack=kind)
        for kind, damping in KINDS.items()
        for rate in GRID
    ),
    *(
        Case("photographs", name, "tramer2021/cifar10-cnn", (*own, *PLAIN_PIXELS, *LAST), 1)
        for name, own in PHOTOGRAPHS.items()
    ),
    *(Case(FINAL, one.title, one.recipe, (*one.both, *one.changes, *LAST), one.trials) for one in NETWORKS),
    *(
        Case(FINAL, one.without[2], one.recipe, (*one.both, *LAST), one.trials)
        for one in NETWORKS
        if one.without[0] == "kfac"
    ),
]


def said(rows: Rows) -> Mapping[str, str]:
    """The reported trials, the options, the cost, and what the findings say of them."""
    lines, gains = [], {}
    for network in NETWORKS:
        ours = rows.summary(FINAL, network.title)
        stale = ours is not None and ours.stale
        without, gain = paired(rows.of(FINAL, network.title), of_page(*network.without), stale) or (None, None)
        count = "" if ours is None else str(ours.n)
        lines.append([network.title, percent(without), percent(ours), percent(gain, True), count])
        gains[network.title] = percent(gain, True)
    tried = [
        [name, percent(rows.summary(CHOICE, f"lectures mnist-cnn: {name}", "validation_accuracy"))] for name in OPTIONS
    ]
    digits = [[kind, *(percent(rows.summary("digits", f"{kind}, rate {rate}")) for rate in GRID)] for kind in KINDS]
    judged = ("validation_accuracy", "test_accuracy")
    photographs = [
        [name, *(percent(rows.summary("photographs", name, column)) for column in judged)] for name in PHOTOGRAPHS
    ]
    held_out = rows.minus(*(("photographs", name) for name in list(PHOTOGRAPHS)[1::-1]), "validation_accuracy")
    missed = {
        name: MISSING if (own := rows.summary(FINAL, name)) is None else f"{aim - own.percent.mean:.2f}"
        for name, aim in ((MNIST, 98.6), (CIFAR_BEGUN, 63.0))
    }
    found = pd.read_csv(RESULTS / "kfac" / "cost.csv")
    cost = [[one, str(rows_), *(f"{value:.2f}" for value in own)] for one, rows_, *own in found.itertuples(index=False)]
    return {
        "networks": markdown(("network", WITHOUT, WITH, "difference", "trials"), lines),
        "choice": markdown(("option", "held-out accuracy, two trials"), tried),
        "photographs": markdown(("option", "5,000 held-out records", "1,000 test records"), photographs),
        "digits": markdown(("", *(f"rate {rate}" for rate in GRID)), digits),
        "cost": markdown(("network", "rows", *found.columns[2:]), cost),
        "every": str(Kfac.model_fields["every"].default),
        **dict(zip(("gain_1", "gain_3", "gain_mlp", "gain_auto"), gains.values(), strict=False)),
        "gain_mnist": gains[MNIST],
        "gain_cifar": gains[CIFAR_BEGUN],
        "gain_photographs": MISSING if held_out is None else held_out.percent.text(1, signed=True),
        "short_mnist": missed[MNIST],
        "short_cifar": missed[CIFAR_BEGUN],
    }


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """None."""
    del rows
    return {}
