"""One audit of every family of shipped recipes, small: `python -m tests.audit.families [WORD]`.

What makes a recipe long is shortened: epochs, layers, images. Its method, batching, clipping, schedule and kind of
budget stay. Exit code 1 where a claim is refuted, or the recipe of a family is passed without a word. Left out are the
residual networks of `de2022/`, of which a step alone takes seconds.
"""

from __future__ import annotations

import sys
import time

from dpsgd_cli.audit.auditing import audit
from dpsgd_cli.audit.findings import AuditOptions, lines
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import resolve_auto

SHORT = ["epochs=4"]
SMALL = ["model.hidden=[8]"]
# their own 0.4 is less than any attack of this size can see
SEEN = ["privacy.budget={epsilon: 4, delta: 1e-5}"]
CONFIDENCE = 0.999
"""Of each: all together raise a false alarm in one run of thirty."""
FAMILIES: dict[str, list[str]] = {
    "quickstart": ["epochs=10"],
    "mnist-poisson": [*SMALL, "epochs=1"],
    "lectures/adult-dp-gd": ["epochs=60"],
    "lectures/adult-single": ["epochs=1"],
    "lee2018/dp-gd": [],
    "lee2018/dp-gd-momentum": [],
    "lee2018/sgd-ma": ["epochs=2"],
    "lee2018/sgd-adv": ["epochs=2"],
    "lee2018/dp-agd": ["method.splits=10"],
    "lee2018/privgene": ["method.rounds=3", *SEEN],
    "lee2018/objective-perturbation": SEEN,
    "lee2018/output-perturbation": SEEN,
    "lee2018/majority": [],
    "yu2019/cancer-uniform": [],
    "yu2019/cancer-exponential": [],
    "yu2019/mnist-validation": [*SMALL, *SHORT],
    "yu2019/mnist-polynomial-as-published": [*SMALL, *SHORT],
    "yu2019/mnist-private-selection": [*SMALL, "privacy.budget.rho=0.1"],
    "yu2019/cifar10-uniform": SHORT,
    "pate/adult-confident": ["method.teachers.epochs=2"],
    "pate/adult-dp-sgd": [],
    "tabular/adult": ["privacy.budget.epsilon=4"],
    "beyond/adult-influence": [],
    "beyond/mnist-banded": ["epochs=2"],
    "beyond/mnist-allocation": ["epochs=2", "privacy.noise={kind: banded, bands: 2}"],
    "beyond/mnist-automatic": [*SMALL, "epochs=1"],
    "beyond/adult-users": SHORT,
    "beyond/mnist-quantile": [*SMALL, "epochs=1"],
    "beyond/adult-fixed": SHORT,
    "beyond/adult-replaced": SHORT,
    "tramer2021/mnist-cnn": ["epochs=1"],
    "tramer2021/mnist-scattering-linear": ["epochs=1"],
}


def main(word: str) -> int:
    """Audit those of which the name has `word`."""
    failed = 0
    for name, overrides in FAMILIES.items():
        if word not in name:
            continue
        begun = time.perf_counter()
        found = audit(resolve_auto(load_recipe(name, overrides)), AuditOptions(confidence=CONFIDENCE, quick=True))
        print(f"{name} {' '.join(overrides)} ({time.perf_counter() - begun:.0f} s)")
        print("\n".join(f"  {line}" for line in lines(found)), flush=True)
        failed += found["refuted"] or not (found["findings"] or found["not_audited"])
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1] if len(sys.argv) > 1 else "")))
