"""Automatic settings beside those that were chosen by hand, in the shipped recipes on images.

Not here: the words (`page.md`); the constants of the rule (`benchmarks/rule.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from benchmarks.pages.case import Case
from benchmarks.pages.rows import Rows, markdown, of_page, paired, percent, summarised

METRICS = ("test_accuracy", "seconds")
QUOTED = ".3"
HAND, AUTOMATIC = "by hand", "automatic"
LAST = ("save_model=false", "runtime.evaluate_every=100")
Trials = tuple[str, str, str]
"""Page, table and case."""


@dataclass(frozen=True)
class Pair:
    """A recipe, how many trials of it train here, and the trials by hand of another page that are taken instead."""

    recipe: str
    trials: int
    hand: Trials | None = None
    batching: str = "poisson"

    @property
    def by(self) -> Mapping[str, Trials]:
        """Trials by the way in which settings were chosen."""
        own = ("automatic", self.recipe)
        return {HAND: self.hand or (*own, HAND), AUTOMATIC: (*own, AUTOMATIC)}

    def changes(self, way: str) -> tuple[str, ...]:
        """Changes of the recipe, which leave all settings of its method to the rule, or none."""
        ruled = (
            f"method={{kind: dp-sgd, batching: {self.batching}}}",
            "privacy.clipping={kind: flat}",
            "privacy.schedule={kind: auto}",
            "epochs=auto",
        )
        return (*ruled, *LAST) if way == AUTOMATIC else LAST


PAIRS = (
    Pair("mnist-poisson", 5),
    Pair("lectures/mnist-mlp", 5, ("lectures", "mnist-mlp", "tanh, epsilon 3")),
    Pair("lectures/mnist-cnn", 5, ("lectures", "mnist-cnn", "tanh, epsilon 3")),
    Pair("yu2019/mnist-uniform", 5, ("yu2019", "table2", "uniform"), "shuffle"),
    Pair("tramer2021/mnist-cnn", 5),
    Pair("tramer2021/mnist-scattering-linear", 3),
    Pair("tramer2021/cifar10-cnn", 1),
    Pair("tramer2021/cifar10-scattering-linear", 1),
    Pair("de2022/cifar10-wrn-eps1", 1),
    Pair("de2022/cifar10-wrn-eps8", 1),
)
CASES = [
    Case(pair.recipe, way, pair.recipe, pair.changes(way), pair.trials)
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
