"""PrivGene: a genetic search whose survivors are chosen by the exponential mechanism (Zhang et al. 2013).

Released: the indices of `survivors` vectors in each round and of the last winner, one after the other. A vector's score
is its number of misclassified training records, a sum over records of numbers in {0, 1}. Between neighbours under
add-remove the exponents move within a range of eps: each choice is eps-DP and eps^2/8-zCDP (`noise/selection.py`).
Breeding and mutation are data-independent. The zCDP budget is split into equal parts, whose number and size are known
in advance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.dp_agd.settings import AdaptivePlan
from dpsgd_cli.methods.privgene.settings import PrivGeneMethod, equal_choices
from dpsgd_cli.methods.risks.problem import merged_risk
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.noise.selection import choice_draws, select_least


class PrivGene(OneShot):
    """PrivGene for R trials, one after the other, each with its own population."""

    def __init__(self, context: Context) -> None:
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
        self.ledger.spend(self.release, 0)
        draws = choice_draws([self.stream], "privgene-choice", self.made, len(scores), "exponential")
        self.made += 1
        # in float64, as it was charged: rounded to float32, epsilon could be larger
        epsilon, bound = torch.tensor([[self.epsilon], [self.sensitivity]], dtype=torch.float64)
        return int(select_least(scores.unsqueeze(0), epsilon, bound, "exponential", draws))


def _breed(parents: Tensor, population: int, width: float, generator: torch.Generator) -> Tensor:
    """Return children that take every weight from one of two parents; one weight of each moves by up to `width`."""
    count, size = parents.shape
    pairs = torch.randint(count, (2, population), generator=generator)
    first = torch.rand(population, size, generator=generator) < 0.5
    children = torch.where(first, parents[pairs[0]], parents[pairs[1]])
    place = torch.randint(size, (population,), generator=generator)
    move = (torch.rand(population, generator=generator) * 2 - 1) * width
    children[torch.arange(population), place] += move
    return children
