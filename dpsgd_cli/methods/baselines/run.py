"""Baselines: the majority class, and the optimum without privacy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dpsgd_cli.accounting.mechanism import PureDP
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.baselines.settings import NonPrivateMethod
from dpsgd_cli.methods.risks.optimum import minimise_hinge, require_hinge
from dpsgd_cli.methods.risks.problem import l2_of, merged_risk
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.noise.run import laplace

if TYPE_CHECKING:
    from dpsgd_cli.recipe.schema import Recipe

_CERTIFIED = 1e-5
# strong convexity, which the certificate needs, if there is no L2 term
_TRACE = 1e-7


class Majority(OneShot):
    """Majority-class baseline: all weights are 0 except that of the constant column, +1 or -1.

    Released: the sign of (positives - negatives + Laplace noise of scale 1/eps). Sensitivity: one record moves the
    difference by 1 under add-remove, so it is eps-DP (Dwork and Roth 2014, Theorem 3.6). Without a privacy section the
    sign is exact.
    """

    def solve(self) -> None:
        context, model = self.context, self.context.recipes[0].model
        if not isinstance(model, ConvexModel) or not model.has_bias or model.known.residual:
            raise RecipeError("method majority answers by the constant column: use model.kind: convex with bias: true")
        self.charge()
        values = context.pack.values.zero_()
        for trial, difference in enumerate(_differences(context.table, context.trials)):
            values[trial, -1] = 1.0 if self._released(trial, difference) > 0 else -1.0

    def _released(self, trial: int, difference: float) -> float:
        plan = self.context.plans[trial]
        if plan is None:
            return difference
        mechanism = plan.epochs[0][0].mechanism
        assert isinstance(mechanism, PureDP)
        stream, exact = self.context.streams[trial], np.array([difference])
        return float(laplace(stream, "majority", 0, exact, mechanism.epsilon, sensitivity=1.0, changed=1)[0])


def _differences(table: Table, trials: int) -> list[float]:
    """Return the number of positives minus negatives among each trial's records. Private."""
    signs = (table.y > 0).long() * 2 - 1
    if table.held_out is None:
        return [float(signs.sum())] * trials
    return [float(signs[~column].sum()) for column in table.held_out.T]


class NonPrivate(OneShot):
    """Optimum without privacy, by L-BFGS, or by smoothing for the hinge loss.

    Its weights are not protected and its ledger stays empty. Trials are solved one after the other.
    """

    def solve(self) -> None:
        risk = merged_risk(self.context)
        known: dict[bytes, torch.Tensor] = {}
        for trial, recipe in enumerate(self.context.recipes):
            own = risk.rows.of_trial(trial)
            key = b"" if own.weights is None else own.weights.cpu().numpy().tobytes()
            if key not in known:
                known[key] = self._optimum(LinearRisk(own, risk.loss), recipe)
            self.context.pack.values[trial] = known[key]

    @staticmethod
    def _optimum(risk: LinearRisk, recipe: Recipe) -> torch.Tensor:
        assert isinstance(recipe.method, NonPrivateMethod)
        assert isinstance(recipe.model, ConvexModel)
        if recipe.model.known.curvature is not None:
            return optimum(risk, l2_of(recipe), recipe.method.most_steps)
        require_hinge(risk.loss)
        records = int(risk.rows.counts)
        curvature = risk.rows.z.new_full((1,), max(l2_of(recipe), _TRACE) * records, dtype=torch.float64)
        found = minimise_hinge(risk.rows, curvature, torch.full_like(curvature, torch.inf), _CERTIFIED * records)
        return found.values[0].to(risk.rows.z)


def optimum(risk: LinearRisk, l2: float, most_steps: int = 1000) -> torch.Tensor:
    """Return the minimiser (P,) of mean loss + l2/2 |w|^2 on a trial's records, by L-BFGS (Liu and Nocedal 1989)."""
    from scipy.optimize import minimize

    z = risk.rows.z
    records = int(risk.rows.counts)
    unclipped = z.new_full((1,), torch.inf)

    def objective(w: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.from_numpy(w).to(z).unsqueeze(0)
        gradient = risk.gradient_sums_at(values, unclipped)[0].double().cpu().numpy() / records + l2 * w
        return float(risk.loss_sums(values)[0]) / records + l2 / 2 * float(w @ w), gradient

    options = {"maxiter": most_steps, "maxfun": 4 * most_steps, "ftol": 1e-10, "gtol": 1e-6}
    found = minimize(objective, np.zeros(z.shape[1]), jac=True, method="L-BFGS-B", options=options)
    return torch.from_numpy(found.x).to(z)
