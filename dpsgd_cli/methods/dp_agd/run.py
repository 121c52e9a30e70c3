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
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.adjacency import replace_factor
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, PureSource, Release
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.discrete import Coins
from dpsgd_cli.engine.tensors import to_host
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_agd.settings import AdaptivePlan, AgdRates, DpAgdMethod, agd_rates
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.methods.risks.problem import penalty_of, risk_of
from dpsgd_cli.noise.run import Grid, TrialNoise, add_noise, is_secure
from dpsgd_cli.noise.selection import NORMALS_PER_SCORE, select_least


class DpAgd(Method):
    """DP-AGD for R trials with the same number of candidates and kind of selection; other settings may differ."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.settings = [_settings(recipe) for recipe in context.recipes]
        self.rates = [_rates(context, trial) for trial in range(context.trials)]
        assert context.plans[0] is not None, "seen by `_rates`"
        self.adjacency = context.plans[0].sampling.adjacency
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
            index = torch.tensor(active, device=self.values.device)
            self._aim(index)
            self._choose(active, index, epoch)

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
            index = torch.tensor(fresh, device=self.values.device)
            everyone = index if len(fresh) < self.context.trials else None
            self.exact[index] = self.risk.gradient_sums(self.gradient_bound.squeeze(1), everyone)
            first = self._noisy(fresh, [self.paces[t].rho for t in fresh])
            self._tell(fresh, first)
            self.averaged[index] = first.to(self.values.dtype)
        if again:
            index = torch.tensor(again, device=self.values.device)
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
        direction /= torch.linalg.vector_norm(direction, dim=1, keepdim=True).clamp_min_(1e-30)
        self.risk.aim(direction, index if len(index) < self.context.trials else None)
        self.direction = direction

    def _choose(self, active: list[int], index: Tensor, epoch: int) -> None:
        """Charge and make the selection; then take the step, or request a better gradient."""
        for trial in active:
            self.context.ledgers[trial].spend(Release(self._selection(trial)), epoch)
            self.paces[trial].spent += self.rates[trial].selection_rho
        count = self.settings[0].step_candidates + 1
        spacing = self.context.column([pace.reach / (count - 1) for pace in self.paces]).squeeze(1)
        everyone = index if len(active) < self.context.trials else None
        scores = self.risk.line_losses(spacing, count, self.loss_bound.squeeze(1), everyone)
        scores += self._penalties(index, spacing[index], count)
        kind = self.settings[0].selection
        draws: Tensor | list[Coins]
        if is_secure(self.context.streams):
            draws = self.selection_noise.coins(active)
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


def _settings(recipe: Experiment) -> DpAgdMethod:
    assert isinstance(recipe.method, DpAgdMethod)
    return recipe.method


def _rates(context: Context, trial: int) -> AgdRates:
    return agd_rates(_settings(context.recipes[trial]), context.plans_of(AdaptivePlan)[trial])
