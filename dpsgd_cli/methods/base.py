"""Interface of training methods.

A method trains all trials of a pack together, one epoch at a time, and charges the ledgers before it releases.
Evaluation, checkpoints and results are in `training/loop.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import Mechanism
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.engine.tensors import Batch, Table, sent
from dpsgd_cli.preconditioning.marginals import Cells
from dpsgd_cli.recipe.schema import Recipe


class Watcher(Protocol):
    """Observer that receives exact (NON-PRIVATE) values during training.

    Only audits (`audit/`) use one; they train on synthetic rows. A training that writes a result has no watcher.
    """

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        """Receive the sums (R, n) that `mechanism` releases before the first step, before and after noise."""

    def drawn(self, step: int, batch: Batch) -> None:
        """Receive the batch of `step`, as the sampler returned it."""

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        """Receive a step's clipped sums (R, P) before noise, and the noisy mean that the update uses."""

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        """Receive sums (A, P), before and after noise, that are released outside a gradient step.

        `trials` are the A trials whose last charge pays for the release. The P numbers are in the order and units in
        which their sensitivity is bounded.
        """

    def preconditioned(self, trial: int, exact: np.ndarray, noisy: np.ndarray) -> None:
        """Receive a preconditioner's second moments (D, D) or cells (C,), before and after noise.

        The watcher may change `noisy` in place; training uses the changed values.
        """


@dataclass(frozen=True)
class Context:
    """Inputs of a method. Index i of each tuple belongs to trial i.

    All recipes share data, model, method kind, batching and batch size; anything else may differ between trials.
    - `most_rows`: the most rows that a trial holds at once (affects memory only).
    - `feature_bound`: public bound on the norm of a record's features, including the convex model's constant column;
      None if there is no bound.
    - `validation`: held-out rows for a schedule, either public or charged at each look.
    - `public`: records whose features, but not labels, are public.
    - `keys`: keys of the training rows (`data/splits.py`).
    - `cells`: makes the columns whose cells the features consist of; returns none for other features.
    - `team`: the processes that train this pack together.
    - `watcher`: the audit's observer.
    """

    recipes: tuple[Recipe, ...]
    plans: tuple[Plan | None, ...]
    ledgers: tuple[Ledger, ...]
    streams: tuple[Streams, ...]
    pack: Pack
    table: Table
    loss: Loss
    most_rows: int
    base: Path
    feature_bound: float | None = None
    validation: Table | None = None
    public: Table | None = None
    keys: Keys | None = None
    cells: Callable[[], Sequence[Cells]] = tuple
    team: Team = field(default_factory=Team)
    watcher: Watcher | None = None

    @property
    def trials(self) -> int:
        return len(self.recipes)

    @property
    def lasting(self) -> tuple[Streams, ...]:
        """Streams for draws in a method's constructor that a resumed run must repeat. Never use them for noise.

        They depend only on the initial seeds, which every checkpoint holds. Secure `streams` would draw other values.
        """
        pairs = zip(self.streams, self.pack.seeds, strict=True)
        return tuple(own if own.reproducible else SeededStreams(seed) for own, seed in pairs)

    def column(self, values: list[float], dtype: torch.dtype | None = None) -> Tensor:
        """Return one number per trial, shape (R, 1), on the training device, as `dtype` or the parameters' dtype."""
        own = torch.tensor(values, dtype=dtype or self.pack.values.dtype)
        return sent(own, self.pack.values.device).unsqueeze(1)


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
    A method whose charges or stopping point depend on its releases needs a plan that declares it (`Plan.chooses`). The
    statement then gives the budget instead of the amount spent. The plan of a user's own method declares it.
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
