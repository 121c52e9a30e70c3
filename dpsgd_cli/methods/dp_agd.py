"""DP-AGD: gradient descent with privately chosen step lengths, and a better gradient if no step helps.

Source: Lee and Kifer 2018, Algorithm 2. Two kinds of release, each charged once, before it is made:

gradient    Sum of per-record loss gradients clipped to C_grad, plus N(0, C_grad^2 / (2 rho)). L2 sensitivity C_grad
            under add-remove and zero-out, twice that under replace-one (noise scaled likewise). rho-zCDP (Bun and
            Steinke 2016, Proposition 1.6).
selection   The index of the smallest candidate loss, clipped to C_obj per record and summed, by noisy-min or the
            exponential mechanism (`noise/selection.py`): eps^2 / 2- or eps^2 / 8-zCDP.

If index 0 (stay) is chosen, the gradient's budget grows by the factor 1 + gamma. The difference pays for a second noisy
sum of the same clipped gradients, averaged with all earlier ones of this step by inverse variance. The L2 term of the
objective is data-independent; it enters directions and candidates exactly.

With `momentum`, a direction keeps a part of the previous one. It is a function of released gradients and costs nothing
(post-processing); a selection along it is as private as along any other direction. If a loss has a kink, single
gradients point from side to side across a valley. The best length along one is tiny or 0, so that selections make no
progress and a better gradient wastes budget. The sum of several gradients points along the valley.

The price of each release is chosen after earlier releases, so the budget is a zCDP filter (Feldman and Zrnic 2021), and
the statement gives the budget. A trial stops before the first gradient whose selection it could no longer afford.

Guarantee: a trial's ledger refuses a release that would pass `rho`. rho is the largest zCDP whose conversion (that of
the plan's accountant) meets the epsilon of the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.budget import EpsilonBudget, Filter, RhoBudget, RhoFilter
from dpsgd_cli.accounting.conversions import bun_steinke_epsilon, tight_zcdp_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, PureSource, Release, ZeroConcentrated
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.search import largest
from dpsgd_cli.common.sections import Count, Fraction, Positive
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.experiment import EVERY_NEIGHBOUR, ITS_BUDGET, Descriptor, Experiment, FullBatch

if TYPE_CHECKING:
    from torch import Tensor

    from dpsgd_cli.clipping.run import Diagnostics
    from dpsgd_cli.engine.discrete import Coins
    from dpsgd_cli.methods.context import Context


class DpAgdMethod(FullBatch):
    """DP-AGD: Lee and Kifer 2018, Algorithm 2, with their defaults."""

    descriptor = Descriptor(
        runs="dpsgd_cli.methods.dp_agd:DpAgd",
        planner="dpsgd_cli.methods.dp_agd:dp_agd",
        privacy="needed",
        adjacencies=EVERY_NEIGHBOUR,
        discovers="bounds",
        only_convex=False,
        per_trial_keys=ITS_BUDGET,
    )
    kind: Literal["dp-agd"] = "dp-agd"
    splits: Positive = Field(
        60.0, description="Published rates: eps / (2 splits) a release. Shares: rho / splits a step."
    )
    gradient_share: Fraction | None = Field(
        None, description="Share of an iteration's rho that the gradient gets; left out, the published rates."
    )
    gamma: Positive = Field(0.1, description="Growth of the gradient's budget when no candidate improves.")
    step_candidates: Count = Field(20, description="Step lengths tried besides 0, equally spaced.")
    alpha_max: Positive = Field(2.0, description="Longest step tried at first.")
    refresh: Count = Field(10, description="Steps after which the longest step is set anew.")
    alpha_growth: Positive = Field(0.1, description="It becomes (1 + this) times the longest step taken since.")
    alpha_shrink: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Factor on the longest step tried after a choice to stay; 1 as published."
    )
    momentum: Fraction | None = Field(
        None, description="What a direction keeps of the one before; left out, each is of one gradient, as published."
    )
    objective_clip: Positive = Field(3.0, description="C_obj, bound on one record's loss in a selection.")
    gradient_clip: Positive = Field(3.0, description="C_grad, L2 bound on one record's gradient.")
    selection: Literal["laplace", "exponential"] = Field(
        "laplace", description="How a step is chosen: noisy-min (eps^2/2-zCDP) or exponential mechanism (eps^2/8-zCDP)."
    )


# Equal parts of a budget must not pass it by the rounding of their sum.
_BELOW = 1 - 1e-8


@dataclass(frozen=True)
class AdaptivePlan(Plan):
    """Plan whose releases are chosen during the run: `rho_total` is all that a trial may spend.

    Private preprocessing is part of that if the budget covers it. Guarantee: the releases of a trial are, together,
    rho_total-zCDP, whatever it chose (Feldman and Zrnic 2021, Theorem 4.3). `is_adaptive` is False for a method that
    only divides the budget into parts of known number and size, which are its `epochs`: then its ledger is the bound.
    """

    rho_total: float = 0.0
    is_adaptive: bool = True

    @property
    def budget_cap(self) -> ZeroConcentrated | None:
        return ZeroConcentrated(self.rho_total, self.sampling.adjacency) if self.is_adaptive else None

    @property
    def rho_for_training(self) -> float:
        """The budget left by private preprocessing, in rho."""
        return self.rho_total - (total_rho(self.preprocessing_releases) if self.covers_before else 0.0)

    def _filter(self) -> Filter:
        return RhoFilter(self.rho_total)


def largest_rho(epsilon: float, delta: float, accountant: str) -> float:
    """Return the largest rho whose conversion meets (epsilon, delta), from below to 1e-12 relative.

    `accountant`: `zcdp` is rho + 2 sqrt(rho log(1/delta)), as Lee and Kifer use it; `zcdp-tight` the best Renyi order.

    >>> round(largest_rho(0.8, 1e-8, "zcdp"), 6)
    0.008502
    """
    convert = bun_steinke_epsilon if accountant == "zcdp" else tight_zcdp_epsilon
    return largest(lambda rho: convert(rho, delta) <= epsilon, 0.0, epsilon)


@dataclass(frozen=True)
class AgdRates:
    """Division of DP-AGD's budget: total zCDP, zCDP of a first gradient and of a selection, epsilon of a selection."""

    rho: float
    gradient_rho: float
    selection_epsilon: float
    selection_rho: float

    @property
    def most_selections(self) -> int:
        """The largest number of selections of a run."""
        return int(self.rho / self.selection_rho)


