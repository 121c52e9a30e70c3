"""How often an audit refutes a claim that is true: at most as often as it says.

    python -m tests.audit.alarms [REPETITIONS]

Each repetition audits the same recipe with other seeds: streams, coins, batches and noise are all new.
"""

from __future__ import annotations

import sys

from scipy import stats

from tests.audit.planted import PRECONDITIONED, audited

SMALL = {
    "poisson": ["epochs=2", "method.batch_size=144"],
    "full": ["method={kind: dp-sgd, batching: full, learning_rate: 1}", "epochs=2"],
    "preconditioned": [*PRECONDITIONED, "epochs=2"],
}
CONFIDENCE = 0.95
_APART = 1000


def alarms(repetitions: int, trials: int = 6) -> dict[str, list[str]]:
    """What refuted true claims, by recipe; the tiers that chance takes part in."""
    found: dict[str, list[str]] = {}
    for name, overrides in SMALL.items():
        runs = [audited(overrides, seed * _APART, "ABC", trials) for seed in range(1, repetitions + 1)]
        found[name] = ["; ".join(run["refuted_by"]) for run in runs if run["refuted"]]
    return found


def too_many(count: int, repetitions: int) -> bool:
    """Whether so many alarms have probability below 1e-4 at the stated rate."""
    return bool(stats.binom.sf(count - 1, repetitions, 1 - CONFIDENCE) < 1e-4)


if __name__ == "__main__":
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    failed = False
    for name, told in alarms(times).items():
        print(f"{name}: {len(told)} of {times} audits of a true claim refuted it ({len(told) / times:.1%}); {told}")
        failed = failed or too_many(len(told), times)
    sys.exit(failed)
