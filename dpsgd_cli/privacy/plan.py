"""The plan: schedule + batching + budget -> exact noise multipliers, epochs and price, before any data is read.

Guarantee of every planned epoch (the release is the noisy clipped SUM of `core/clipping.py`, whose L2
sensitivity is S = C for flat clipping, sqrt(sum C_l^2) for per-layer clipping, and twice that when a record
may be replaced; the noise has standard deviation z S):

- poisson (add-remove, zero-out): each step is a Poisson-subsampled Gaussian of noise multiplier z and rate
  q = batch_size / N. N is declared public. Under zero-out a sampled record is swapped for one that adds zero,
  which moves the sum as its absence does.
- shuffle (zero-out, replace-one): the partition of an epoch is drawn without looking at the data, and one
  record's value is in one batch only, so an epoch costs one Gaussian (Yu et al. 2019, Theorem 2). Under add-remove the
  partition itself would change: refused.
- full (all three): one Gaussian a step.
- single (replace-one): each step is a Gaussian on one record drawn uniformly, a batch of fixed size 1.
- `as-published` per-layer noise adds z C_l to layer l: M Gaussians of multiplier z on the parts of one vector, which
  together are one Gaussian of multiplier z / sqrt(M), and are recorded as that.

Not here: drawing batches or noise (`core/`), prices (`accountants/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.privacy import accountants, budget, schedule
from dpsgd_cli.privacy.accountants import Accountant, Guarantee
from dpsgd_cli.privacy.budget import Budget, describe
from dpsgd_cli.privacy.least import Least
from dpsgd_cli.privacy.ledger import Filter, Ledger
from dpsgd_cli.privacy.mechanism import Adjacency, Batching, GaussianSum, Mechanism, Release, merge
from dpsgd_cli.privacy.schedule_solver import solve_schedule
from dpsgd_cli.privacy.search import PRECISION, Span, dearest
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.privacy import EpsilonBudget, Privacy, RhoBudget
from dpsgd_cli.recipe.schema.schedule import Schedule, Uniform, Validation
from dpsgd_cli.wording import count

MOST_EPOCHS = 100_000
DEFAULT_ADJACENCY: dict[str, Adjacency] = {
    "poisson": "add-remove",
    "shuffle": "zero-out",
    "full": "add-remove",
    "single": "replace-one",
}


@dataclass(frozen=True)
class Sampling:
    """How records reach a step; all public."""

    batching: Batching
    records: int
    batch_size: int
    adjacency: Adjacency

    @property
    def rate(self) -> float:
        return self.batch_size / self.records if self.batching in ("poisson", "fixed") else 1.0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // self.batch_size)

    @property
    def releases_per_epoch(self) -> int:
        """Counts of a mechanism that an epoch spends: shuffled batches compose in parallel to one."""
        return 1 if self.batching == "shuffle" else self.steps_per_epoch


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before data is read. `epochs[t]` are the releases of epoch t.

    `chooses`: whether the method may choose what to release, or when to stop, from what it released before. Then only
    what its filter never lets pass (`cap`) is known of a run, before it and after it. `schedule` is the recipe's, with
    what was left `auto` solved for; None for methods that have none.
    """

    sampling: Sampling
    noise_multipliers: tuple[float, ...]
    sensitivity: float
    groups: int
    before: tuple[Release, ...]
    epochs: tuple[tuple[Release, ...], ...]
    accountant: str
    delta: float
    budget: Budget
    covers_before: bool
    chooses: bool = False
    schedule: Schedule | None = None

    @property
    def releases(self) -> list[Release]:
        """Everything that the whole run releases."""
        return [*self.before, *(release for epoch in self.epochs for release in epoch)]

    @property
    def most_epochs(self) -> int:
        """No trial trains longer."""
        return len(self.epochs)

    def released_by(self, done: int) -> dict[int | None, list[Release]] | None:
        """What the first `done` epochs release, by epoch as `charged_by_epoch` has it; None where a method chooses."""
        return None if self.chooses else {t: merge(list(epoch)) for t, epoch in enumerate(self.epochs[:done]) if epoch}

    def guarantee(self) -> Guarantee:
        """What the whole run guarantees, private preprocessing included."""
        return accountants.get(self.accountant).guarantee(self.bounding, self.delta)

    def rho(self) -> float | None:
        """Total zCDP; None where no accountant has one (sampled batches)."""
        return budget.rho_of(self.bounding)

    @property
    def cap(self) -> Mechanism | None:
        """The budget as one mechanism, where a method that chooses is policed by it; None where releases are planned.

        Without a filter of mu^2 the ledger lets only what is planned pass, in order, and charges what is left out.
        """
        return budget.one_gaussian(self.budget, self.accountant, self.sampling.adjacency) if self.chooses else None

    @property
    def bounding(self) -> list[Release]:
        """Releases whose price bounds that of every run: those planned, or what the filter never lets pass."""
        cap = self.cap
        return self.releases if cap is None else [*(() if self.covers_before else self.before), Release(cap)]

    def ledger(self) -> Ledger:
        """An empty ledger that enforces this plan's budget."""
        return Ledger(self._filter(), self.covers_before, cap=self.cap)

    def _filter(self) -> Filter:
        if self.cap is not None and self.budget is not None:
            return budget.enforce_on_choices(self.budget)
        counted = self.releases if self.covers_before else [r for epoch in self.epochs for r in epoch]
        return budget.enforce(self.budget, accountants.get(self.accountant), counted)