def agd_rates(settings: DpAgdMethod, plan: AdaptivePlan) -> AgdRates:
    """Return the rates of DP-AGD as published, or by shares if `gradient_share` is set.

    Published (Lee and Kifer 2018, section 5): eps_0 = eps / (2 splits) for both; a selection is eps_0-DP, and a
    gradient has the noise of the classical Gaussian mechanism at (eps_0, delta): eps_0^2 / (4 log(1.25 / delta))-zCDP.
    By shares: an iteration may spend rho / splits, `gradient_share` of it on the gradient.

    Raises InfeasibleBudget if one gradient and one selection exceed the budget.
    """
    rho = plan.rho_for_training
    per_rho = 8.0 if settings.selection == "exponential" else 2.0
    if settings.gradient_share is None:
        budget = plan.budget
        whole = budget.epsilon if isinstance(budget, EpsilonBudget) else bun_steinke_epsilon(rho, plan.delta)
        epsilon = whole / (2 * settings.splits)
        gradient = epsilon**2 / (4 * math.log(1.25 / plan.delta))
    else:
        each = rho * _BELOW / settings.splits
        gradient = settings.gradient_share * each
        epsilon = math.sqrt(per_rho * (1 - settings.gradient_share) * each)
    rates = AgdRates(rho, gradient, epsilon, epsilon**2 / per_rho)
    if rates.gradient_rho + rates.selection_rho > rho:
        raise InfeasibleBudget(
            f"dp-agd: one gradient and one selection cost rho {rates.gradient_rho + rates.selection_rho:.3g}, more than"
            f" the {rho:.3g} that there are; raise method.splits or the budget"
        )
    return rates


