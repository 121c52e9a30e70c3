"""Plans whose spending is decided during the run: methods that divide a zCDP budget, and the validation schedule.

Guarantee of the methods: a trial's ledger refuses a release that would exceed `rho`, the largest zCDP whose conversion
(that of the plan's accountant) meets the epsilon of the budget.

The schedule lowers the noise when validation accuracy stops improving (Yu et al. 2019, IV-A1). If the
validation records are public, the noise multiplier of an epoch is a function of earlier releases and public records.
If they are private, the schedule sees a noisy count of correct predictions on them, which is a release of its own.

Guarantee of the schedule: noise multipliers are chosen while training runs, so only a filter may end it:
`GaussianRhoFilter` (a budget in rho) or `GaussianFilter` (epsilon by the exact accountant). Both are sound for releases
chosen after seeing earlier ones (`budget.py`). The statement is that budget, not the part that a run spent. Sampled
batches are refused. A private validation releases the number of correct predictions on the validation records plus
Gaussian noise of standard deviation z. One record changes that number by at most 1 under every adjacency (added,
removed, replaced or set to null), so it is a Gaussian mechanism of noise multiplier z. Training and validation records
are disjoint, and yet both are charged to one ledger: an upper bound.

Schedules that are known beforehand are in `recipe/schema/schedule.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.privacy.accountants.zcdp import total_rho
from dpsgd_cli.privacy.budget import Filter, RhoFilter
from dpsgd_cli.privacy.conversions import bun_steinke_epsilon, tight_zcdp_epsilon
from dpsgd_cli.privacy.mechanism import PureDP, Release, ZeroConcentrated
from dpsgd_cli.privacy.plan import Facts, Plan, Sampling, delta_of, privacy_of
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.convex import DpAgdMethod, PrivGeneMethod
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget, RhoBudget
from dpsgd_cli.recipe.schema.schedule import Validation
from dpsgd_cli.search import largest

# Equal parts of a budget must not exceed it by the rounding of their sum.
_BELOW = 1 - 1e-8


@dataclass(frozen=True)
class AdaptivePlan(Plan):
    """Plan whose releases are chosen during the run: `rho_total` is all that a trial may spend.

    Private preprocessing is part of that if the budget covers it. Guarantee: the releases of a trial are, together,
    rho_total-zCDP, whatever it chose (Feldman and Zrnic 2021, Theorem 4.3). `chooses` is False for a method that only
    divides the budget into parts of known number and size, which are its `epochs`: then its ledger is the bound.
    """

    rho_total: float = 0.0
    chooses: bool = True

    @property
    def budget_cap(self) -> ZeroConcentrated | None:
        return ZeroConcentrated(self.rho_total, self.sampling.adjacency) if self.chooses else None

    @property
    def rho_for_training(self) -> float:
        """The budget left by private preprocessing, in rho."""
        return self.rho_total - (total_rho(self.before) if self.covers_before else 0.0)

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


def equal_choices(plan: AdaptivePlan, choices: int) -> PureDP:
    """Return one of `choices` uses of the exponential mechanism, eps^2/8-zCDP each, that share the budget equally."""
    # less than an equal share, by more than the rounding of their sum
    epsilon = math.sqrt(8 * plan.rho_for_training / choices) * (1 - 1e-9)
    return PureDP(epsilon, plan.sampling.adjacency, "exponential", "parent")


def _adaptive(recipe: Recipe, facts: Facts) -> AdaptivePlan:
    """Return the plan of a zCDP budget, for methods that choose their releases during the run."""
    privacy = privacy_of(recipe)
    budget, delta = privacy.budget, delta_of(privacy)
    if budget is None:
        raise PrivacyError(f"method {recipe.method.kind} spends a budget: give privacy.budget")
    accountant = "zcdp-tight" if privacy.accountant == "auto" else privacy.accountant
    if accountant not in ("zcdp", "zcdp-tight"):
        raise PrivacyError(
            f"method {recipe.method.kind} chooses what to release as it goes, which the budget of accountant"
            f" {accountant} does not cover; use zcdp or zcdp-tight"
        )
    rho = budget.rho if isinstance(budget, RhoBudget) else largest_rho(budget.epsilon, delta, accountant)
    sampling = Sampling("full", facts.records, facts.records, privacy.adjacency or "add-remove")
    covers = privacy.budget_covers == "total"
    return AdaptivePlan(
        sampling, (), 1.0, 1, tuple(facts.before), (), accountant, delta, budget, covers, rho_total=rho
    )  # fmt: skip


def privgene(recipe: Recipe, facts: Facts) -> Plan:
    """Return a plan of equal parts, one for each choice; no spending depends on a choice."""
    assert isinstance(recipe.method, PrivGeneMethod)
    plan, choices = _adaptive(recipe, facts), recipe.method.choices
    return replace(plan, chooses=False, epochs=((Release(equal_choices(plan, choices), choices),),))


def dp_agd(recipe: Recipe, facts: Facts) -> Plan:
    """Return the plan of a zCDP budget whose parts `methods/dp_agd.py` chooses during the run."""
    assert isinstance(recipe.method, DpAgdMethod)
    plan = _adaptive(recipe, facts)
    agd_rates(recipe.method, plan)
    return plan


@dataclass
class AdaptiveNoise:
    """The noise multiplier of one trial, and the accuracies that it followed."""

    schedule: Validation
    multiplier: float
    seen: list[float] = field(default_factory=list)
    last: float = 0.0

    def looks_after(self, epoch: int) -> bool:
        """Return True if `epoch` (0, 1, ...) is a validation epoch."""
        return (epoch + 1) % self.schedule.every == 0

    def observe(self, accuracy: float) -> None:
        """Record the accuracy of a validation epoch, and set the multiplier of the following epochs.

        Every `period` validations the mean of the last `average` accuracies is compared with the previous mean (0 at
        first). If it grew by at most `threshold`, the multiplier is multiplied by `decay` (equations 8 to 10).
        """
        settings = self.schedule
        self.seen.append(accuracy)
        if len(self.seen) % settings.period:
            return
        mean = sum(self.seen[-settings.average :]) / settings.average
        if mean - self.last <= settings.threshold:
            self.multiplier *= settings.decay
        self.last = mean


@dataclass(frozen=True)
class AdaptiveSchedulePlan(Plan):
    """Plan whose noise is chosen during the run. `most` is the number of epochs that the first noise multiplier allows.

    `release` gives the release of an epoch at a noise multiplier; `look` is the release of a validation, None if the
    validation records are public.
    """

    schedule: Validation | None = None
    release: Callable[[float], Release] | None = None
    look: Release | None = None
    most: int = 0
    chooses: bool = True

    @property
    def most_epochs(self) -> int:
        return self.most

    def noise(self) -> AdaptiveNoise:
        """Return the noise of a new trial."""
        assert self.schedule is not None
        return AdaptiveNoise(self.schedule, self.schedule.initial)

    def releases_of(self, noise: AdaptiveNoise, epoch: int) -> tuple[Release, ...]:
        """Return everything that `epoch` will release: its gradients, and the validation after it."""
        assert self.release is not None
        looks = (self.look,) if self.look is not None and noise.looks_after(epoch) else ()
        return (self.release(noise.multiplier), *looks)
