"""Private choice among schedules (Yu et al. 2019, IV-A3; Gupta et al. 2010): train k candidates, publish one.

The training records are split into k + 1 parts of N // (k + 1); the last part also gets the remainder. The split is a
permutation that depends only on the trial's streams and on N, and is equal after a resume. Candidate i is trained with
DP-SGD on part i, and its wrong predictions z_i on the last part are counted. Index i is drawn with probability
proportional to exp(-eps z_i / D), and its weights are published.
D is 1 under zero-out (no candidate predicts a null record wrong, so all counts move one way) and 2 under replace-one;
the paper's exponent, eps z_i / 2, is the second case.

Proof. Under zero-out and replace-one, neighbouring data sets have the same N, hence the same partition, and differ in
one part. (a) They differ in part i. All trainings except that of candidate i have the same distribution, and the last
part is equal. The published weights are post-processing of candidate i's weights, other weights and the last part:
rho_i-zCDP, where rho_i is the cost of training candidate i. (b) They differ in the last part. All weights have the same
distribution. Given the weights, the choice is an exponential mechanism whose privacy loss has range eps: eps^2/8-zCDP
(Cesar and Rogers 2021, Lemma 3.2; the paper says eps^2/2). So the whole is max(max_i rho_i, eps^2/8)-zCDP. The ledger
records the costliest candidate's training AND the choice, whose sum exceeds that maximum. Add-remove is refused,
because it would change the partition itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dpsgd_cli.accounting.accountants.additive import rho_of, total_rho
from dpsgd_cli.accounting.adjacency import NEIGHBOURS, replace_factor
from dpsgd_cli.accounting.budget import RhoBudget
from dpsgd_cli.accounting.mechanism import PureDP, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.common.sections import Positive
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.base import Findings, Method
from dpsgd_cli.methods.dp_sgd.settings import DpSgdMethod, Gradient
from dpsgd_cli.methods.experiment import Descriptor, Experiment, Privacy, plan_for
from dpsgd_cli.schedules.settings import Decay, Schedule

if TYPE_CHECKING:
    from torch import Tensor

    from dpsgd_cli.clipping.run import Diagnostics
    from dpsgd_cli.engine.packing import Pack
    from dpsgd_cli.methods.context import Context


class PrivateSelectionMethod(Gradient):
    """Private selection (Yu et al. 2019, IV-A3): candidates train on separate parts; the last part chooses one."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.private_selection:PrivateSelection",
        planner="dpsgd_cli.methods.private_selection:plan_selection",
        privacy="needed",
        adjacencies=("replace-one", "zero-out"),
        discovers="bounds",
        only_convex=False,
    )
    kind: Literal["private-selection"] = "private-selection"
    candidates: Annotated[list[Decay], Field(min_length=2)] = Field(
        description="Schedules, as under privacy.schedule; a part of the records for each, and one more.",
        examples=[[{"kind": "uniform", "initial": 8}, {"kind": "exponential", "initial": 10, "decay": 0.01}]],
    )
    epsilon: Positive = Field(1.0, description="Of the exponential mechanism that chooses: rho epsilon^2 / 8.")


@dataclass(frozen=True)
class SelectionPlan(Plan):
    """Plan in which `candidates[i]` trains recipe `recipes[i]` on its part; `epochs` are the charges for the whole."""

    candidates: tuple[Plan, ...] = ()
    recipes: tuple[Experiment, ...] = ()