def make_plan(
    recipe: Recipe,
    records: int,
    before: Sequence[Release] = (),
    groups: int | None = None,
    judge: Accountant | None = None,
) -> Plan:
    """The plan of a private gradient recipe on `records` (public) training records.

    `before` are the releases of private preprocessing; `groups` is the number of layers M (None: unknown,
    which only per-layer clipping needs). `judge` prices a budget in epsilon, where that is not to be the recipe's own
    accountant. Raises PrivacyError for a combination without a guarantee and
    InfeasibleBudget when nothing fits the budget.
    """
    privacy, method = recipe.privacy, recipe.method
    if privacy is None:
        raise PrivacyError(
            f"method {method.kind} releases nothing under differential privacy: there is nothing to plan"
        )
    adjacency = privacy.adjacency or DEFAULT_ADJACENCY[method.batching]
    batch = (1 if method.batching == "single" else records) if method.batch_size is None else method.batch_size
    if batch > records:
        raise PrivacyError(f"method.batch_size is {batch}, more than the {records} training records; make it smaller")
    sampling = Sampling("fixed" if method.batching == "single" else method.batching, records, batch, adjacency)
    _check_supported(sampling)
    _check_sampler(sampling, privacy.accountant)
    draft = _Draft(recipe, privacy, sampling, tuple(before), groups, judge)
    if isinstance(privacy.schedule, Validation):
        return draft.paced(privacy.schedule)
    return draft.plan()


def adjacency_of(recipe: Recipe) -> Adjacency:
    """The adjacency that a recipe's statement is for."""
    stated = recipe.privacy.adjacency if recipe.privacy is not None else None
    return stated or DEFAULT_ADJACENCY[recipe.method.batching]


def _check_supported(sampling: Sampling) -> None:
    if sampling.batching == "shuffle" and sampling.adjacency == "add-remove":
        raise PrivacyError(
            "shuffled batches have no guarantee under add-remove: adding a record moves the others to other batches;"
            " state privacy.adjacency zero-out or replace-one, or use method.batching poisson"
        )
    if sampling.batching == "fixed" and sampling.adjacency != "replace-one":
        raise PrivacyError(
            f"method.batching: single has no guarantee under {sampling.adjacency}: amplification for a record drawn"
            " uniformly is proved for privacy.adjacency: replace-one; state that, or use method.batching: poisson"
        )
    if sampling.batching == "poisson" and sampling.adjacency == "replace-one":
        raise PrivacyError(
            "poisson batches are accounted for add-remove and zero-out only; under replace-one a pair of sampled"
            " records moves the sum in both directions. State one of those, or use method.batching full or shuffle"
        )


