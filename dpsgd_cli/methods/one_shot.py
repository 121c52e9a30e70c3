"""Methods that release once, at the end of one epoch that does everything. Not here: any of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from dpsgd_cli.core.clipping import Diagnostics
from dpsgd_cli.methods.base import Method


class OneShot(Method):
    """`solve` charges, releases and writes `pack.values`."""

    @abstractmethod
    def solve(self) -> None:
        """Do everything."""

    @property
    def epochs(self) -> int:
        return 1

    @property
    def steps(self) -> int:
        return 1

    @property
    def output(self) -> Tensor:
        return self.context.pack.values

    def run_epoch(self, epoch: int) -> Diagnostics:
        del epoch
        self.solve()
        return Diagnostics(self.context.trials, self.context.pack.values.device)

    def charge(self) -> None:
        """Spend what the plan holds, in every trial."""
        for plan, ledger in zip(self.context.plans, self.context.ledgers, strict=True):
            if plan is not None:
                for release in plan.epochs[0]:
                    ledger.spend(release, 0)

    def state(self) -> dict[str, Any]:
        return {"values": self.context.pack.values.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.context.pack.values.copy_(state["values"])
