"""What the rest of the program knows of a method: its descriptor, which stands with its settings and nowhere else.

To add a method: a section with a descriptor, and its name in the union `Method` (`methods/settings.py`); a class of
`dpsgd_cli.methods.Method` that runs it; a planner, unless the gradient plan is its own. Nothing else lists methods.

Not here: the sections (`methods/settings.py`, `convex.py`).
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
    """What a method states of itself. What a guarantee rests on has no default; other fields are left out for "no".

    `runs` and `planner` are `module:name`, imported when they are needed, so that a recipe is read without torch.
    `runs`: the class that trains. `planner`: from a recipe and the facts about its data to a plan; None for a method
    that refuses privacy.
    `privacy`: whether a privacy section is needed, refused, or as the recipe wishes.
    `adjacencies`: the neighbours that its proof covers; none where it refuses privacy.
    `by_steps`: it goes step by step over batches of one public width, so its passes may be rounded
    (`engine/precision.py` proves that), compiled, and of augmented records. `in_processes`: its only look at the data
    is the sum that `Team.add_up` makes, so several processes may train it and rows may stay on disk. `only_convex`: it
    is for `model.kind: convex` alone, as a proof that needs convexity is. `by_rule`: settings that are auto are chosen
    by the rule of `training/auto_rule.py`, where it is for the model as well. `correlates`: every sum that it releases
    is made private by the noise of its plan, which may be correlated. `finds_bounds`: its clip bounds may be found from
    what it releases (`clipping/bounds.py`). `by_unit`: what it releases has a proved sensitivity where all rows of a
    user are protected together, too: it sees the mean of a user's clipped or bounded parts, and no row by itself.
    `may_differ`: keys that it reads trial by trial, so that recipes which differ in them train as one pack.
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
    """What methods that see every record in every step say about batching."""

    must_state = ("descriptor",)

    descriptor: ClassVar[Descriptor]
    batching: Literal["full"] = Field("full", description="Every record in every step.")

    @property
    def described(self) -> Descriptor:
        """What the rest of the program knows of this method."""
        return self.descriptor

    @property
    def batch(self) -> None:
        """None: the batch is everything."""
