"""What is trained for the page of the lectures. Not here: what is said of it (`page.py`, `page.md`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.frontier.page import preconditioned
from benchmarks.pages import RESULTS
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
                changes: tuple[str, ...] = (*part, f"privacy.budget.epsilon={epsilon}")
                if kind != "dp-gd":
                    changes += steps
                if kind == "lemma":
                    changes += ("privacy.accountant=lemma-15.5",)
                pack = f"{'full' if kind == 'dp-gd' else 'single'} {records}"
                yield Case(kind, f"{records} {epsilon:g}", f"lectures/{name}", changes, trials=10, pack=pack)


ACTIVATIONS = ("tanh", "relu")
NETWORKS = {"mnist-cnn": (1.0, 3.0), "mnist-mlp": (1.0, 3.0)}
"""Recipes that compare activations, and at which budgets."""
RATES = {
    ("mnist-cnn", "tanh"): 2.0,
    ("mnist-cnn", "relu"): 2.0,
    ("mnist-mlp", "tanh"): 8.0,
    ("mnist-mlp", "relu"): 8.0,
}
"""Of each activation the best of those that its recipe names, on the records that the recipe holds out."""


def activations() -> Iterator[Case]:
    """tanh and ReLU at equal budgets, each at its own learning rate."""
    for network, epsilons in NETWORKS.items():
        for epsilon in epsilons:
            for activation in ACTIVATIONS:
                budget = f"privacy.budget.epsilon={epsilon:g}"
                rate = f"method.learning_rate={RATES[network, activation]:g}"
                changes = (budget, f"model.activation={activation}", rate, "save_model=false")
                name, few = f"{activation}, epsilon {epsilon:g}", 1 if network == "mnist-cnn" else 5
                yield Case(network, name, f"lectures/{network}", changes, 5, chunk=few)


PUBLIC = Case("public", "first five classes", "lectures/cifar10-public", trials=1)
"""Trained by `public.py`; no row of the page."""
FOUND = RESULTS / "lectures" / "runs" / f"public-{PUBLIC.hash}"
TUNED = (0.5, 1.0, 3.0, 8.0)
SCRATCH = {1.0: 3, 8.0: 3}
"""Trials from scratch at fewer budgets, which take minutes each."""


def transfer() -> Iterator[Case]:
    """The last five classes of CIFAR-10: a private last layer on public features, and the same network from scratch."""
    public = f"data.features={{kind: pretrained, result: ../../{FOUND.as_posix()}, public: true}}"
    for epsilon in TUNED:
        changes = (f"privacy.budget.epsilon={epsilon:g}", "save_model=false")
        yield Case("transfer", f"last layer, epsilon {epsilon:g}", "lectures/cifar10-last-layer", (*changes, public), 5)
        if epsilon in SCRATCH:
            name = f"from scratch, epsilon {epsilon:g}"
            yield Case("transfer", name, "lectures/cifar10-scratch", changes, SCRATCH[epsilon], chunk=1)


PUBLISHED_EPSILON = 7.53


def cifar10() -> Iterator[Case]:
    """All ten classes at the budget that the lecture quotes."""
    budget = f"privacy.budget.epsilon={PUBLISHED_EPSILON}"
    changes = (budget, *preconditioned("cifar10", PUBLISHED_EPSILON), "save_model=false")
    yield Case("cifar10", "features", "frontier/cifar10", changes, 5)


CASES = [*risks(), *activations(), *transfer(), *cifar10()]
