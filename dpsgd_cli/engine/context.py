"""Context of a training: the models, rows, plans and ledgers of a pack, and the observer that an audit may give it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.engine.tensors import Batch, Table, to_device

if TYPE_CHECKING:
    from dpsgd_cli.accounting.ledger import Ledger
    from dpsgd_cli.accounting.mechanism import Mechanism
    from dpsgd_cli.accounting.plan import Plan


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


@dataclass(frozen=True, kw_only=True)
class PackContext:
    """Inputs of everything that trains a pack, or releases beside its steps. Index i of each tuple belongs to trial i.

    - `most_rows`: the most rows that a trial holds at once (affects memory only).
    - `feature_bound`: public bound on the norm of a record's features, including the convex model's constant column;
      None if there is no bound.
    - `validation`: held-out rows for a schedule, either public or charged at each look.
    - `team`: the processes that train this pack together.
    - `watcher`: the audit's observer.
    """

    plans: tuple[Plan | None, ...]
    ledgers: tuple[Ledger, ...]
    streams: tuple[Streams, ...]
    pack: Pack
    table: Table
    loss: Loss
    most_rows: int
    feature_bound: float | None = None
    validation: Table | None = None
    team: Team = field(default_factory=Team)
    watcher: AuditHook | None = None

    @property
    def trials(self) -> int:
        return len(self.plans)

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
        return to_device(own, self.pack.values.device).unsqueeze(1)
