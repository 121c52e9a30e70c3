"""What an audit finds and what it costs: reference values by training, and 5,000 observations against as many models.

    python benchmarks/audit.py [reference] [speed]

`reference` trains shipped recipes with the noise of worked cases and prints the bounds of tiers A and B beside values
simulated elsewhere (medians of 20; ours are single runs). `speed` times 5,000 observations of the quickstart, in packs
with canaries, against models trained one at a time, of which each is one observation.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from dpsgd_cli import data
from dpsgd_cli.audit.auditing import audit
from dpsgd_cli.audit.findings import AuditOptions, AuditSize
from dpsgd_cli.audit.stage import at_audit_size
from dpsgd_cli.audit.watch import train
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto

FULL = "yu2019/cancer-uniform"
RHO = ["privacy.delta=1e-5", "privacy.schedule.initial=10", "epochs=until-budget"]
POISSON = ["privacy.budget=null", "privacy.delta=1e-5"]
ALONE = 5


@dataclass(frozen=True)
class Case:
    """A recipe at a claim that was worked out, with so many trials and canaries; A and B as simulated there."""

    claim: float
    recipe: str
    overrides: list[str]
    trials: int
    canaries: int
    without: float
    family: float


def sampled(noise: float, batch: int, epochs: int) -> list[str]:
    """Poisson batches of the quickstart's 1,438 records."""
    schedule = f"privacy.schedule={{kind: uniform, initial: {noise}}}"
    return [*POISSON, schedule, f"method.batch_size={batch}", f"epochs={epochs}"]


CASES = (
    Case(4.377, FULL, [*RHO, "privacy.budget.rho=0.5"], 10, 100, 1.06, 3.34),
    Case(4.377, FULL, [*RHO, "privacy.budget.rho=0.5"], 100, 100, 1.92, 4.02),
    Case(9.997, FULL, [*RHO, "privacy.budget.rho=2"], 100, 100, 4.23, 9.40),
    Case(1.993, FULL, [*RHO, "privacy.budget.rho=0.125"], 100, 100, 0.82, 1.76),
    Case(3.36, "quickstart", sampled(2, 144, 20), 100, 400, 1.82, 3.13),
    Case(1.83, "quickstart", sampled(1, 14, 10), 420, 470, 0.89, 1.61),
    Case(7.43, "quickstart", sampled(0.6, 14, 10), 100, 400, 2.70, 5.65),
)


def reference() -> None:
    """Every case, trained."""
    print(f"{'claim':>7} {'n of each kind':>15} {'A':>6} {'there':>6} {'B':>6} {'there':>6} {'share':>6} seconds")
    for case in CASES:
        begun = time.perf_counter()
        loaded = load_recipe(case.recipe, case.overrides)
        asked = AuditOptions(("A", "B"), trials=case.trials, canaries=case.canaries, curves=False, quick=True)
        found = audit(resolve_auto(loaded), asked)
        low, told = found["lower_bounds"], found["training"]
        each = min(told["in"], told["out"])
        print(
            f"{told['epsilon_of_gradients']:7.3f} {each:15,} {low['A']:6.2f} {case.without:6.2f}"
            f" {low['B']:6.2f} {case.family:6.2f} {low['B'] / case.family:6.1%} {time.perf_counter() - begun:.0f}",
            flush=True,
        )


def speed(observations: int = 5000) -> None:
    """Seconds of training only, for as many observations."""
    loaded = load_recipe("quickstart")
    outline = data.outline(loaded.recipe.data, loaded.base)
    plan = plan_of(resolve_auto(loaded), outline)
    assert plan is not None

    def seconds(size: AuditSize) -> float:
        begun = time.perf_counter()
        train(at_audit_size(resolve_auto(loaded), outline, plan, size))
        return time.perf_counter() - begun

    together = seconds(AuditSize(observations // 100, 100, 1e12))
    alone = min(seconds(AuditSize(1, 1, 1e12)) for _ in range(ALONE)) * observations
    print(
        f"{observations:,} observations of the quickstart: {together:.0f} s with canaries, {alone:,.0f} s one at a time"
    )
    print(f"{alone / together:,.0f} times faster")


if __name__ == "__main__":
    parts = sys.argv[1:] or ["reference", "speed"]
    for part in parts:
        {"reference": reference, "speed": speed}[part]()
