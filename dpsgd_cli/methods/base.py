"""What a training method is: it advances all trials of a pack by one epoch at a time, and spends before it releases.

Not here: any method (one file each beside this), evaluation, checkpoints and results (`experiment.py`).
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

from dpsgd_cli.core.clipping import Diagnostics
from dpsgd_cli.core.losses import Loss
from dpsgd_cli.core.marginals import Cells
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.processes import Team
from dpsgd_cli.core.streams import SeededStreams, Streams
from dpsgd_cli.core.tensors import Batch, Table, sent
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.privacy.ledger import Ledger
from dpsgd_cli.privacy.mechanism import Mechanism
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.schema import Recipe


class Watcher(Protocol):
    """NON-PRIVATE: sees, while trials train, what nobody else may. For audits (`audit/`), which train on no records.

    No training that writes a result has one.
    """

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        """Of what `mechanism` releases before the first step: sums (R, n) before and after noise."""

    def drawn(self, step: int, batch: Batch) -> None:
        """The batch of `step`, as its sampler gave it."""

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        """Of a step: the clipped sums (R, P) before noise, and the noisy mean that the update is made from."""

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        """Of `trials` that were charged last for it: sums (A, P) before and after noise, of what is no step of descent.

        P numbers in the order and the units in which their sensitivity is bounded.
        """

    def preconditioned(self, trial: int, exact: np.ndarray, noisy: np.ndarray) -> None:
        """Of a preconditioner: second moments (D, D), or cells (C,), before and after noise.

        What is left in `noisy` is used.
        """


@dataclass(frozen=True)
class Context:
    """Everything a method works on. Index i of each tuple belongs to trial i.

    All recipes share data, model, method kind, batching and batch size; anything else may differ between
    trials. `most_rows` bounds how many rows a trial may hold at once (memory only). `feature_bound` is the public
    bound on the norm of a record's features, the convex model's constant column included; None where there is none.
    `validation` are held-out rows that a schedule may look at: public, or charged by the look. `public` are records
    that are public without their labels, and `keys` those of the training rows (`data/splits.py`). `cells` makes the
    columns in cells that features are made of, where they are. `team` are the processes that train this pack together;
    `watcher` audits them.
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
        """Streams for what a method draws while it is made, and must find again after a resume; never for noise.

        Functions of the initial seeds, which every checkpoint holds: secure `streams` would draw something else.
        """
        pairs = zip(self.streams, self.pack.seeds, strict=True)
        return tuple(own if own.reproducible else SeededStreams(seed) for own, seed in pairs)

    def column(self, values: list[float], dtype: torch.dtype | None = None) -> Tensor:
        """One number a trial as (R, 1) on the training device, in the precision of the parameters or in `dtype`."""
        own = torch.tensor(values, dtype=dtype or self.pack.values.dtype)
        return sent(own, self.pack.values.device).unsqueeze(1)


@dataclass(frozen=True)
class Findings:
    """A row a trial of what is claimed (a function of public numbers and releases) and one of what was measured.

    NON-PRIVATE: what is measured, without noise, on training rows. `warnings` are public, of what is claimed.
    """

    claimed: list[dict[str, Any]]
    measured: list[dict[str, Any]]
    warnings: tuple[str, ...] = ()


class Method(ABC):
    """A training method for R trials at once.

    Contract: before anything computed from the training data is used with noise, the trial's ledger has
    been charged for it (`Ledger.spend`), and nothing else computed from the training data reaches the weights.
    What a constructor draws comes from `Context.lasting`; what is drawn later and still needed after an epoch is part
    of `state`.
    A method whose charges, or whose end, depend on what it released needs a plan that says so (`Plan.chooses`): then
    the budget is stated, and not what was spent. That of a user's own method says it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Epochs of the longest trial."""

    @abstractmethod
    def run_epoch(self, epoch: int) -> Diagnostics:
        """Train epoch `epoch` (0, 1, ...); raises BudgetExceeded before a release that does not fit."""

    @property
    def finished(self) -> bool:
        """Whether no trial will release anything more, before `epochs` are over (adaptive methods)."""
        return False

    def findings(self) -> Findings | None:
        """What a theorem says of each trial's excess risk, where one covers the method and its settings."""
        return None

    @property
    def output(self) -> Tensor:
        """The weights (R, P) that the method would publish now: the pack's, unless it says otherwise."""
        return self.context.pack.values

    def rows_for_output(self, table: Table) -> Table:
        """The rows of `table` as the `output` is to be used on: as they are, unless a preconditioner changes them."""
        return table

    @property
    def cuts(self) -> Sequence[Tensor]:
        """What a preconditioner's releases were made into, one a trial, once they were; predicting takes them."""
        return ()

    def published(self) -> dict[str, list[float]]:
        """Numbers of each trial now, (R,) by name, for `history.csv`: functions of what was released, hence public."""
        return {}

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps of one epoch."""

    @abstractmethod
    def unfinished(self, done: int) -> str | None:
        """Why the `output` after `done` epochs, fewer than `epochs`, is no result to publish; None where it is one."""

    def charged_for(self, done: int) -> bool:
        """Whether the ledgers hold what `done` epochs released, by a state that was loaded; for methods that choose."""
        del done
        return True

    def state(self) -> dict[str, Any]:
        """Everything besides the seeds that continuing needs, as tensors and plain values; at least the weights."""
        return {"values": self.context.pack.values.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        self.context.pack.values.copy_(state["values"])


class OneShot(Method):
    """A method that releases once, at the end of one epoch that does everything."""

    epochs = 1
    steps = 1

    @abstractmethod
    def solve(self) -> None:
        """Charge, release and write `pack.values`."""

    def unfinished(self, done: int) -> str | None:
        return "it releases once, at its end"

    def charge(self) -> None:
        """Spend what the plan holds, in every trial."""
        for plan, ledger in zip(self.context.plans, self.context.ledgers, strict=True):
            if plan is not None:
                for release in plan.epochs[0]:
                    ledger.spend(release, 0)

    def run_epoch(self, epoch: int) -> Diagnostics:
        del epoch
        self.solve()
        return Diagnostics(self.context.trials, self.context.pack.values.device)
