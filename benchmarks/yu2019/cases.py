"""Every training of the reproduction of Yu et al. 2019: a shipped recipe, what is changed in it, and what it is for.

Not here: running them (`reproduce.py`), the page (`page.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

SCHEDULES = ("uniform", "time", "step", "exponential", "polynomial", "validation")
DECAYS = ("time", "step", "exponential", "polynomial")
EPOCHS = {"uniform": 100, "time": 38, "step": 31, "exponential": 71, "polynomial": 44}
LENGTHS = (30, 60, 100)
SOLVED = {
    "time": "{kind: time, initial: 10, decay: auto}",
    "step": "{kind: step, initial: 10, decay: auto, period: 10}",
    "exponential": "{kind: exponential, initial: 10, decay: auto}",
    "polynomial": "{kind: polynomial, initial: 10, final: 2, decay: auto, period: 100}",
    "uniform": "{kind: uniform, initial: auto}",
}
CANCER_REPEATS = 400
HIDDEN_UNITS = (
    "data.features={kind: scattering, pool: 1, groups: 27}",
    "model={kind: mlp, hidden: [1000], activation: relu}",
)
SPARSELY = "runtime.evaluate_every=10"
NON_PRIVATE_AS_IN_THE_PAPER = "non-private, as in the paper"
AS_IN_THE_PAPER = ("method.learning_rate=0.05", "data.preprocess=[{pca: {components: 60, public: true}}]")


@dataclass(frozen=True)
class Case:
    """One training. `figure` and `x` say where it goes on the page."""

    figure: str
    x: str
    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.figure}/{self.x}"


def cases(repeats: int) -> list[Case]:
    """All trainings, the most important first; `repeats` trials each, and more where a trial takes no time."""
    groups = [_table_2(), _cancer(), _published(), _fixed_length(), _rates(), _sizes(), _initial()]
    found = []
    # the first use of CIFAR-10 makes its features, which the others find, so it comes long before them
    first, *others = _cifar()
    for case in (first, *(case for group in groups for case in group), *others):
        trials = CANCER_REPEATS if case.figure == "cancer" else repeats
        found.append(replace(case, overrides=(*case.overrides, f"repeats={trials}")))
    return found


def _table_2() -> Iterator[Case]:
    for kind in SCHEDULES:
        yield Case("table2", kind, f"yu2019/mnist-{kind}")
    yield Case("table2", "non-private", "yu2019/mnist-non-private")
    yield Case("table2", NON_PRIVATE_AS_IN_THE_PAPER, "yu2019/mnist-non-private", AS_IN_THE_PAPER)
    for kind in DECAYS:
        yield Case("control", kind, f"yu2019/mnist-uniform-{EPOCHS[kind]}", (SPARSELY,))


def _published() -> Iterator[Case]:
    for kind in ("uniform", *DECAYS):
        yield Case("as-published", kind, f"yu2019/mnist-{kind}-as-published", (SPARSELY,))


def _cancer() -> Iterator[Case]:
    for kind in ("uniform", "exponential", "validation", "non-private"):
        yield Case("cancer", kind, f"yu2019/cancer-{kind}", ("runtime.evaluate_every=20",))


def _cifar() -> Iterator[Case]:
    for kind in ("uniform", "exponential", "validation", "non-private"):
        yield Case("cifar", kind, f"yu2019/cifar10-{kind}", (SPARSELY,))
    yield Case("cifar", "exponential, 1,000 hidden units", "yu2019/cifar10-exponential", (*HIDDEN_UNITS, SPARSELY))


def _fixed_length() -> Iterator[Case]:
    """Figures 5 and 6: each decay function, and uniform noise, at fixed numbers of epochs."""
    for length in LENGTHS:
        for kind in (*DECAYS, "uniform"):
            if (kind, length) != ("uniform", 100):
                over = (
                    f"privacy.schedule={SOLVED[kind]}",
                    f"epochs={length}",
                    "privacy.budget_covers=training",
                    SPARSELY,
                )
                yield Case("length", f"{kind} {length}", "yu2019/mnist-exponential", over)


def _rates() -> Iterator[Case]:
    """Figures 7 to 9: decay rates of two schedules, and what the learning rate falls to."""
    over: tuple[str, ...]
    for decay in (0.005, 0.02, 0.05, 0.1, 0.2, 0.5):
        over = (f"privacy.schedule.decay={decay}", SPARSELY)
        yield Case("decay", str(decay), "yu2019/mnist-exponential", over)
    for decay in (0.3, 0.5, 0.9):
        over = (f"privacy.schedule.decay={decay}", SPARSELY)
        yield Case("validation-decay", str(decay), "yu2019/mnist-validation", over)
    for final in (0.03, 0.09, 0.15, 0.21):
        rate = f"method.learning_rate={{kind: linear, initial: 0.3, final: {final}, epochs: 10}}"
        over = ("privacy.schedule.decay=0.0138", rate, SPARSELY)
        yield Case("learning-rate", str(final), "yu2019/mnist-exponential", over)


def _sizes() -> Iterator[Case]:
    """Figure 10 and Table IV: hidden units, and layers (of 200 units: 1000 would take hours)."""
    over: tuple[str, ...]
    base = ("privacy.schedule.decay=0.0138", SPARSELY)
    for units in (200, 800, 1600):
        over = (*base, f"model.hidden=[{units}]")
        yield Case("hidden", str(units), "yu2019/mnist-exponential", over)
    for layers in (2, 3):
        over = (*base, f"model.hidden={[200] * layers}")
        yield Case("layers", str(layers), "yu2019/mnist-exponential", over)


def _initial() -> Iterator[Case]:
    """Figure 11: the first noise multiplier, (a) at 60 epochs, (b) at a fixed decay rate."""
    over: tuple[str, ...]
    for initial in (7, 12, 20):
        schedule = f"{{kind: exponential, initial: {initial}, decay: auto}}"
        over = (f"privacy.schedule={schedule}", "epochs=60", SPARSELY)
        yield Case("initial-60", str(initial), "yu2019/mnist-exponential", over)
        over = (f"privacy.schedule={{kind: exponential, initial: {initial}, decay: 0.015}}", SPARSELY)
        yield Case("initial-rate", str(initial), "yu2019/mnist-exponential", over)
