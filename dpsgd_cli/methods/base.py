"""Interface of training methods.

A method trains all trials of a pack together, one epoch at a time, and charges the ledgers before it releases.
Evaluation, checkpoints and results are in `training/loop.py`. A method of one file has its section, price and class
there, and imports torch where it runs, so that recipes are read and priced without torch.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd_cli.common.plugins import load_attribute, named, refusal_of_call
from dpsgd_cli.errors import RecipeError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dpsgd_cli.clipping.run import Diagnostics
    from dpsgd_cli.engine.tensors import Table
    from dpsgd_cli.methods.context import Context


@dataclass(frozen=True)
class Findings:
    """Claimed and measured values, one row of each per trial.

    `claimed` is a function of public numbers and releases. `measured` is NON-PRIVATE: computed without noise on
    training rows. `warnings` are public and concern the claims.
    """

    claimed: list[dict[str, Any]]
    measured: list[dict[str, Any]]
    warnings: tuple[str, ...] = ()


class Method(ABC):
    """Training method for R trials at once.

    Contract: the trial's ledger is charged (`Ledger.spend`) before any noisy value computed from the training data is
    used. Nothing else computed from the training data reaches the weights.
    A constructor draws from `Context.lasting`. Values that are drawn later and needed after an epoch belong to `state`.
    A method whose charges or stopping point depend on its releases needs a plan that declares it (`Plan.is_adaptive`).
    The statement then gives the budget instead of the amount spent. The plan of a user's own method declares it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Number of epochs of the longest trial."""

    @abstractmethod
    def run_epoch(self, epoch: int) -> Diagnostics:
        """Train epoch `epoch` (0, 1, ...); raises BudgetExceeded before a release that does not fit."""

    @property
    def finished(self) -> bool:
        """True if no trial will release anything more; adaptive methods may finish before `epochs` are over."""
        return False

    def findings(self) -> Findings | None:
        """Return excess-risk bounds of each trial; None if no theorem covers the method and its settings."""
        return None

    @property
    def output(self) -> Tensor:
        """Weights (R, P) that the method would publish now; by default the pack's."""
        return self.context.pack.values

    def rows_for_output(self, table: Table) -> Table:
        """Return `table` with its rows as `output` expects them; only a preconditioner changes rows."""
        return table

    @property
    def cuts(self) -> Sequence[Tensor]:
        """Cuts that prediction needs, one per trial, made from a preconditioner's releases; empty before these."""
        return ()

    def after_training(self) -> dict[str, Sequence[np.ndarray]]:
        """Return arrays that a model's file keeps beside the weights, by name; one per trial, or none.

        The first call, after the last step, makes the releases that this needs. They were charged beforehand. Names:
        maps A (D, D) of rows (`preconditioning/maps.py`), vectors of intervals (`intervals/run.py`), and scale and
        shift (2,) of predictions, which the weights hold (`calibration/run.py`).
        """
        return {}

    def published(self) -> dict[str, list[float]]:
        """Return current numbers of the trials for `history.csv`, (R,) by name; public, computed from releases."""
        return {}

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps of an epoch."""

    @abstractmethod
    def unfinished(self, done: int) -> str | None:
        """Return why `output` after `done` < `epochs` epochs cannot be published as a result; None if it can."""

    def charged_for(self, done: int) -> bool:
        """Return True if the ledgers hold the releases of `done` epochs, as replayed from a loaded state.

        Methods whose charges depend on their releases override it.
        """
        del done
        return True

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides seeds, as tensors on the host and plain values; at least the weights.

        Further training does not change it.
        """
        from dpsgd_cli.engine.tensors import to_host

        return {"values": to_host(self.context.pack.values)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.context.pack.values.copy_(state["values"])


class OneShot(Method):
    """Method that releases once, at the end of its single epoch."""

    epochs = 1
    steps = 1

    @abstractmethod
    def solve(self) -> None:
        """Charge the ledgers, release, and write the weights to `pack.values`."""

    def unfinished(self, done: int) -> str | None:
        return "it releases once, at its end"

    def charge(self) -> None:
        """Charge every trial's ledger for the releases of its plan."""
        for plan, ledger in zip(self.context.plans, self.context.ledgers, strict=True):
            if plan is not None:
                for release in plan.epochs[0]:
                    ledger.spend(release, 0)

    def run_epoch(self, epoch: int) -> Diagnostics:
        from dpsgd_cli.clipping.run import Diagnostics

        del epoch
        self.solve()
        return Diagnostics(self.context.trials, self.context.pack.values.device)


def create(context: Context) -> Method:
    """Return the method that the recipes name, ready for its first epoch.

    Raises UsageError for several processes if the method does not support them.
    """
    _refuse(context)
    made: Method = named(context.recipes[0].method.described.runs)(context)
    return made


def _refuse(context: Context) -> None:
    settings, processes, privacy = context.recipes[0].method, context.team.size, context.recipes[0].privacy
    if processes > 1 and privacy is not None and privacy.unit is not None:
        raise UsageError(
            f"privacy.unit: users are trained on in one process, not in {processes}; start without torchrun"
        )
    if settings.described.distributable:
        followed = any(r.privacy is not None and r.privacy.schedule.adaptive for r in context.recipes)
        if followed and processes > 1:
            raise UsageError(
                "privacy.schedule validation looks at records between epochs, which has no rule for"
                f" {processes} processes; start it without torchrun, or use another schedule"
            )
        return
    name = f"method {settings.kind}{', one record a step' if settings.batching == 'fixed' else ''}"
    if processes > 1:
        raise UsageError(f"{name} trains in one process, not in {processes}; start it without torchrun")


def own(context: Context) -> Method:
    """Return the user's own method, whose clipping is checked in every step; RecipeError if it is no `Method`."""
    settings: Any = context.recipes[0].method
    if all(recipe.privacy is not None for recipe in context.recipes):
        kinds, layers = [recipe.required_privacy.clipping for recipe in context.recipes], len(context.pack.layers)
        context.pack.charged_norms = [
            sys.float_info.max if kind.in_units else kind.norm_bound(layers) for kind in kinds
        ]
    factory = own_factory(settings, context.base)
    made = factory(context)
    if not isinstance(made, Method):
        what = factory.__name__ if isinstance(factory, type) else type(made).__name__
        raise RecipeError(f"{settings.file}: {settings.factory} gives {what}, not a dpsgd_cli.methods.base.Method")
    return made


def own_factory(settings: Any, base: Path) -> Callable[[Context], Any]:
    """Return the factory of a user's own method; RecipeError if it is missing or does not take a context."""
    factory = load_attribute(base / settings.file, settings.factory)
    refusal = refusal_of_call(factory, settings.factory, {"context": None}, {})
    if refusal is not None:
        raise RecipeError(f"{settings.file}: {refusal}")
    found: Callable[[Context], Any] = factory
    return found
