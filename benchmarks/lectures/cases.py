"""What is trained for the page of the lectures. Not here: what is said of it (`page.py`, `page.md`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.pages.case import Case

RECORDS = (140, 280, 560)
EPSILONS = (0.3, 0.9, 3.0, 9.0)
TITLES = {
    "dp-gd": "DP-GD, 300 full gradients, average",
    "single": "DP-SGD, one record a step, n^2 steps, last iterate",
    "lemma": "the same with the noise of Lemma 15.5",
    "strong": "one record a step, with an L2 term of .1",
}


def budgets(kind: str) -> list[float]:
    """Lemma 15.5 is stated for epsilon below 1."""
    return [epsilon for epsilon in EPSILONS if epsilon < 1 or kind != "lemma"]


def risks() -> Iterator[Case]:
    """Excess risk over n and epsilon: records come and go with the size of the test part."""
    for records in RECORDS:
        part = (f"data.split={{test: {683 - records}}}",)
        steps = (f"epochs={records}", f"runtime.evaluate_every={records}")
        for kind in TITLES:
            name = {"dp-gd": "cancer-dp-gd", "strong": "cancer-strongly-convex"}.get(kind, "cancer-single")
            for epsilon in budgets(kind):
                changes = (*part, f"privacy.budget.epsilon={epsilon}")
                if kind != "dp-gd":
                    changes += steps
                if kind == "lemma":
                    changes += ("privacy.accountant=lemma-15.5",)
                pack = f"{'full' if kind == 'dp-gd' else 'single'} {records}"
                yield Case(kind, f"{records} {epsilon:g}", f"lectures/{name}", changes, trials=10, pack=pack)


CASES = list(risks())
