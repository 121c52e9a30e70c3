"""Automatic settings beside those that were chosen by hand, in the shipped recipes on images.

Not here: what is trained (`page.yaml`), the words (`page.md`), the constants of the rule (`benchmarks/rule.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.pages.rows import Rows, markdown, of_page, paired, percent, summarised
from benchmarks.pages.spec import Spec

SPEC = Spec(Path(__file__).with_name("page.yaml"))
CASES, METRICS = SPEC.cases, SPEC.metrics


def said(rows: Rows) -> Mapping[str, str]:
    """The table of all recipes, and how many of the differences are within .3 points."""
    lines, gains = [], {}
    for pair in SPEC.content["lists"]["pairs"]:
        recipe = pair["recipe"]
        hand = of_page(*pair.get("hand", ("automatic", recipe, "by hand")))
        auto = of_page("automatic", recipe, "automatic")
        stale = any((recipe, way) in rows.stale for way in ("by hand", "automatic"))
        base, gain = paired(auto, hand, stale) or (None, None)
        found = None if auto is None or base is None else summarised(auto.head(base.n)["test_accuracy"], stale)
        count = "" if base is None else str(base.n)
        lines.append([f"`{recipe}`", percent(base), percent(found), percent(gain, True), count])
        if gain is not None:
            gains[recipe] = gain.mean
    worst = min(gains, key=lambda recipe: gains[recipe])
    return {
        "table": markdown(("recipe", "by hand", "automatic", "difference", "trials"), lines),
        "measured": str(len(gains)),
        "near": str(sum(gain > -0.003 for gain in gains.values())),
        "worst": worst,
        "behind": f"{-100 * gains[worst]:.2f}",
    }


def pictures(rows: Rows) -> Mapping[str, Figure]:
    """None."""
    del rows
    return {}
