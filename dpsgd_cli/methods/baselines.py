"""Baselines: the majority class, and the optimum without privacy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Count
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.experiment import ITS_BUDGET, Descriptor, Experiment, FullBatch
from dpsgd_cli.methods.perturbation import epsilon_delta, one_release

if TYPE_CHECKING:
    import numpy as np

    from dpsgd_cli.engine.tensors import Table


class NonPrivateMethod(FullBatch):
    """The optimum without privacy, by L-BFGS, for comparison."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.baselines:NonPrivate",
        planner=None,
        privacy="refused",
        adjacencies=(),
        only_convex=True,
    )
    kind: Literal["non-private"] = "non-private"
    most_steps: Count = Field(1000, description="Iterations after which the solver stops.")


class MajorityMethod(FullBatch):
    """Majority-class baseline, by a Laplace count; by the exact count without a privacy section."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.baselines:Majority",
        planner="dpsgd_cli.methods.baselines:majority",
        privacy="optional",
        adjacencies=("add-remove",),
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["majority"] = "majority"


def majority(recipe: Experiment, facts: Facts) -> Plan:
    """Return a plan of one count with Laplace noise."""
    epsilon, _ = epsilon_delta(recipe)
    return one_release(recipe, facts, Release(PureDP(epsilon, recipe.adjacency, "laplace", "count")))


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
        import numpy as np

        from dpsgd_cli.noise.run import laplace

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
    """Optimum without privacy, by L-BFGS; for the hinge loss by that of smoothed losses.

    Its weights are not protected and its ledger stays empty. Trials are solved one after the other.
    """

    def solve(self) -> None:
        import torch

        from dpsgd_cli.methods.risks.optimum import optimum
        from dpsgd_cli.methods.risks.problem import l2_of, merged_risk
        from dpsgd_cli.methods.risks.risk import LinearRisk

        risk = merged_risk(self.context)
        known: dict[bytes, np.ndarray] = {}
        for trial, recipe in enumerate(self.context.recipes):
            assert isinstance(recipe.method, NonPrivateMethod)
            own = risk.rows.of_trial(trial)
            key = b"" if own.weights is None else own.weights.cpu().numpy().tobytes()
            if key not in known:
                l2, steps = l2_of(recipe), recipe.method.most_steps
                known[key] = optimum(LinearRisk(own, risk.loss), l2, most_steps=steps).values
            self.context.pack.values[trial] = torch.from_numpy(known[key]).to(risk.rows.z)
