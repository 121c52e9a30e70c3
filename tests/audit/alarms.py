"""How often an audit refutes a claim that is true: at most as often as it says.

    python -m tests.audit.alarms [REPETITIONS]

Each repetition audits the same recipe with other seeds: streams, coins, batches and noise are all new.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from scipy import stats

from dpsgd_cli import data
from dpsgd_cli.audit.auditing import watched
from dpsgd_cli.audit.findings import AuditOptions, judged
from dpsgd_cli.audit.stage import without_folds
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto
from tests.audit.planted import PRECONDITIONED

SMALL = {
    "poisson": ["epochs=2", "method.batch_size=144"],
    "full": ["method={kind: dp-sgd, batching: full, learning_rate: 1}", "epochs=2"],
    "preconditioned": [*PRECONDITIONED, "epochs=2"],
}
CONFIDENCE = 0.95
_APART = 1000


def alarms(repetitions: int, trials: int = 6) -> dict[str, list[str]]:
    """What refuted true claims, by recipe; the tiers that chance takes part in."""
    return {name: list(_of(overrides, repetitions, trials)) for name, overrides in SMALL.items()}


def _of(overrides: list[str], repetitions: int, trials: int) -> Iterator[str]:
    """What refuted one recipe's claim, each time that something did; it is planned once."""
    options = AuditOptions(("A", "B", "C"), CONFIDENCE, trials, quick=True)
    loaded = without_folds(resolve_auto(load_recipe("quickstart", overrides)))
    outline = data.outline(loaded.recipe.data, loaded.base)
    plan = plan_of(loaded, outline)
    assert plan is not None
    for number in range(1, repetitions + 1):
        recipe = loaded.recipe.model_copy(update={"seed": number * _APART})
        found, _, _ = watched(dataclasses.replace(loaded, recipe=recipe), outline, plan, options)
        refuted = [row["name"] for row in judged(found, CONFIDENCE) if row["refuted"]]
        if refuted:
            yield "; ".join(refuted)


def too_many(count: int, repetitions: int) -> bool:
    """Whether so many alarms have probability below 1e-4 at the stated rate."""
    return bool(stats.binom.sf(count - 1, repetitions, 1 - CONFIDENCE) < 1e-4)


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    failed = False
    for name, told in alarms(times).items():
        print(
            f"{name}: {len(told)} of {times} audits of a true claim refuted it ({len(told) / times:.1%}); {told}",
            flush=True,
        )
        failed = failed or too_many(len(told), times)
    sys.exit(failed)
