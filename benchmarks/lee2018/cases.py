"""What is run: methods, data sets, losses, and the changes that turn one recipe into the case of a table.

Not here: running (`runs.py`), what the numbers say (`page.py`).
"""

from __future__ import annotations

from typing import Any

EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
DATA = ("adult", "bank", "ipums", "kddcup99")
LARGE = ("kddcup99",)
LOSSES = ("logistic", "svm")
TITLES = {"adult": "Adult", "bank": "Bank", "ipums": "IPUMS-BR", "kddcup99": "KDDCup99"}

_SMOOTH_SVM = ("objective-perturbation", "output-perturbation")
_NO_L2 = "non-private:model.l2=0"

# the seven methods of the paper's Figure 2, whose time is bounded; Majority takes none
OF_FIGURE_2 = (
    "dp-agd",
    "objective-perturbation",
    "output-perturbation",
    "privgene",
    "sgd-adv",
    "sgd-ma",
    "non-private",
)
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

# What was tried with DP-GD: changes of `dp-gd` or `dp-gd-momentum`, with narrower bounds unless they say otherwise.
# Rows without a change are those of the data set's own table.
VARIANT_EPSILONS = (0.1, 0.4)
_GAINS, _CALLS = f"data.bounds={BOUNDS['adult']}", f"data.bounds={BOUNDS['bank']}"
_FEW = "{duration: [0, 1800], balance: [-1000, 10000], campaign: [1, 10], pdays: [-1, 400], previous: [0, 10]}"
_MORE = "{capital-gain: [0, 20000], capital-loss: [0, 2500], age: [16, 90], fnlwgt: [0, 500000]}"
_OWN = {
    "card's bounds, features on [0, 1]": ("dp-gd-plain", ()),
    "card's bounds, features on [-0.5, 2]": ("dp-gd", ()),
    "card's bounds, [-0.5, 2], momentum 0.9": ("dp-gd-momentum", ()),
    "narrower bounds, [-0.5, 2]": ("dp-gd-bounds", ()),
}


def _scaled(low: float, high: float) -> str:
    return f"data.preprocess=[{{scale: {{to: [{low:g}, {high:g}]}}}}, {{one-hot: {{}}}}]"


def _rate(rate: float) -> str:
    return f"method.learning_rate={rate:g}"