def _check_sampler(sampling: Sampling, accountant: str) -> None:
    """Refuse shuffled batches where the accountant's theorem needs sampled ones."""
    if sampling.batching != "shuffle" or accountant == "auto":
        return
    reason = accountants.get(accountant).refusal(GaussianSum(1.0, sampling.adjacency, "shuffle"))
    if reason is not None:
        raise PrivacyError(
            f"privacy.accountant {accountant} does not cover {reason}. `dpsgd recipe batching` shows what shuffled and"
            " Poisson batches look like; method.batching: poisson is the sampler that it needs"
        )


@dataclass(frozen=True)
class _Draft:
    """A plan in the making."""

    recipe: Recipe
    privacy: Privacy
    sampling: Sampling
    before: tuple[Release, ...]
    groups: int | None
    judge: Accountant | None

    def plan(self) -> Plan:
        kind, multipliers = self._solve()
        epochs = tuple((self.release(z),) for z in multipliers)
        plan = Plan(noise_multipliers=tuple(multipliers), epochs=epochs, schedule=kind, **self._settings)
        if self.accountant.name == Least.name:
            plan = replace(plan, accountant=Least().best(plan.releases, self.delta)[1])
        if self._excess(multipliers) > 0:
            fitting = self._epochs_that_fit(kind, len(multipliers))
            raise InfeasibleBudget(
                f"{count(len(multipliers), 'epoch')} of this schedule would pass the budget"
                f" ({describe(self.privacy.budget)}); {fitting} fit: train fewer epochs, add noise, raise the"
                " budget, or use epochs: until-budget"
            )
        return plan

    def paced(self, kind: Validation) -> Plan:
        """A plan that follows the validation accuracy, within a budget that a filter can police."""
        from dpsgd_cli.privacy.adaptive_schedule import PacedPlan

        allowed, cut = self.privacy.budget, self.recipe.data.validation
        if allowed is None:
            raise PrivacyError("privacy.schedule validation stops when the budget is spent: give privacy.budget")
        if cut is None:
            raise PrivacyError("privacy.schedule validation needs data.validation: what accuracy is measured on")
        if self.sampling.batching not in ("shuffle", "full") or not self._filtered:
            raise PrivacyError(
                "privacy.schedule validation chooses its noise while it runs, and only budgets in rho, or in epsilon by"
                " the gaussian accountant, can be policed then; use method.batching shuffle or full, or a schedule that"
                " is known beforehand"
            )
        look = None
        if cut.noise_multiplier is not None:
            look = Release(GaussianSum(cut.noise_multiplier, self.sampling.adjacency, label="validation"))
        most = self._most_epochs(Uniform(initial=kind.initial))
        wanted = self.recipe.epochs
        return PacedPlan(
            noise_multipliers=(kind.initial,),
            epochs=(),
            schedule=kind,
            release=self.release,
            look=look,
            most=most if wanted == "until-budget" else min(most, wanted),
            **self._settings,
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """What every kind of plan says alike."""
        return {
            "sampling": self.sampling,
            "sensitivity": self.sensitivity,
            "groups": self.groups or 1,
            "before": self.before,
            "accountant": self.accountant.name,
            "delta": self.delta,
            "budget": self.privacy.budget,
            "covers_before": self.privacy.budget_covers == "total",
        }

    @property
    def accountant(self) -> Accountant:
        name = self.privacy.accountant
        if self.judge is not None:
            return self.judge
        if name == "auto":
            # nothing is below what is exact, and its filter lets a method choose
            return Least() if self.sampling.batching in ("poisson", "fixed") else accountants.get("gaussian")
        return accountants.get(name)

    @property
    def delta(self) -> float:
        allowed = self.privacy.budget
        stated = allowed.delta if isinstance(allowed, EpsilonBudget) else None
        if stated is not None and self.privacy.delta not in (None, stated):
            raise PrivacyError(f"privacy.delta is {self.privacy.delta}, but privacy.budget.delta is {stated}; give one")
        delta = stated or self.privacy.delta
        if delta is None:
            raise PrivacyError("no delta: give privacy.delta (smaller than 1 / number of records, say 1.0e-5)")
        return delta

    @property
    def sensitivity(self) -> float:
        clipping = self.privacy.clipping
        doubled = 2.0 if self.sampling.adjacency == "replace-one" else 1.0
        if clipping.kind == "flat":
            return clipping.norm * doubled
        norms = self.layer_norms
        return math.sqrt(math.fsum(norm**2 for norm in norms)) * doubled

    @property
    def layer_norms(self) -> list[float]:
        clipping = self.privacy.clipping
        assert clipping.kind == "per-layer"
        if isinstance(clipping.norm, list):
            if self.groups is not None and len(clipping.norm) != self.groups:
                raise PrivacyError(
                    f"privacy.clipping.norm lists {count(len(clipping.norm), 'bound')}, but the model has"
                    f" {count(self.groups, 'layer')}"
                )
            return list(clipping.norm)
        if self.groups is None:
            raise PrivacyError("per-layer clipping with one norm needs the number of layers; list one norm per layer")
        return [clipping.norm] * self.groups

    def release(self, multiplier: float) -> Release:
        """What one epoch at schedule value `multiplier` releases."""
        clipping = self.privacy.clipping
        if clipping.kind == "per-layer" and clipping.noise == "as-published":
            multiplier = multiplier / math.sqrt(len(self.layer_norms))
        mechanism = GaussianSum(
            noise_multiplier=multiplier,
            adjacency=self.sampling.adjacency,
            batching=self.sampling.batching,
            sampling_rate=self.sampling.rate,
            sensitivity=self.sensitivity,
        )
        return Release(mechanism, self.sampling.releases_per_epoch)

    @property
    def counted_before(self) -> tuple[Release, ...]:
        return self.before if self.privacy.budget_covers == "total" else ()

    def _excess(self, multipliers: Sequence[float]) -> float:
        made = {z: self.release(z) for z in set(multipliers)}
        return budget.excess(
            self.privacy.budget, self.accountant, [*self.counted_before, *(made[z] for z in multipliers)]
        )

    def _solve(self) -> tuple[Schedule, list[float]]:
        """The schedule without free numbers, and its values by epoch."""
        wanted, kind = self.recipe.epochs, self.privacy.schedule
        free = schedule.free_numbers(kind)
        lacking = ["privacy.budget"] * (self.privacy.budget is None)
        lacking += ["epochs as a number, not until-budget"] * (wanted == "until-budget")
        if free and lacking:
            raise PrivacyError(f"privacy.schedule.{free[0]}: auto is solved for; give {' and '.join(lacking)}")
        if wanted == "until-budget":
            wanted = self._most_epochs(kind)
        elif free:
            kind = self._solved(kind, wanted)
        return kind, [schedule.noise_multiplier(kind, epoch) for epoch in range(wanted)]

    def _solved(self, kind: Schedule, epochs: int) -> Schedule:
        try:
            # where only an accountant can tell the price, each question takes long
            return solve_schedule(kind, epochs, self._excess, 0.0 if self._filtered else PRECISION)
        except InfeasibleBudget:
            if self._excess([]) < 0:
                raise
            raise InfeasibleBudget(
                f"private preprocessing alone spends the budget ({describe(self.privacy.budget)}); give it more noise,"
                " or raise the budget"
            ) from None

    @property
    def _filtered(self) -> bool:
        return isinstance(self.privacy.budget, RhoBudget) or self.accountant.name == "gaussian"

    def _most_epochs(self, kind: Schedule) -> int:
        """How many epochs the budget allows; raises InfeasibleBudget for none, or too many to count."""
        if self.privacy.budget is None:
            raise PrivacyError("epochs: until-budget needs privacy.budget")
        fitting = self._epochs_that_fit(kind, MOST_EPOCHS)
        if fitting == 0:
            raise InfeasibleBudget(
                f"not one epoch fits the budget ({describe(self.privacy.budget)}): add noise or raise the budget"
            )
        if fitting == MOST_EPOCHS:
            raise InfeasibleBudget(f"the budget is not spent after {MOST_EPOCHS} epochs; give epochs as a number")
        return fitting

    def _epochs_that_fit(self, kind: Schedule, most: int) -> int:
        """Longest prefix of the schedule within the budget (spending only grows)."""

        def gap(epochs: float) -> float:
            if not schedule.allows(kind, int(epochs) - 1):
                return math.inf
            return self._excess([schedule.noise_multiplier(kind, epoch) for epoch in range(int(epochs))])

        return int(dearest(gap, Span("epochs", cheap=1.0, dear=float(most), start=1.0, whole=True)) or 0)
