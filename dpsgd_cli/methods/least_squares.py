"""DP least squares: noisy second moments of the features and products with the targets, solved once.

Source: Mehta, Krichene, Thakurta, Kurakin and Cutkosky 2022 ("Differentially private image classification from
features", arXiv 2211.13403, there DP-LS), after Sheffet 2017 and the AdaSSP of Wang 2018. Sensitivities and ridge are
dpsgd's own (`preconditioning/price.py`, `preconditioning/maps.py`). The paper's weight on a class's own second moments
is omitted, because each class's matrix would need a part of the budget. With one weight for all records, targets are
one-hot.

Released, once: A = sum u u^T and Z = sum u y^T. u is a record's features (and the bias's 1) over their public bound,
scaled down to norm 1 if longer. y is the record's class as a one-hot vector, or its target clamped to [-1, 1]. Noise is
N(0, s^2) on the upper triangle of A with the entries off the diagonal times sqrt(2), and on weight Z.

With `method.inference: intervals`, Y = sum y^2 (of each output) is a third part, on weight `SQUARES`.

Sensitivity: S = `joint_sensitivity` of all parts together, sqrt(1 + weight^2) without Y under add-remove; a replaced
record moves them by less than twice that. weight = sqrt((1 - share) / share). If users are protected with all their
rows (`users/run.py`), a user adds the mean of u u^T and of u y^T over their rows. A mean of vectors of norm at most S
has norm at most S, so all of this holds for users, too.

Price: s = z S is one Gaussian mechanism of noise multiplier z, with the whole budget. The published weights,
(max(A, 0) + ridge)^-1 Z with ridge = s sqrt(2 D) / 4, are post-processing, and so is their scale by the public bound.
The ridge, a quarter of the noise's spread of eigenvalues, and half of mu^2 for each of A and Z were best or within .2
points of the best at each epsilon from .1 to 8. This was measured on MNIST's validation records (500 random projections
of scattering features).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Fraction
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.engine.settings import LinearModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.intervals.price import INFERENCE, LABEL, Inference
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.dp_sgd.price import one_gaussian
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, Experiment, FullBatch
from dpsgd_cli.preconditioning.price import joint_sensitivity, weight_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dpsgd_cli.methods.context import Context


SQUARES = 0.2
"""Weight of the sum of squared targets, which only intervals need: 2% of the release's mu^2 at a share of .5."""


