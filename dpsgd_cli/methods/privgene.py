"""PrivGene: a genetic search whose survivors are chosen by the exponential mechanism (Zhang et al. 2013).

Released: the indices of `survivors` vectors in each round and of the last winner, one after the other. A vector's score
is its number of misclassified training records, a sum over records of numbers in {0, 1}. Between neighbours under
add-remove the exponents move within a range of eps: each choice is eps-DP and eps^2/8-zCDP (`noise/selection.py`).
Breeding and mutation are data-independent. The zCDP budget is split into equal parts, whose number and size are known
in advance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.dp_agd import AdaptivePlan, adaptive_plan
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, Experiment, FullBatch

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from dpsgd_cli.methods.context import Context


class PrivGeneMethod(FullBatch):
    """PrivGene (Zhang et al. 2013): a genetic search whose survivors are chosen by the exponential mechanism."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.privgene:PrivGene",
        planner="dpsgd_cli.methods.privgene:privgene",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        only_convex=True,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["privgene"] = "privgene"
    rounds: Count = Field(20, description="Generations.")
    population: Count = Field(100, description="Weight vectors of a generation.")
    survivors: Count = Field(5, description="Vectors chosen, one after the other, to breed the next generation.")
    reach: Positive = Field(
        2.0, description="First vectors are uniform in [-reach, reach]; the first width of mutations."
    )
    shrink: Fraction = Field(0.85, description="Factor on the width of mutations from one round to the next.")

    @property
    def choices(self) -> int:
        """Return the number of uses of the exponential mechanism: the survivors of each round, and the winner."""
        return self.rounds * self.survivors + 1


def equal_choices(plan: AdaptivePlan, choices: int) -> PureDP:
    """Return one of `choices` uses of the exponential mechanism, eps^2/8-zCDP each, that share the budget equally."""
    # below an equal share by more than the rounding of their sum
    epsilon = math.sqrt(8 * plan.rho_for_training / choices) * (1 - 1e-9)
    return PureDP(epsilon, plan.sampling.adjacency, "exponential", "parent")


def privgene(recipe: Experiment, facts: Facts) -> Plan:
    """Return a plan of equal parts, one for each choice; no spending depends on a choice."""
    assert isinstance(recipe.method, PrivGeneMethod)
    plan, choices = adaptive_plan(recipe, facts), recipe.method.choices
    return replace(plan, is_adaptive=False, epochs=((Release(equal_choices(plan, choices), choices),),))


class PrivGene(OneShot):
    """PrivGene for R trials, one after the other, each with its own population."""

    def __init__(self, context: Context) -> None:
        from dpsgd_cli.methods.risks.problem import merged_risk

        super().__init__(context)
        risk = merged_risk(context)
        self.rows, self.loss = risk.rows, risk.loss
        model = context.recipes[0].model
        if not isinstance(model, ConvexModel) or model.known.residual:
            raise PrivacyError("privgene counts misclassified records: it needs a classification loss")

    def solve(self) -> None:
        for trial in range(self.context.trials):
            self.context.pack.values[trial] = self._search(trial)

    def _search(self, trial: int) -> Tensor:
        import torch

        from dpsgd_cli.methods.risks.risk import LinearRisk

        settings = self.context.recipes[trial].method
        assert isinstance(settings, PrivGeneMethod)
        chooser = _Chooser(self.context, trial, settings.choices)
        risk = LinearRisk(self.rows.of_trial(trial), self.loss)
        # breeding is post-processing: one integer of the trial's stream seeds it
        generator = torch.Generator().manual_seed(self.context.streams[trial].integer("privgene") & (2**63 - 1))
        size = self.context.pack.size
        pool = (torch.rand(settings.population, size, generator=generator) * 2 - 1) * settings.reach
        width = settings.reach
        for _ in range(settings.rounds):
            scores = risk.misses(pool.to(self.rows.z)).cpu()
            parents = pool[[chooser.choose(scores) for _ in range(settings.survivors)]]
            pool = _breed(parents, settings.population, width, generator)
            width *= settings.shrink
        return pool[chooser.choose(risk.misses(pool.to(self.rows.z)).cpu())]


class _Chooser:
    """Private choices of one trial, each charged before it is made."""

    def __init__(self, context: Context, trial: int, choices: int) -> None:
        plan = context.plans_of(AdaptivePlan)[trial]
        adjacency = plan.sampling.adjacency
        mechanism = equal_choices(plan, choices)
        self.epsilon = mechanism.epsilon
        self.sensitivity = replace_factor(adjacency)
        self.release = Release(mechanism)
        self.ledger, self.stream = context.ledgers[trial], context.streams[trial]
        self.made = 0

    def choose(self, scores: Tensor) -> int:
        import torch

        from dpsgd_cli.noise.selection import choice_draws, select_least

        self.ledger.spend(self.release, 0)
        draws = choice_draws([self.stream], "privgene-choice", self.made, len(scores), "exponential")
        self.made += 1
        # in float64, as it was charged: rounded to float32, epsilon could be larger
        epsilon, bound = torch.tensor([[self.epsilon], [self.sensitivity]], dtype=torch.float64)
        return int(select_least(scores.unsqueeze(0), epsilon, bound, "exponential", draws))


def _breed(parents: Tensor, population: int, width: float, generator: Generator) -> Tensor:
    """Return children that take every weight from one of two parents; one weight of each moves by up to `width`."""
    import torch

    count, size = parents.shape
    pairs = torch.randint(count, (2, population), generator=generator)
    first = torch.rand(population, size, generator=generator) < 0.5
    children = torch.where(first, parents[pairs[0]], parents[pairs[1]])
    place = torch.randint(size, (population,), generator=generator)
    move = (torch.rand(population, generator=generator) * 2 - 1) * width
    children[torch.arange(population), place] += move
    return children
