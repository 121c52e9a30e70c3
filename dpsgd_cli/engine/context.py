"""Inputs that a method gets, and the observer that an audit may give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.engine.tensors import Batch, Table, to_device
from dpsgd_cli.errors import PrivacyError

if TYPE_CHECKING:
    from dpsgd_cli.accounting.ledger import Ledger
    from dpsgd_cli.accounting.mechanism import Mechanism
    from dpsgd_cli.accounting.plan import Plan
    from dpsgd_cli.data.splits import Keys
    from dpsgd_cli.preconditioning.marginals import Columns
    from dpsgd_cli.recipe.schema import Recipe


T = TypeVar("T")
Units = Callable[[int], Sequence[Tensor | float]]
"""Units, by epoch, of a step's sums and of those beside them: numbers, or (R, 1)."""


class AroundNoise(Protocol):
    """Hook around the noise of a step's sums: processes add them up, an audit looks at them."""

    def before_noise(self, beside: Sequence[Tensor]) -> None:
        """Take the sums of the pack, and those (R, n) that are released `beside` them, without noise."""

    def after_noise(self, epoch: int, step: int, mean: Tensor, beside: Sequence[Tensor]) -> None:
        """Take the noisy `mean` (R, P) of the sums and the noisy sums `beside` it; may change them in place."""


class AuditHook:
    """Observer that receives exact (NON-PRIVATE) values during training.

    Only audits (`audit/`) use one; they train on synthetic rows. A training that writes a result has no watcher. Each
    method does nothing here.
    """

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        """Receive the sums (R, n) that `mechanism` releases before or after the steps, before and after noise.

        The watcher may change `noisy` in place; training uses the changed values.
        """

    def drawn(self, step: int, batch: Batch) -> None:
        """Receive the batch of `step`, as the sampler returned it."""

    def around(self, sums: Tensor, divisor: float, units: Units) -> AroundNoise | None:
        """Return what looks at the `sums` of each step around their noise, and at their mean, over `divisor`; or None.

        In `units`, every coordinate has noise of the same standard deviation: the charged multiplier times
        `plan.sensitivity`.
        """
        del sums, divisor, units
        return None

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
    - `columns`: makes the columns that the features consist of; returns None, or no columns, for other features.
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
    columns: Callable[[], Columns | None] = lambda: None
    team: Team = field(default_factory=Team)
    watcher: AuditHook | None = None

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

    def plans_of(self, kind: type[T]) -> list[T]:
        """Return the plan of each trial, all of class `kind`. Raises PrivacyError if one is missing or another."""
        found = [plan for plan in self.plans if isinstance(plan, kind)]
        if len(found) < len(self.plans):
            raise PrivacyError(f"method {self.recipes[0].method.kind} was started without a plan of its own")
        return found

    def column(self, values: list[float], dtype: torch.dtype | None = None) -> Tensor:
        """Return one number per trial, shape (R, 1), on the training device, as `dtype` or the parameters' dtype."""
        own = torch.tensor(values, dtype=dtype or self.pack.values.dtype)
        return to_device(own, self.pack.values.device).unsqueeze(1)
