"""What the page says of Lecture 15's three claims on networks: tanh, public data, CIFAR-10. Verdicts follow from rows.

Not here: what is trained and its tables (`page.yaml`), excess risk (`page.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pages.drawing import errorbars, over_epsilon
from benchmarks.pages.rows import MISSING, Rows, Summary, side
from dpsgd_cli.common.text_format import count

PUBLISHED = 0.662
"""Of 10,000 test records of CIFAR-10, by a tanh network trained end to end (Papernot et al. 2021)."""
JUDGES = 1000
"""Official test records of CIFAR-10 at hand."""
NAMES = {"mnist-cnn": "convolutional network", "mnist-mlp": "one hidden layer"}
KINDS = ("last layer", "from scratch")
BUDGETS, TUNED, SCRATCH = (1, 3), (0.5, 1, 3, 8), (1, 8)
"""Of activations, of a last layer, and of a network from scratch."""
Key = tuple[str, str]


def said(rows: Rows) -> Mapping[str, str]:
    """The `${name}`s of `page.md` that are of networks."""
    return {
        "tanh": _counted(_gains(rows, _activations())),
        "public": _counted(_gains(rows, _transfers())),
        "gain_layer": _gain_of_budget(rows, "last layer"),
        "cifar10": _cifar10(rows),
        "limit": "not refuted" if "above" not in _cifar10(rows) else "refuted as a limit of what the budget allows",
        "seeds_cnn": _seeds(rows, "mnist-cnn", ""),
        "seeds_mlp": _seeds(rows, "mnist-mlp", ""),
        "seeds_scratch": _seeds(rows, "transfer", "from scratch"),
        "seeds_layer": _seeds(rows, "transfer", "last layer"),
    }


def _seeds(rows: Rows, table: str, kind: str) -> str:
    """How many trials the cases of a kind have, the fewest and the most."""
    told = [rows.summary(*key) for key in rows.cases if key[0] == table and key[1].startswith(kind)]
    found = sorted({one.n for one in told if one is not None})
    return " to ".join(str(n) for n in dict.fromkeys([*found[:1], *found[-1:]])) or MISSING


def _gain_of_budget(rows: Rows, kind: str) -> str:
    """Of the largest budget over the smallest."""
    most, least = (("transfer", f"{kind}, epsilon {epsilon:g}") for epsilon in (max(TUNED), min(TUNED)))
    return rows.gain(most, least, 3)


def _activations() -> list[tuple[Key, Key]]:
    """Pairs of cases, of which the claim says that the first is better."""
    return [
        ((network, f"tanh, epsilon {epsilon}"), (network, f"relu, epsilon {epsilon}"))
        for network in NAMES
        for epsilon in BUDGETS
    ]


def _transfers() -> list[tuple[Key, Key]]:
    """Two kinds of private training of CIFAR-10's last classes, at the budgets that both have."""
    pairs = [[("transfer", f"{kind}, epsilon {epsilon:g}") for kind in KINDS] for epsilon in SCRATCH]
    return [(one, two) for one, two in pairs]


def _gains(rows: Rows, pairs: Sequence[tuple[Key, Key]]) -> list[Summary]:
    """Paired differences that have an interval."""
    found = [rows.minus(one, two) for one, two in pairs]
    return [gain for gain in found if gain is not None and gain.margin is not None]


def _counted(gains: Sequence[Summary]) -> str:
    """How many paired intervals are above zero, and how many are below."""
    if not gains:
        return MISSING
    sides = [side(gain) for gain in gains]
    better, worse = sides.count(1), sides.count(-1)
    verdict = "confirmed" if better == len(gains) else "refuted" if worse == len(gains) else "confirmed in part"
    if not better and worse < len(gains):
        verdict = "not confirmed"
    least, most = min(gains, key=lambda gain: gain.mean), max(gains, key=lambda gain: gain.mean)
    spread = least.text(3, signed=True) + ("" if len(gains) == 1 else f" to {most.text(3, signed=True)}")
    return (
        f"{verdict}: significantly better in {better} of {count(len(gains), 'comparison')}, worse in {worse}"
        f" (paired differences of accuracy {spread}, 95% intervals)"
    )


def _cifar10(rows: Rows) -> str:
    """Beside what was published, with what so few test records leave open."""
    found = rows.summary("cifar10", "features")
    if found is None:
        return MISSING
    records = 1.96 * math.sqrt(found.mean * (1 - found.mean) / JUDGES)
    gap = found.mean - PUBLISHED
    sure = abs(gap) > records + (found.margin or 0.0)
    verdict = ("above" if gap > 0 else "below") if sure else "not distinguishable from"
    left = f"sampling error of {JUDGES} records: ± {records:.3f}"
    return f"{found.text(3)} over {found.n} trials, {verdict} the published one ({left})"


def picture(rows: Rows) -> Figure:
    """Accuracy over epsilon: activations in two networks, and a last layer beside a whole network."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, network in zip(panels, NAMES, strict=False):
        for activation in ("tanh", "relu"):
            _line(axes, rows, network, activation, BUDGETS)
        _dress(axes, f"MNIST, {NAMES[network]}", BUDGETS)
    for kind, epsilons in zip(KINDS, (TUNED, SCRATCH), strict=True):
        _line(panels[2], rows, "transfer", kind, epsilons)
    _dress(panels[2], "CIFAR-10, last five classes", TUNED)
    panels[0].set_ylabel("test accuracy")
    return figure


def _line(axes: Axes, rows: Rows, table: str, what: str, epsilons: Sequence[float]) -> None:
    told = {epsilon: rows.summary(table, f"{what}, epsilon {epsilon:g}") for epsilon in epsilons}
    errorbars(axes, told, fmt="o-", capsize=3, label=what.replace("relu", "ReLU"))


def _dress(axes: Axes, title: str, epsilons: Sequence[float]) -> None:
    over_epsilon(axes, epsilons, xlim=(min(epsilons) / 1.5, max(epsilons) * 1.5))
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
