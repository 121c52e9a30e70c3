"""Automatic settings beside those that were chosen by hand, in the shipped recipes on images.

Not here: the words (`page.md`); the constants of the rule (`benchmarks/rule.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from benchmarks.kfac.page import CIFAR, FINAL, LAST, MNIST, WITHOUT, automatic
from benchmarks.pages.case import Case
from benchmarks.pages.rows import Rows, markdown, of_page, paired, percent, summarised

METRICS = ("test_accuracy", "seconds")
QUOTED = ".3"
HAND, AUTOMATIC = "by hand", "automatic"
Trials = tuple[str, str, str]
"""Page, table and case."""


@dataclass(frozen=True)
class Pair:
    """A recipe, how many trials of it train here, and the trials of other pages that are taken instead."""

    recipe: str
    trials: int
    hand: Trials | None = None
    auto: Trials | None = None

    @property
    def by(self) -> Mapping[str, Trials]:
        """Trials by the way in which settings were chosen."""
        own = {way: ("automatic", self.recipe, way) for way in (HAND, AUTOMATIC)}
        return own | {way: there for way, there in ((HAND, self.hand), (AUTOMATIC, self.auto)) if there is not None}


PAIRS = (
    Pair("mnist-poisson", 5),
    Pair("lectures/mnist-mlp", 5, ("lectures", "mnist-mlp", "tanh, epsilon 3")),
    Pair("lectures/mnist-cnn", 5, ("lectures", "mnist-cnn", "tanh, epsilon 3")),
    Pair(
        "yu2019/mnist-uniform",
        5,
        ("yu2019", "table2", "uniform"),
        ("kfac", FINAL, f"MLP of Yu et al. on MNIST, rho .78125, automatic settings, {WITHOUT}"),
    ),
    Pair(
        "tramer2021/mnist-cnn",
        5,
        ("kfac", FINAL, f"{MNIST}, {WITHOUT}"),
        ("kfac", FINAL, f"{MNIST}, automatic settings, {WITHOUT}"),
    ),
    Pair("tramer2021/mnist-scattering-linear", 3),
    Pair("tramer2021/cifar10-cnn", 1, ("kfac", FINAL, f"{CIFAR}, {WITHOUT}")),
    Pair("tramer2021/cifar10-scattering-linear", 1),
    Pair("de2022/cifar10-wrn-eps1", 1),
    Pair("de2022/cifar10-wrn-eps8", 1),
)
CASES = [
    Case(pair.recipe, way, pair.recipe, (*(automatic("poisson") if way == AUTOMATIC else ()), *LAST), pair.trials)
    for pair in PAIRS
    for way, trials in pair.by.items()
    if trials[0] == "automatic"
]


def said(rows: Rows) -> Mapping[str, str]:
    """The table of all recipes, and how many of the differences are within .3 points."""
    lines, gains = [], {}
    for pair in PAIRS:
        hand, auto = (of_page(*pair.by[way]) for way in (HAND, AUTOMATIC))
        stale = any(key in rows.stale for key in ((pair.recipe, way) for way in pair.by))
        base, gain = paired(auto, hand, stale) or (None, None)
        found = None if auto is None or base is None else summarised(auto.head(base.n)["test_accuracy"], stale)
        count = "" if base is None else str(base.n)
        lines.append([f"`{pair.recipe}`", percent(base), percent(found), percent(gain, True), count])
        if gain is not None:
            gains[pair.recipe] = gain.mean
    worst = min(gains, key=lambda recipe: gains[recipe])
    return {
        "table": markdown(("recipe", HAND, AUTOMATIC, "difference", "trials"), lines),
        "measured": str(len(gains)),
        "near": str(sum(gain > -0.003 for gain in gains.values())),
        "worst": worst,
        "behind": f"{-100 * gains[worst]:.2f}",
    }


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """None."""
    del rows
    return {}
