"""Every training of the page of Lee and Kifer 2018: methods, data sets, losses, studies, and what was tried with DP-GD.

Not here: training (`benchmarks/pages`), what the numbers say (`page.py`, `page.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.pages.case import Case

EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
DATA = ("adult", "bank", "ipums", "kddcup99")
LARGE = ("kddcup99",)
LOSSES = ("logistic", "svm")
TITLES = {"adult": "Adult", "bank": "Bank", "ipums": "IPUMS-BR", "kddcup99": "KDDCup99"}

_SMOOTH_SVM = ("objective-perturbation", "output-perturbation")
_NO_L2 = "non-private:model.l2=0"

METHODS = {
    "dp-agd": "DP-AGD, as published",
    "objective-perturbation": "ObjPert",
    "output-perturbation": "OutPert",
    "privgene": "PrivGene",
    "sgd-adv": "SGD-Adv",
    "sgd-ma": "SGD-MA",
    "majority": "Majority",
    "non-private": "NonPrivate",
    _NO_L2: "NonPrivate, no L2 term",
    "dp-agd-better": "DP-AGD, better split",
    "dp-agd-momentum": "DP-AGD, better split, momentum",
    "dp-gd-plain": "DP-GD",
    "dp-gd": "DP-GD, scaled features",
    "dp-gd-momentum": "DP-GD, scaled features, momentum",
    "dp-gd-bounds": "DP-GD, scaled features, narrower bounds",
}

# Narrower public bounds: gains of 20,000 dollars, calls of half an hour, the payload of one Ethernet frame. The columns
# of IPUMS-BR have no names, so nothing is known of them.
BOUNDS = {
    "adult": "{capital-gain: [0, 20000]}",
    "bank": "{duration: [0, 1800]}",
    "kddcup99": "{src_bytes: [0, 1500], dst_bytes: [0, 1500]}",
}
_RATES = {"dp-gd": 10, "dp-gd-bounds": 10, "dp-gd-momentum": 2}

REPEATS, LARGE_REPEATS, STUDY_REPEATS = 20, 5, 10
"""Of all five folds, as the paper has them; KDDCup99 is ten times as long as the others."""

STUDY_EPSILONS = (0.1, 0.4, 1.6)
STUDIES: dict[str, tuple[Any, ...]] = {
    "splits": (10, 20, 40, 60, 80, 100),
    "gamma": (0.01, 0.1, 0.2, 0.5, 1.0),
    "gradient_clip": (0.5, 1, 2, 3, 5),
    "objective_clip": (0.5, 1, 2, 3, 5),
}

# DP-AGD on Adult's SVM, up to a budget at which there is hardly any noise.
KINK = ("dp-agd", "dp-agd-better", "dp-agd-momentum")
KINK_EPSILONS = (0.1, 1.6, 25.6)


def methods_of(data: str) -> list[str]:
    """The methods that have a row for a data set: without an L2 term, L-BFGS takes too long on a large one."""
    skipped = {"dp-gd-bounds": data not in BOUNDS, _NO_L2: data in LARGE}
    return [method for method in METHODS if not skipped.get(method, False)]


def overrides(method: str, data: str, loss: str) -> tuple[str, ...]:
    """What turns the Adult logistic recipe of `method` into that of another data set or loss."""
    changes = method.split(":")[1:]
    if data != "adult":
        changes.append(f"data.name={data}")
        if method == "dp-gd-bounds":
            changes.append(f"data.bounds={BOUNDS[data]}")
    if data == "bank" and method in _RATES:
        changes.append(f"method.learning_rate={_RATES[method]}")
    if loss == "svm" and method != "majority":
        changes.append(f"model.loss={'huber-svm' if method in _SMOOTH_SVM else 'hinge'}")
        if not method.startswith("dp-gd") and "l2" not in method:
            changes.append("model.l2=0.01")
    if not method.startswith("non-private"):
        changes.append("runtime.evaluate_every=100000")
    return tuple(changes)


def named(method: str, epsilon: float) -> str:
    """The case of a method at a budget; without one for what has none."""
    return method if method.startswith("non-private") else f"{method} {epsilon:g}"


def _figure(data: str, loss: str) -> Iterator[Case]:
    """Figures 2 and 3: every method at every budget; the budgets of a method train together."""
    table, repeats = f"{data} {loss}", LARGE_REPEATS if data in LARGE else REPEATS
    for method in methods_of(data):
        recipe, changes = f"lee2018/{method.split(':')[0]}", overrides(method, data, loss)
        for epsilon in EPSILONS[:1] if method.startswith("non-private") else EPSILONS:
            budget = () if method.startswith("non-private") else (f"privacy.budget.epsilon={epsilon:g}",)
            yield Case(table, named(method, epsilon), recipe, (*changes, *budget), repeats, pack=f"{table} {method}")


def _studies() -> Iterator[Case]:
    """Figure 1: DP-AGD on Adult with one parameter changed; all values and budgets train together."""
    for key, values in STUDIES.items():
        for value in values:
            for epsilon in STUDY_EPSILONS:
                own = (f"method.{key}={value}", f"privacy.budget.epsilon={epsilon:g}")
                changes = (*overrides("dp-agd", "adult", "logistic"), *own)
                yield Case(key, f"{value:g} {epsilon:g}", "lee2018/dp-agd", changes, STUDY_REPEATS, pack=key)


def _kink() -> Iterator[Case]:
    """DP-AGD on Adult's SVM, up to a budget at which there is hardly any noise."""
    for method in KINK:
        for epsilon in KINK_EPSILONS:
            changes = (*overrides(method, "adult", "svm"), f"privacy.budget.epsilon={epsilon:g}")
            yield Case("kink", named(method, epsilon), f"lee2018/{method}", changes, STUDY_REPEATS, pack=method)


CASES = [
    *(case for data in DATA for loss in LOSSES for case in _figure(data, loss)),
    *_kink(),
    *_studies(),
]
