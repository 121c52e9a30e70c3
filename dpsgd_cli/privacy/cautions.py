"""What a statement is worth where its numbers are far from what is usually called private.

Warnings, never errors: such a run may be an experiment. Not here: the numbers themselves (`plan.py`).
"""

from __future__ import annotations

from dpsgd_cli.rounding import epsilon_text

MOST_EPSILON = 100.0


def cautions(epsilon: float | None, delta: float, records: int) -> list[str]:
    """What a user should know of a guarantee of `epsilon` (None: no finite one) at `delta` about `records` records.

    Publishing each record whole with probability `delta` satisfies (0, delta): at 1 / records that is one, on average.

    >>> cautions(3.0, 1e-5, 60_000), len(cautions(250.0, 0.01, 100))
    ([], 2)
    """
    found = []
    if delta * records >= 1:
        found.append(
            f"delta {delta:g} is not below 1 / {records}, the number of training records: publishing one of them whole"
            " would satisfy it; give a smaller delta"
        )
    if epsilon is not None and epsilon > MOST_EPSILON:
        found.append(
            f"epsilon {epsilon_text(epsilon)} is above {MOST_EPSILON:g}: it bounds next to nothing; add noise, train"
            " less or lower the budget"
        )
    return found
