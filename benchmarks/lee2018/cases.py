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

# What was tried with DP-GD. `{rate}` stands for the data set's step length: 5 for Adult, 10 for Bank.
_UNSCALED = "data.preprocess=[{scale: {}}, {one-hot: {}}]"
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "card's bounds, features on [0, 1]": ("dp-gd-plain", ()),
    "card's bounds, features on [-0.5, 2]": ("dp-gd", ()),
    "card's bounds, [-0.5, 2], momentum 0.9": ("dp-gd-momentum", ()),
    "narrower bounds, features on [0, 1]": ("dp-gd-bounds", (_UNSCALED,)),
    "narrower bounds, features on [-0.5, 2]": ("dp-gd-bounds", ()),
    "... momentum 0.9, a fifth of the step": ("dp-gd-bounds", ("method.optimizer.momentum=0.9", "{rate}*0.2")),
    "... momentum 0.9, a tenth of the step": ("dp-gd-bounds", ("method.optimizer.momentum=0.9", "{rate}*0.1")),
    "... momentum 0.5, half the step": ("dp-gd-bounds", ("method.optimizer.momentum=0.5", "{rate}*0.5")),
    "... half the step": ("dp-gd-bounds", ("{rate}*0.5",)),
    "... twice the step": ("dp-gd-bounds", ("{rate}*2",)),
    "... 50 steps": ("dp-gd-bounds", ("epochs=50",)),
    "... 200 steps": ("dp-gd-bounds", ("epochs=200",)),
    "... 400 steps": ("dp-gd-bounds", ("epochs=400",)),
    "... Adam, step 0.1": ("dp-gd-bounds", ("method.optimizer={kind: adam}", "method.learning_rate=0.1")),
    "... clipped at 0.25, four times the step": ("dp-gd-bounds", ("privacy.clipping.norm=0.25", "{rate}*4")),
    "... clipped at 0.5, twice the step": ("dp-gd-bounds", ("privacy.clipping.norm=0.5", "{rate}*2")),
    "... clipped at 2": ("dp-gd-bounds", ("privacy.clipping.norm=2",)),
    "... last step, not averaged": ("dp-gd-bounds", ("method.averaging=null",)),
    "... average of the last half": ("dp-gd-bounds", ("method.averaging.fraction=0.5",)),
    "... hinge loss": ("dp-gd-bounds", ("model.loss=hinge",)),
}
VARIANT_DATA = ("adult", "bank")

# The optimum without privacy by L2 term and features.
PENALTIES = (1e-3, 1e-5, 0.0)
FEATURES = {
    "card's bounds, [0, 1]": (),
    "narrower bounds, [-0.5, 2]": ("{bounds}", "data.preprocess=[{scale: {to: [-0.5, 2]}}, {one-hot: {}}]"),
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


def variant_overrides(label: str, data: str, repeats: int) -> tuple[str, list[str]]:
    """Recipe and changes of one thing that was tried with DP-GD."""
    recipe, changes = VARIANTS[label]
    rate = _RATES["dp-gd-bounds"] if data == "bank" else 5
    made = overrides(recipe, data, "logistic", repeats)
    for change in changes:
        factor = change.removeprefix("{rate}*")
        made.append(change if factor == change else f"method.learning_rate={rate * float(factor):g}")
    return recipe, made


def optimum_overrides(features: str, penalty: float, data: str, repeats: int) -> list[str]:
    """Changes of the non-private recipe for one cell of the table of optima."""
    changes = [f"data.bounds={BOUNDS[data]}" if change == "{bounds}" else change for change in FEATURES[features]]
    return [f"repeats={repeats}", f"data.name={data}", f"model.l2={penalty:g}", *changes]