class LeastSquaresMethod(FullBatch):
    """Least squares by noisy X^T X and X^T Y and a ridge (Mehta et al. 2022): one release, no learning rate."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.least_squares:DpLeastSquares",
        planner="dpsgd_cli.methods.least_squares:least_squares",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="names",
        only_convex=False,
        by_unit=True,
        per_trial_keys=(*ITS_BUDGET, "method.share"),
    )
    kind: Literal["dp-least-squares"] = "dp-least-squares"
    share: Fraction = Field(0.5, description="Share of the budget's mu^2 that X^T X gets; X^T Y gets the rest.")
    inference: Inference | None = INFERENCE

    @property
    def squares(self) -> float:
        """Return the weight of the released sum of squared targets: `SQUARES` if intervals are asked for, else 0."""
        return 0.0 if self.inference is None else SQUARES


def least_squares(recipe: Experiment, facts: Facts) -> Plan:
    """Return a plan of one Gaussian on second moments and products with the targets, of their joint sensitivity."""
    assert isinstance(recipe.method, LeastSquaresMethod)
    if facts.feature_bound is None:
        raise PrivacyError(
            f"method {recipe.method.kind} needs a public bound on the norm of a record's features: scale by bounds, or"
            " add unit-norm to data.preprocess"
        )
    adjacency = recipe.adjacency
    moved = joint_sensitivity(adjacency, weight_of(recipe.method.share), recipe.method.squares)
    return one_gaussian(recipe, facts, moved / replace_factor(adjacency), "least-squares")


class DpLeastSquares(OneShot):
    """DP least squares for R trials; budgets and shares may differ between trials."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        model, bound = context.recipes[0].model, context.feature_bound
        if bound is None or not isinstance(model, LinearModel):
            raise PrivacyError("dp-least-squares was started without a linear model, or a bound on its features")
        self.bound, self.bias = bound, model.has_bias
        self.outputs = next(shape for _, shape in context.pack.spans.values())[0]
        self._inferred: list[np.ndarray] = []

    def after_training(self) -> dict[str, Sequence[np.ndarray]]:
        return {LABEL: self._inferred}

    def solve(self) -> None:
        import torch

        self.charge()
        table, pack = self.context.table, self.context.pack
        shared = None if table.per_trial or table.held_out is not None else self._exact(0)
        for trial in range(self.context.trials):
            found = self._solved(trial, *(self._exact(trial) if shared is None else shared))
            weights = found[: len(found) - self.bias].T.reshape(-1)
            pack.values[trial] = torch.cat([weights, found[-1]]) if self.bias else weights

    def _users(self, trial: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return row numbers (n,) of a trial's users, and the root of each row's weight in its user's mean.

        None if records, not users, are protected.
        """
        from dpsgd_cli.data.users import shares_of_rows
        from dpsgd_cli.users.run import UnitTable

        table = self.context.table
        if not isinstance(table, UnitTable):
            return None
        taken = slice(None) if table.held_out is None else ~table.held_out[:, trial]
        members = table.members[taken].cpu().numpy()
        there = members >= 0
        return members[there], shares_of_rows(members)[there] ** 0.5

    def _pieces(self, trial: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a trial's rows over their public bound, with the bias's 1, and targets of norm at most 1. Private.

        Rows of users are first scaled down to norm 1, then multiplied by the root of their weight in the user's mean.
        """
        import numpy as np

        from dpsgd_cli.preconditioning import second_moments as moments

        table, outputs, users = self.context.table, self.outputs, self._users(trial)
        x = (table.x[trial] if table.per_trial else table.x).flatten(1).cpu().numpy()
        y, taken, roots = table.y.cpu().numpy(), None, np.ones(len(x))
        if users is not None:
            x, y, roots = x[users[0]], y[users[0]], users[1]
        elif table.held_out is not None:
            taken = ~table.held_out[:, trial].cpu().numpy()
        for rows, own, root in zip(*(moments.blocks(part, taken) for part in (x, y, roots)), strict=True):
            with_bias = np.hstack([rows, np.ones((len(rows), 1), rows.dtype)]) if self.bias else rows
            classes, bounded = not table.y.is_floating_point(), with_bias / self.bound
            targets = np.eye(outputs)[own[:, 0]] if classes else np.nan_to_num(own).clip(-1, 1)
            yield bounded if users is None else moments.at_most_one(bounded) * root, targets * root

    def _exact(self, trial: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return A (D, D), Z (D, K) and Y (K,) without noise. Private."""
        import numpy as np

        from dpsgd_cli.preconditioning import second_moments as moments

        width = self.context.pack.size // self.outputs
        products, squares = np.zeros((width, self.outputs)), np.zeros(self.outputs)
        with np.errstate(**SILENT):
            for rows, targets in self._pieces(trial):
                products += moments.at_most_one(rows).T @ targets
                squares += np.square(targets).sum(axis=0)
            return moments.second_moments((rows for rows, _ in self._pieces(trial)), width), products, squares

    def _solved(self, trial: int, exact: np.ndarray, products: np.ndarray, squares: np.ndarray) -> Tensor:
        """Release A and Z (and Y) of a trial with noise, and return weights (D, K) for unscaled features."""
        import numpy as np
        import torch

        from dpsgd_cli.intervals.run import SquaresRelease
        from dpsgd_cli.noise.run import gaussian
        from dpsgd_cli.preconditioning import second_moments as moments
        from dpsgd_cli.preconditioning.maps import eigen, spread

        plan, settings = self.context.plans[trial], self.context.recipes[trial].method
        assert plan is not None and isinstance(settings, LeastSquaresMethod)
        mechanism, weight = plan.epochs[0][0].mechanism, weight_of(settings.share)
        assert isinstance(mechanism, GaussianSum)
        beside = settings.squares * squares if settings.squares else np.zeros(0)
        both = np.concatenate([moments.as_vector(exact), weight * products.ravel(), beside])
        released = gaussian(self.context.streams[trial], "least-squares", 0, both, mechanism, self.context.table.summed)
        if self.context.watcher is not None:
            self.context.watcher.measured([trial], torch.from_numpy(both[None]), torch.from_numpy(released[None]))
        triangle = len(exact) * (len(exact) + 1) // 2
        matrix, noisy = moments.from_vector(released[:triangle]), released[triangle : triangle + products.size] / weight
        values, vectors = eigen(matrix)
        scale = mechanism.noise_multiplier * mechanism.sensitivity
        if settings.squares:
            sums = noisy.reshape(products.shape), released[triangle + products.size :] / settings.squares
            self._inferred.append(SquaresRelease(self.bound, scale, weight, matrix, *sums).vector)
        values = values.clamp_min(0.0) + spread(len(exact), scale) / 4
        targets = torch.from_numpy(noisy.reshape(products.shape)).to(vectors)
        return (vectors @ ((vectors.T @ targets) / values.unsqueeze(1)) / self.bound).to(self.context.pack.values)
