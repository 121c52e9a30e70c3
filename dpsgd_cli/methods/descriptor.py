"""Descriptors of methods: all that the rest of the program knows of a method, stated beside its settings. Planning.

To add a method: a file with its section and descriptor, and its name in the union `Method` (`settings.py`); a
subclass of `dpsgd_cli.methods.base.Method` that runs it; a planner, unless it uses the gradient plan.
Nothing else lists methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.plugins import named
from dpsgd_cli.common.sections import Section
from dpsgd_cli.errors import PrivacyError

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe


EVERY_NEIGHBOUR: tuple[Adjacency, ...] = ("add-remove", "replace-one", "zero-out")
ITS_BUDGET = ("privacy.budget", "privacy.budget_covers", "privacy.delta")
ITS_TRAINING = (
    *ITS_BUDGET,
    *("epochs", "privacy.schedule", "privacy.accountant", "privacy.clipping.norm"),
    *(f"privacy.clipping.{name}" for name in ("quantile", "learning_rate", "count_noise", "initial")),
    *("method.learning_rate", "method.weight_decay", "model.l2", "model.radius"),
)


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Properties of a method. Fields that the guarantee depends on have no default; the others default to "no".

    `runs` and `planner` are `module:name`, imported when they are needed, so that a recipe is read without torch.
    `runs`: the class that trains. `planner`: a function from a recipe and the facts about its data to a plan; None for
    a method that refuses privacy.
    `privacy`: a privacy section is needed, refused or optional.
    `adjacencies`: the adjacencies that the proof covers; empty if the method refuses privacy.
    `minibatch`: the method trains step by step over batches of one public width. So passes may be rounded
    (`engine/precision.py` has the proof), compiled, and run on augmented records.
    `distributable`: the method uses the data only in the sum of `Team.add_up`, so several processes may train it and
    rows may stay on disk.
    `only_convex`: the method is for `model.kind: convex` alone, for example because its proof needs convexity.
    `auto_tunable`: the formulas of `training/auto_rule.py` choose its `auto` settings, if they cover the model as well.
    `correlates`: every sum that it releases has the noise of its plan, which may be correlated.
    `adaptive_clipping`: clip bounds may be computed from its releases (`clipping/bounds.py`).
    `by_unit`: the sensitivity of its releases is also proved if all rows of a user are protected together: it uses the
    mean of a user's clipped or bounded parts, and no row on its own.
    `discovers`: what its budget covers of private columns (`discovery/price.py`): bounds, which are one Gaussian, or
    also names of categories, which cost a delta.
    `per_trial_keys`: keys that are read trial by trial, so that recipes which differ in them train as one pack.
    """

    runs: str
    planner: str | None
    privacy: Literal["needed", "refused", "optional"]
    adjacencies: tuple[Adjacency, ...]
    only_convex: bool
    minibatch: bool = False
    distributable: bool = False
    auto_tunable: bool = False
    per_trial_keys: tuple[str, ...] = ()
    correlates: bool = False
    adaptive_clipping: bool = False
    by_unit: bool = False
    discovers: Literal["nothing", "bounds", "names"] = "nothing"

    def __post_init__(self) -> None:
        stated = self.planner is not None and bool(self.adjacencies)
        if stated == (self.privacy == "refused"):
            raise ValueError(f"{self.runs}: a planner and adjacencies go with privacy, and with nothing else")


class FullBatch(Section):
    """Base of the methods that use every record in every step."""

    must_state = ("descriptor",)

    descriptor: ClassVar[Descriptor]
    batching: Literal["full"] = Field("full", description="Every record in every step.")

    @property
    def described(self) -> Descriptor:
        """Return the method's descriptor."""
        return self.descriptor

    @property
    def batch(self) -> None:
        """Return None: a batch is all records."""


def plan_for(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a private recipe.

    Raises PrivacyError if no guarantee covers it, and InfeasibleBudget if nothing fits the budget.
    """
    method = recipe.method
    if method.described.planner is None:
        raise PrivacyError(f"method {method.kind} has no guarantee to plan; leave privacy out")
    planner: Callable[[Recipe, Facts], Plan] = named(method.described.planner)
    plan = planner(recipe, facts)
    if plan.sampling.adjacency not in method.described.adjacencies:
        proved = " or ".join(method.described.adjacencies)
        raise PrivacyError(
            f"method {method.kind} is proved for privacy.adjacency: {proved}, not {plan.sampling.adjacency}"
        )
    return plan
