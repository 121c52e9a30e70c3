"""Plain mini-batch gradient descent: no clipping, no noise, no privacy. The yardstick that every table needs."""

from __future__ import annotations

from dpsgd_cli.core.clipping import Clipping
from dpsgd_cli.methods.gradient import GradientMethod


class Sgd(GradientMethod):
    """Releases weights computed from the data without any protection; its ledger stays empty."""

    @property
    def lengths(self) -> list[int]:
        return [int(recipe.epochs) for recipe in self.context.recipes]

    def clipping(self) -> Clipping | None:
        return None

    def privatise(self, epoch: int, step: int) -> None:
        del epoch, step

    def spend(self, epoch: int, trial: int) -> None:
        del epoch, trial
