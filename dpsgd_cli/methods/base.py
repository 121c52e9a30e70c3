"""Interface of training methods.

A method trains all trials of a pack together, one epoch at a time, and charges the ledgers before it releases.
Evaluation, checkpoints and results are in `training/loop.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.tensors import Table


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
        """Return what a resumed run needs besides seeds, as tensors and plain values; at least the weights."""
        return {"values": self.context.pack.values.clone()}

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
        del epoch
        self.solve()
        return Diagnostics(self.context.trials, self.context.pack.values.device)
