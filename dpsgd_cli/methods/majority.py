"""Always the commoner class.

Released: the sign of (positives - negatives + Laplace noise of scale 1/eps). Sensitivity: one record moves the
difference by 1 under add-remove, so it is eps-DP (Dwork and Roth 2014, Theorem 3.6). Without a privacy section, the
exact sign.
"""

from __future__ import annotations

import torch

from dpsgd_cli.core.selection import exponentials
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.one_shot import OneShot
from dpsgd_cli.privacy.mechanism import PureDP
from dpsgd_cli.recipe.schema.model import ConvexModel


class Majority(OneShot):
    """Every weight 0, but the constant column's: +1 or -1."""

    def solve(self) -> None:
        context, model = self.context, self.context.recipes[0].model
        if not isinstance(model, ConvexModel) or not model.bias or model.loss == "squared":
            raise RecipeError("method majority answers by the constant column: use model.kind: convex with bias: true")
        self.charge()
        values = context.pack.values.zero_()
        for trial, difference in enumerate(_differences(context.table, context.trials)):
            values[trial, -1] = 1.0 if difference + self._noise(trial) > 0 else -1.0

    def _noise(self, trial: int) -> float:
        plan = self.context.plans[trial]
        if plan is None:
            return 0.0
        mechanism = plan.epochs[0][0].mechanism
        assert isinstance(mechanism, PureDP)
        normals = self.context.streams[trial].normal("majority", 0, torch.empty(2, 2, dtype=torch.float64))
        first, second = exponentials(normals).tolist()
        return float(first - second) / mechanism.epsilon


def _differences(table: Table, trials: int) -> list[float]:
    """Positives less negatives among each trial's records."""
    signs = (table.y > 0).long() * 2 - 1
    if table.held_out is None:
        return [float(signs.sum())] * trials
    return [float(signs[~column].sum()) for column in table.held_out.T]
