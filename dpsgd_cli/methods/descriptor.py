"""Descriptors of methods: all that the rest of the program knows of a method, stated beside its settings.

To add a method: a folder with its section and descriptor, and its name in the union `Method` (`settings.py`); a
subclass of `dpsgd_cli.methods.base.Method` that runs it; a planner, unless it uses the gradient plan.
Nothing else lists methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.common.sections import Section

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
    `by_steps`: the method trains step by step over batches of one public width. So passes may be rounded
    (`engine/precision.py` has the proof), compiled, and run on augmented records.
    `in_processes`: the method uses the data only in the sum of `Team.add_up`, so several processes may train it and
    rows may stay on disk.
    `only_convex`: the method is for `model.kind: convex` alone, for example because its proof needs convexity.
    `by_rule`: the formulas of `rule.py` choose its `auto` settings, if they cover the model as well.
    `correlates`: every sum that it releases has the noise of its plan, which may be correlated.
    `finds_bounds`: clip bounds may be computed from its releases (`clipping/bounds.py`).
    `by_unit`: the sensitivity of its releases is also proved if all rows of a user are protected together: it uses the
    mean of a user's clipped or bounded parts, and no row on its own.
    `may_differ`: keys that are read trial by trial, so that recipes which differ in them train as one pack.
    """

    runs: str
    planner: str | None
    privacy: Literal["needed", "refused", "optional"]
    adjacencies: tuple[Adjacency, ...]
    only_convex: bool
    by_steps: bool = False
    in_processes: bool = False
    by_rule: bool = False
    may_differ: tuple[str, ...] = ()
    correlates: bool = False
    finds_bounds: bool = False
    by_unit: bool = False

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