def adaptive_plan(recipe: Experiment, facts: Facts) -> AdaptivePlan:
    """A budget in zCDP, for methods that choose while they run what to release next."""
    privacy = recipe.required_privacy
    budget, delta = privacy.budget, privacy.stated_delta
    if budget is None:
        raise PrivacyError(f"method {recipe.method.kind} spends a budget: give privacy.budget")
    accountant = "zcdp-tight" if privacy.accountant == "auto" else privacy.accountant
    if accountant not in ("zcdp", "zcdp-tight"):
        raise PrivacyError(
            f"method {recipe.method.kind} chooses what to release as it goes, which the budget of accountant"
            f" {accountant} does not cover; use zcdp or zcdp-tight"
        )
    rho = budget.rho if isinstance(budget, RhoBudget) else largest_rho(budget.epsilon, delta, accountant)
    return recipe.planned(AdaptivePlan, facts, accountant=accountant, rho_total=rho, is_adaptive=True)


def dp_agd(recipe: Experiment, facts: Facts) -> Plan:
    """Return the plan of a zCDP budget whose parts `DpAgd` chooses during the run."""
    assert isinstance(recipe.method, DpAgdMethod)
    plan = adaptive_plan(recipe, facts)
    agd_rates(recipe.method, plan)
    return plan


