"""DP-GD: full-batch gradient descent with Gaussian noise (Lecture 15, Algorithm 2; Lecture 9, section 4).

Released at each step: the sum over all records of clipped loss gradients, plus noise N(0, s^2) on every coordinate.
Where the public bounds give a Lipschitz constant no larger than the clip norm, nothing is ever clipped.

Sensitivity: at most C under add-remove and zero-out, 2 C under replace-one (the lectures' 2 L / n, for means). The
divisor N is public; the L2 term, the projection and the averaging read no data.

Price: s = z S is a Gaussian mechanism of noise multiplier z; T of them are exactly one of multiplier z / sqrt(T)
(Dong, Roth and Su 2022, Corollary 2). How z is chosen is `privacy.accountant`; what is stated
afterwards comes from the ledger.
"""

from __future__ import annotations

from dpsgd_cli.methods.dp_sgd import DpSgd
from dpsgd_cli.methods.full_batch import FullBatchMethod
from dpsgd_cli.recipe.schema.model import ConvexModel


class DpGd(FullBatchMethod, DpSgd):
    """`dp-sgd` with full batches, at the speed of two matrix products on convex models."""

    def learning_rates(self, epoch: int) -> list[float]:
        moments = []
        for recipe, plan in zip(self.context.recipes, self.context.plans, strict=True):
            assert plan is not None and recipe.privacy is not None
            norm = plan.sensitivity / (2 if plan.sampling.adjacency == "replace-one" else 1)
            pull = recipe.model.l2 * (recipe.model.radius or 0.0) if isinstance(recipe.model, ConvexModel) else 0
            noise = plan.noise_multipliers[0] * plan.sensitivity / len(self.context.table)
            moments.append((norm + pull) ** 2 + self.context.pack.size * noise**2)
        return self.theorem_rates(epoch, moments)