VARIANTS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "adult": {
        **_OWN,
        "gains up to 15,000": ("dp-gd", ("data.bounds={capital-gain: [0, 15000]}",)),
        "gains up to 30,000": ("dp-gd", ("data.bounds={capital-gain: [0, 30000]}",)),
        "gains up to 50,000": ("dp-gd", ("data.bounds={capital-gain: [0, 50000]}",)),
        "four columns narrower": ("dp-gd", (f"data.bounds={_MORE}",)),
        "features on [0, 1]": ("dp-gd", (_GAINS, _scaled(0, 1))),
        "features on [0, 2]": ("dp-gd", (_GAINS, _scaled(0, 2))),
        "features on [-1, 1]": ("dp-gd", (_GAINS, _scaled(-1, 1))),
        "features on [-0.5, 3]": ("dp-gd", (_GAINS, _scaled(-0.5, 3))),
        "step 3": ("dp-gd", (_GAINS, _rate(3))),
        "step 10": ("dp-gd", (_GAINS, _rate(10))),
        "50 steps": ("dp-gd", (_GAINS, "epochs=50")),
        "50 steps of 10": ("dp-gd", (_GAINS, "epochs=50", _rate(10))),
        "200 steps of 3": ("dp-gd", (_GAINS, "epochs=200", _rate(3))),
        "200 steps": ("dp-gd", (_GAINS, "epochs=200")),
        "200 steps of 10": ("dp-gd", (_GAINS, "epochs=200", _rate(10))),
        "400 steps": ("dp-gd", (_GAINS, "epochs=400")),
        "momentum 0.9, step 1": ("dp-gd-momentum", (_GAINS,)),
        "momentum 0.9, step 0.5": ("dp-gd-momentum", (_GAINS, _rate(0.5))),
        "momentum 0.9, 200 steps of 0.5": ("dp-gd-momentum", (_GAINS, _rate(0.5), "epochs=200")),
        "momentum 0.8, step 1.5": ("dp-gd-momentum", (_GAINS, _rate(1.5), "method.optimizer.momentum=0.8")),
        "momentum 0.5, step 3": ("dp-gd-momentum", (_GAINS, _rate(3), "method.optimizer.momentum=0.5")),
        "Adam, step 0.05": ("dp-gd", (_GAINS, "method.optimizer={kind: adam}", _rate(0.05))),
        "Adam, step 0.1": ("dp-gd", (_GAINS, "method.optimizer={kind: adam}", _rate(0.1))),
        "Adam, 200 steps of 0.02": ("dp-gd", (_GAINS, "method.optimizer={kind: adam}", _rate(0.02), "epochs=200")),
        "clipped at 0.25, step 20": ("dp-gd", (_GAINS, "privacy.clipping.norm=0.25", _rate(20))),
        "clipped at 0.5, step 10": ("dp-gd", (_GAINS, "privacy.clipping.norm=0.5", _rate(10))),
        "clipped at 2": ("dp-gd", (_GAINS, "privacy.clipping.norm=2")),
        "average of the last fifth": ("dp-gd", (_GAINS, "method.averaging.fraction=0.2")),
        "average of the last half": ("dp-gd", (_GAINS, "method.averaging.fraction=0.5")),
        "L2 term of 0.0001": ("dp-gd", (_GAINS, "model.l2=0.0001")),
        "hinge loss": ("dp-gd", (_GAINS, "model.loss=hinge")),
        "Huber SVM": ("dp-gd", (_GAINS, "model.loss=huber-svm")),
    },
    "bank": {
        **_OWN,
        "calls up to 20 minutes": ("dp-gd", ("data.bounds={duration: [0, 1200]}", _rate(10))),
        "five columns narrower": ("dp-gd", (f"data.bounds={_FEW}", _rate(10))),
        "step 5": ("dp-gd", (_CALLS, _rate(5))),
        "step 20": ("dp-gd", (_CALLS, _rate(20))),
        "200 steps": ("dp-gd", (_CALLS, _rate(10), "epochs=200")),
        "momentum 0.9, step 2": ("dp-gd-momentum", (_CALLS, _rate(2))),
        "momentum 0.8, step 2": ("dp-gd-momentum", (_CALLS, _rate(2), "method.optimizer.momentum=0.8")),
        "momentum 0.9, step 2, five columns narrower": ("dp-gd-momentum", (f"data.bounds={_FEW}", _rate(2))),
        "momentum 0.9, step 1, five columns narrower": ("dp-gd-momentum", (f"data.bounds={_FEW}", _rate(1))),
        "clipped at 0.5, step 20": ("dp-gd", (_CALLS, "privacy.clipping.norm=0.5", _rate(20))),
    },
}

# The optimum without privacy by L2 term and features.
PENALTIES = (1e-3, 1e-5, 0.0)
FEATURES: dict[str, tuple[str, ...]] = {
    "card's bounds, [0, 1]": (),
    "narrower bounds, [-0.5, 2]": ("{bounds}", _scaled(-0.5, 2)),
}


def methods_of(data: str) -> list[str]:
    """The methods that have a row for a data set: without an L2 term, L-BFGS takes too long on a large one."""
    skipped = {"dp-gd-bounds": data not in BOUNDS, _NO_L2: data in LARGE}
    return [method for method in METHODS if not skipped.get(method, False)]


def overrides(method: str, data: str, loss: str, repeats: int) -> list[str]:
    """What turns the Adult logistic recipe of `method` into that of another data set or loss."""
    changes = [f"repeats={repeats}", *method.split(":")[1:]]
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
    return changes


def variant_overrides(data: str, label: str, repeats: int, own_repeats: int) -> tuple[str, list[str]]:
    """Recipe and changes of one thing that was tried with DP-GD; rows of `figure` have its number of repeats."""
    recipe, changes = VARIANTS[data][label]
    if not changes:
        return recipe, overrides(recipe, data, "logistic", own_repeats)
    return recipe, [f"data.name={data}", f"repeats={repeats}", "runtime.evaluate_every=100000", *changes]


def optimum_overrides(features: str, penalty: float, data: str, repeats: int) -> list[str]:
    """Changes of the non-private recipe for one cell of the table of optima."""
    changes = [f"data.bounds={BOUNDS[data]}" if change == "{bounds}" else change for change in FEATURES[features]]
    return [f"data.name={data}", f"repeats={repeats}", f"model.l2={penalty:g}", *changes]