class DpAgd(Method):
    """DP-AGD for R trials with the same number of candidates and kind of selection; other settings may differ."""

    def __init__(self, context: Context) -> None:
        import torch

        from dpsgd_cli.methods.risks.problem import penalty_of, risk_of
        from dpsgd_cli.noise.run import TrialNoise
        from dpsgd_cli.noise.selection import NORMALS_PER_SCORE

        super().__init__(context)
        plans = context.plans_of(AdaptivePlan)
        self.settings = [recipe.method for recipe in context.recipes if isinstance(recipe.method, DpAgdMethod)]
        self.rates = [agd_rates(settings, plan) for settings, plan in zip(self.settings, plans, strict=True)]
        self.adjacency = plans[0].sampling.adjacency
        self.doubled = replace_factor(self.adjacency)
        self.values = context.pack.values
        self.penalty = penalty_of(context)
        self.risk = risk_of(context)
        self.risk.start(self.values)
        self.gradient_bound = context.column([s.gradient_clip for s in self.settings])
        self.loss_bound = context.column([s.objective_clip for s in self.settings])
        self.momentum = context.column([s.momentum or 0.0 for s in self.settings])
        self.exact = torch.zeros_like(self.values, dtype=torch.float64)
        self.averaged = torch.zeros_like(self.values)
        self.heading = torch.zeros_like(self.values)
        self.paces = [
            _Pace(rates.gradient_rho, s.alpha_max) for rates, s in zip(self.rates, self.settings, strict=True)
        ]
        kind, candidates = self.settings[0].selection, self.settings[0].step_candidates + 1
        double = torch.empty(0, dtype=torch.float64)
        self.gradient_noise = TrialNoise(context.streams, "agd-gradient", context.pack.size, self.values)
        self.selection_noise = TrialNoise(
            context.streams, "agd-selection", candidates * NORMALS_PER_SCORE[kind], double
        )

    @property
    def epochs(self) -> int:
        """Upper bound on epochs of `refresh` rounds, as if gradients were free; one round finds the budget spent."""
        most = max(rates.most_selections for rates in self.rates)
        return -(-(most + 1) // self.steps)

    @property
    def steps(self) -> int:
        return self.settings[0].refresh

    @property
    def finished(self) -> bool:
        return all(pace.over for pace in self.paces)

    def unfinished(self, done: int) -> str | None:
        return None

    def run_epoch(self, epoch: int) -> Diagnostics:
        """Run `refresh` rounds; in each, every unfinished trial makes one selection.

        Margins are computed anew from the weights when an epoch begins. Updated margins differ from new ones by
        rounding and are not in a checkpoint, so this makes a resumed run equal to an unbroken one to the bit.
        """
        from dpsgd_cli.clipping.run import Diagnostics

        self.risk.start(self.values)
        for _ in range(self.steps):
            if self.finished:
                break
            self._round(epoch)
        return Diagnostics(self.context.trials, self.values.device)

    def _round(self, epoch: int) -> None:
        fresh, again = self._pay_for_gradients(epoch)
        self._measure(fresh, again)
        active = sorted(fresh + again)
        if active:
            index = self._index(active)
            self._aim(index)
            self._choose(active, index, epoch)

    def _index(self, trials: list[int]) -> Tensor:
        import torch

        return torch.tensor(trials, device=self.values.device)

    def _pay_for_gradients(self, epoch: int) -> tuple[list[int], list[int]]:
        """Charge this round's gradients; return the trials with a new gradient and those with a better one."""
        fresh: list[int] = []
        again: list[int] = []
        for trial, pace in enumerate(self.paces):
            if pace.over:
                continue
            rates = self.rates[trial]
            price = pace.price(self.settings[trial].gamma)
            # slack for rounding, so that a trial can always afford the selection after a gradient
            if (pace.spent + price + rates.selection_rho) * (1 + 1e-9) > rates.rho:
                pace.over = True
                continue
            bound = float(self.gradient_bound[trial]) * self.doubled
            mechanism = GaussianSum(1 / math.sqrt(2 * price), self.adjacency, sensitivity=bound)
            self.context.ledgers[trial].spend(Release(mechanism), epoch)
            pace.spent += price
            (again if pace.rejected else fresh).append(trial)
        return fresh, again

    def _measure(self, fresh: list[int], again: list[int]) -> None:
        """Release noisy clipped gradient sums: new ones, and averages with a further measurement."""
        if fresh:
            index = self._index(fresh)
            everyone = index if len(fresh) < self.context.trials else None
            self.exact[index] = self.risk.gradient_sums(self.gradient_bound.squeeze(1), everyone)
            first = self._noisy(fresh, [self.paces[t].rho for t in fresh])
            self._tell(fresh, first)
            self.averaged[index] = first.to(self.values.dtype)
        if again:
            index = self._index(again)
            before = [self.paces[t].rho for t in again]
            extra = [self.paces[t].price(self.settings[t].gamma) for t in again]
            noisy = self._noisy(again, extra)
            self._tell(again, noisy)
            second = noisy.to(self.values.dtype)
            weight = self.context.column([e / (b + e) for e, b in zip(extra, before, strict=True)])
            self.averaged[index] = self.averaged[index].lerp(second, weight)
            for trial, more in zip(again, extra, strict=True):
                self.paces[trial].rho += more

    def _tell(self, trials: list[int], noisy: Tensor) -> None:
        if self.context.watcher is not None:
            self.context.watcher.measured(trials, self.exact[trials], noisy)

    def _noisy(self, trials: list[int], rhos: list[float]) -> Tensor:
        """Return the gradient sums of `trials` with noise that costs `rhos`."""
        import torch

        from dpsgd_cli.noise.run import Grid, add_noise, is_secure

        multipliers = [1 / math.sqrt(2 * rho) for rho in rhos]
        scale = [float(self.gradient_bound[t]) * self.doubled * z for t, z in zip(trials, multipliers, strict=True)]
        noisy, records = self.exact[trials], self.context.table.summed
        grid = Grid.of(noisy.shape[1], records, multipliers) if is_secure(self.context.streams) else None
        add_noise(noisy, self.gradient_noise.draw(trials), self.context.column(scale, torch.float64), grid)
        return noisy

    def _aim(self, index: Tensor) -> None:
        """Set unit directions from the noisy gradient of the whole objective and the momentum of earlier ones."""
        direction = self.averaged[index] + self.penalty[index] * self.values[index]
        direction += self.momentum[index] * self.heading[index]
        self.heading[index] = direction
        direction /= direction.norm(dim=1, keepdim=True).clamp_min_(1e-30)
        self.risk.aim(direction, index if len(index) < self.context.trials else None)
        self.direction = direction

    def _choose(self, active: list[int], index: Tensor, epoch: int) -> None:
        """Charge and make the selection; then take the step, or request a better gradient."""
        import torch

        from dpsgd_cli.noise.run import is_secure
        from dpsgd_cli.noise.selection import NORMALS_PER_SCORE, select_least

        for trial in active:
            self.context.ledgers[trial].spend(Release(self._selection(trial)), epoch)
            self.paces[trial].spent += self.rates[trial].selection_rho
        count = self.settings[0].step_candidates + 1
        spacing = self.context.column([pace.reach / (count - 1) for pace in self.paces]).squeeze(1)
        everyone = index if len(active) < self.context.trials else None
        scores = self.risk.line_losses(spacing, count, self.loss_bound.squeeze(1), everyone)
        scores += self._penalties(index, spacing[index], count)
        kind = self.settings[0].selection
        if is_secure(self.context.streams):
            draws: Tensor | list[Coins] = self.selection_noise.coins(active)
        else:
            draws = self.selection_noise.draw(active).view(len(active), count, NORMALS_PER_SCORE[kind])
        epsilon = torch.tensor([self.rates[t].selection_epsilon for t in active], dtype=torch.float64)
        bound = self.loss_bound[index].squeeze(1).double().cpu() * self.doubled
        chosen = select_least(scores.cpu(), epsilon, bound, kind, draws).tolist()
        lengths = torch.zeros_like(spacing)
        for trial, choice in zip(active, chosen, strict=True):
            lengths[trial] = spacing[trial] * choice
            self._move_on(trial, choice, float(lengths[trial]))
        self.risk.advance(lengths)

    def _selection(self, trial: int) -> PureDP:
        # noisy-min is eps-DP, but its privacy loss is not that of a single Laplace release
        source: PureSource = "exponential" if self.settings[0].selection == "exponential" else "pure"
        return PureDP(self.rates[trial].selection_epsilon, self.adjacency, source, "step")

    def _penalties(self, index: Tensor, spacing: Tensor, count: int) -> Tensor:
        """Return N lambda / 2 |w - i h d|^2 minus its value at i = 0, (A, count) float64. Public."""
        import torch

        values, direction = self.values[index].double(), self.direction.double()
        lengths = spacing.double().unsqueeze(1) * torch.arange(count, device=spacing.device)
        cross = (values * direction).sum(dim=1, keepdim=True)
        square = direction.square().sum(dim=1, keepdim=True)
        return self.penalty[index].double() * (lengths.square() * square / 2 - lengths * cross)

    def _move_on(self, trial: int, choice: int, length: float) -> None:
        pace, settings = self.paces[trial], self.settings[trial]
        pace.rejected = choice == 0
        if choice == 0:
            pace.reach *= settings.alpha_shrink
            return
        pace.recent.append(length)
        if len(pace.recent) == settings.refresh:
            pace.reach = (1 + settings.alpha_growth) * max(pace.recent)
            pace.recent = []

    def charged_for(self, done: int) -> bool:
        """Return True if every ledger's total rho is the rho that its trial has spent."""
        del done
        trained = [[e.release for e in ledger.entries if e.phase == "train"] for ledger in self.context.ledgers]
        pairs = zip(trained, self.paces, strict=True)
        return all(math.isclose(total_rho(releases), pace.spent, rel_tol=1e-9) for releases, pace in pairs)

    def state(self) -> dict[str, Any]:
        from dpsgd_cli.engine.tensors import to_host

        return {
            **{name: to_host(getattr(self, name)) for name in ("values", "exact", "averaged", "heading")},
            "paces": [pace.__dict__ | {"recent": list(pace.recent)} for pace in self.paces],
            "drawn": [list(self.gradient_noise.drawn), list(self.selection_noise.drawn)],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name in ("values", "exact", "averaged", "heading"):
            getattr(self, name).copy_(state[name])
        self.risk.start(self.values)
        for pace, kept in zip(self.paces, state["paces"], strict=True):
            pace.__dict__.update(kept)
        self.gradient_noise.resume(state["drawn"][0])
        self.selection_noise.resume(state["drawn"][1])


class _Pace:
    """Progress of one trial: cost of its current gradient (`rho`), largest candidate length (`reach`), rho spent."""

    def __init__(self, rho: float, reach: float) -> None:
        self.rho = rho
        self.reach = reach
        self.recent: list[float] = []
        self.rejected = False
        self.over = False
        self.spent = 0.0

    def price(self, gamma: float) -> float:
        """Return the rho (zCDP) of the next gradient measurement: of a new one, or the extra cost of a better one."""
        return gamma * self.rho if self.rejected else self.rho
