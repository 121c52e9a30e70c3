"""Inputs of a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.preconditioning.marginals import Columns

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Context(PackContext):
    """Inputs of a method: a pack and its recipes.

    All recipes share data, model, method kind, batching and batch size; anything else may differ between trials.
    - `base`: the folder that paths of the recipes are relative to.
    - `public`: records whose features, but not labels, are public.
    - `keys`: keys of the training rows (`data/splits.py`).
    - `columns`: makes the columns that the features consist of; returns None, or no columns, for other features.
    """

    recipes: tuple[Experiment, ...]
    base: Path
    public: Table | None = None
    keys: Keys | None = None
    columns: Callable[[], Columns | None] = lambda: None

    def plans_of(self, kind: type[T]) -> list[T]:
        """Return the plan of each trial, all of class `kind`. Raises PrivacyError if one is missing or another."""
        found = [plan for plan in self.plans if isinstance(plan, kind)]
        if len(found) < len(self.plans):
            raise PrivacyError(f"method {self.recipes[0].method.kind} was started without a plan of its own")
        return found