def plan_selection(recipe: Experiment, facts: Facts) -> SelectionPlan:
    """Return the plan of a `private-selection` recipe; its budget is in rho, preprocessing included.

    Raises PrivacyError under add-remove, where the partition depends on who is in the data, and InfeasibleBudget if
    the choice leaves nothing for training.
    """
    method, privacy = recipe.method, recipe.required_privacy
    assert isinstance(method, PrivateSelectionMethod)
    if not isinstance(privacy.budget, RhoBudget):
        raise PrivacyError("method private-selection divides a budget between training and choice: give budget: {rho}")
    adjacency = recipe.adjacency
    if NEIGHBOURS[adjacency].counted:
        raise PrivacyError(
            "method private-selection cuts the records into parts, which one record more or less would move; state"
            " privacy.adjacency zero-out or replace-one"
        )
    choice = Release(PureDP(method.epsilon, adjacency, "exponential", "choice"))
    counted = [*facts.preprocessing_releases] if privacy.budget_covers == "total" else []
    left = (privacy.budget.rho - total_rho([choice])) * (1 - 1e-12) - total_rho(counted)
    if left <= 0:
        raise InfeasibleBudget(
            f"a choice at method.epsilon {method.epsilon:g} costs rho {method.epsilon**2 / 8:g}, which leaves nothing"
            f" of the budget {privacy.budget.rho:g} for training; lower epsilon"
        )
    part = facts.records // (len(method.candidates) + 1)
    recipes = tuple(_candidate(recipe, privacy, schedule, left) for schedule in method.candidates)
    plans = tuple(plan_for(one, Facts(part, (), facts.groups)) for one in recipes)
    costliest = max(plans, key=lambda plan: rho_of(plan.releases) or 0.0)
    longest = max(len(plan.epochs) for plan in plans)
    epochs = [*costliest.epochs, *[()] * (longest - len(costliest.epochs))]
    epochs[-1] = (*epochs[-1], choice)
    accountant: str = privacy.accountant
    if accountant == "auto":
        accountant = BestAccountant().best(
            [*facts.preprocessing_releases, *(r for epoch in epochs for r in epoch)], costliest.delta
        )[1]
    return recipe.planned(
        SelectionPlan,
        facts,
        sampling=replace(costliest.sampling, records=facts.records),
        noise_multipliers=costliest.noise_multipliers,
        sensitivity=costliest.sensitivity,
        epochs=tuple(epochs),
        accountant=accountant,
        candidates=plans,
        recipes=recipes,
    )


def _candidate(recipe: Experiment, privacy: Privacy, schedule: Schedule, rho: float) -> Experiment:
    """Return the recipe that trains one candidate alone."""
    settings = recipe.method.model_dump(exclude={"kind", "candidates", "epsilon"})
    own = privacy.changed(schedule=schedule, budget=RhoBudget(rho=rho), accountant="auto", budget_covers="total")
    return recipe.changed(method=DpSgdMethod(**settings), privacy=own)


