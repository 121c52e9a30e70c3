"""Projected gradient descent without noise or privacy (Lecture 15, Algorithm 1; Lecture 9, section 4)."""

from __future__ import annotations

import math

from dpsgd_cli.core.clipping import Clipping
from dpsgd_cli.methods.full_batch import FullBatchMethod
from dpsgd_cli.privacy.lipschitz import constants_of
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.model import ConvexModel


class Gd(FullBatchMethod):
    """Releases weights computed from the data without any protection; its ledger stays empty."""

    @property
    def lengths(self) -> list[int]:
        return [int(recipe.epochs) for recipe in self.context.recipes]

    def learning_rates(self, epoch: int) -> list[float]:
        return self.theorem_rates(epoch, [self._second_moment(recipe) for recipe in self.context.recipes])

    def _second_moment(self, recipe: Recipe) -> float:
        """Square of the Lipschitz constant of the whole objective on its ball."""
        model, bound = recipe.model, self.context.feature_bound
        if not isinstance(model, ConvexModel) or bound is None:
            return math.inf
        known = constants_of(model, bound)
        return (known.lipschitz + model.l2 * (model.radius or math.inf)) ** 2 if model.radius else math.inf

    def clipping(self) -> Clipping | None:
        return None

    def privatise(self, epoch: int, step: int) -> None:
        del epoch, step

    def spend(self, epoch: int, trial: int) -> None:
        del epoch, trial