class PrivateSelection(Method):
    """Private selection for R trials of k candidates, which train as one pack of R k."""

    def __init__(self, context: Context) -> None:
        from dpsgd_cli.methods.dp_sgd.run import DpSgd

        super().__init__(context)
        settings = context.recipes[0].method
        assert isinstance(settings, PrivateSelectionMethod)
        self.settings = settings
        self.plans = context.plans_of(SelectionPlan)
        self.candidates = len(settings.candidates)
        self.parts = [self._part(trial) for trial in range(context.trials)]
        self.inner = DpSgd(self._inner_context())
        self.chosen: list[int] = []

    def _part(self, trial: int) -> Tensor:
        """Return the part (N,) of each record: 0 to k - 1 for the candidates, k for counting wrong predictions."""
        import torch

        rows = self.context.table.rows
        size = rows // (self.candidates + 1)
        order = torch.from_numpy(self.context.lasting[trial].permutation("parts", 0, rows))
        part = torch.full((rows,), self.candidates)
        for index in range(self.candidates):
            part[order[index * size : (index + 1) * size]] = index
        return part

    def _inner_context(self) -> Context:
        import torch

        context, k = self.context, self.candidates
        streams = tuple(own.under(f"candidate-{i}") for own in context.streams for i in range(k))
        table = context.table
        if table.own is not None:
            raise PrivacyError("method private-selection cuts the records into parts of its own; leave folds out")
        held_out = torch.stack([part != i for part in self.parts for i in range(k)], dim=1)
        if table.per_trial:
            table = replace(table, x=table.x.repeat_interleave(k, dim=0))
        plans = tuple(one for plan in self.plans for one in plan.candidates)
        return replace(
            context,
            recipes=tuple(one for plan in self.plans for one in plan.recipes),
            plans=plans,
            ledgers=tuple(plan.ledger() for plan in plans),
            streams=streams,
            pack=self._inner_pack(),
            table=table.with_folds(held_out),
        )

    def _inner_pack(self) -> Pack:
        import torch

        from dpsgd_cli.engine import models
        from dpsgd_cli.engine.packing import Pack, Placement

        context, pack = self.context, self.context.pack
        shape = context.table.input_shape
        with torch.no_grad():
            outputs = pack(pack.values.new_zeros(1, 1, *shape)).shape[-1]
        build = models.builder(context.recipes[0].model, shape, outputs, context.base)
        place = Placement(pack.values.device, pack.values.dtype)
        names = [f"candidate-{i}" for i in range(self.candidates)]
        seeds = [own.under(name).integer("init") for own in context.lasting for name in names]
        return Pack(build, seeds, place, pack.trusted)

    @property
    def epochs(self) -> int:
        return max(len(plan.epochs) for plan in self.plans)

    @property
    def steps(self) -> int:
        return self.inner.steps

    def unfinished(self, done: int) -> str | None:
        return "it chooses among its candidates in its last epoch"

    def run_epoch(self, epoch: int) -> Diagnostics:
        for ledger, plan in zip(self.context.ledgers, self.plans, strict=True):
            for release in plan.epochs[epoch] if epoch < len(plan.epochs) else ():
                ledger.spend(release, epoch)
        seen = self.inner.run_epoch(epoch)
        if epoch + 1 == self.epochs:
            self._choose()
        return _by_trial(seen, self.context, self.candidates)

    def _choose(self) -> None:
        """Choose one candidate of each trial and publish its weights."""
        import torch

        from dpsgd_cli.noise.selection import choice_draws, select_least

        trials, k = self.context.trials, self.candidates
        wrong = self._wrong().view(trials, k)
        draws = choice_draws(self.context.streams, "choice", 0, k, "exponential")
        doubled = [replace_factor(plan.sampling.adjacency) for plan in self.plans]
        epsilon = torch.full((trials,), self.settings.epsilon, dtype=torch.float64)
        chosen = select_least(wrong, epsilon, torch.tensor(doubled, dtype=torch.float64), "exponential", draws)
        self.chosen = chosen.tolist()
        weights = self.inner.output.view(trials, k, -1)
        self.context.pack.values.copy_(weights[torch.arange(trials), chosen])

    def _wrong(self) -> Tensor:
        """Return the wrong predictions (R k,) on the last part, float64. Non-finite outputs count as wrong. Private."""
        import torch

        pack, table, k = self.inner.context.pack, self.inner.context.table, self.candidates
        judges = torch.stack([part == k for part in self.parts for _ in range(k)])
        kept, total = pack.values.clone(), torch.zeros(pack.trials, dtype=torch.float64)
        pack.values.copy_(self.inner.output)
        with torch.no_grad():
            for start in range(0, table.rows, self.context.most_rows):
                stop = min(start + self.context.most_rows, table.rows)
                x, y, _ = table.every(start, stop)
                outputs = pack(x)
                hit = (outputs.argmax(dim=-1) == y) & torch.isfinite(outputs).all(dim=-1)
                total += (~hit.cpu() & judges[:, start:stop]).sum(dim=1)
        pack.values.copy_(kept)
        return total

    def findings(self) -> Findings | None:
        claimed = [{"chosen_candidate": index} for index in self.chosen]
        return Findings(claimed, [{}] * len(claimed)) if claimed else None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "inner": self.inner.state(), "chosen": list(self.chosen)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.inner.load_state(state["inner"])
        self.chosen = list(state["chosen"])


def _by_trial(seen: Diagnostics, context: Context, candidates: int) -> Diagnostics:
    """Return the candidates' diagnostics, summed by trial."""
    import torch

    from dpsgd_cli.clipping.run import Diagnostics

    totals = {
        name: torch.tensor(values, dtype=torch.float64).view(context.trials, candidates).sum(dim=1)
        for name, values in seen.sums().items()
    }
    return Diagnostics.of(totals)
