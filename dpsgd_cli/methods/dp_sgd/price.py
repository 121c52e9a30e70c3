"""The plan of a gradient method: schedule + batching + clipping + budget -> noise multipliers, epochs and price.

Guarantee of every planned epoch (the release is the noisy clipped SUM of `clipping/run.py`, whose L2
sensitivity is S = C for flat clipping, sqrt(sum C_l^2) for per-layer clipping, and twice that when a record
may be replaced; the noise has standard deviation z S):

- poisson: each step is a Poisson-subsampled Gaussian of noise multiplier z and rate q = batch_size / N. N is declared
  public. Under zero-out a sampled record is swapped for one that adds zero, which moves the sum as its absence does;
  under replace-one for another, which has a pair of its own (`accounting/losses.py`).
- random-allocation (add-remove, zero-out): an epoch of T = ceil(N / batch_size) steps, of which a record is in one,
  drawn by itself: `accounting/allocation_pairs.py`.
- shuffle (zero-out, replace-one): the partition of an epoch is drawn without looking at the data, and one
  record's value is in one batch only, so an epoch costs one Gaussian (Yu et al. 2019, Theorem 2). Under add-remove the
  partition itself would change: refused.
- full (all three): one Gaussian a step.
- fixed (replace-one): each step is a Gaussian on a batch of batch_size records, drawn without replacement.
- `as-published` per-layer noise adds z C_l to layer l: M Gaussians of multiplier z on the parts of one vector, which
  together are one Gaussian of multiplier z / sqrt(M), and are recorded as that.

Not here: what depends on a kind of schedule, clipping or batching (their rooms), how much of a schedule a budget
buys (`accounting/budget.py`), prices (`accountants/`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS, replace_factor
from dpsgd_cli.accounting.budget import RhoBudget, format_budget, over_budget
from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, Mechanism, Release
from dpsgd_cli.accounting.plan import Facts, Plan, PlannedNoise, Sampling
from dpsgd_cli.accounting.search import PRECISION
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.calibration.price import with_calibration
from dpsgd_cli.common.text_format import any_of, count
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.intervals.price import with_intervals
from dpsgd_cli.methods.experiment import Experiment, Privacy
from dpsgd_cli.noise.settings import numbers_of_bands
from dpsgd_cli.preconditioning.price import with_preconditioner
from dpsgd_cli.schedules.price import AdaptiveSchedulePlan, epochs_that_fit, solve_schedule
from dpsgd_cli.schedules.settings import Schedule, Uniform, Validation

if TYPE_CHECKING:  # scipy, for which a plan of independent noise need not wait
    from dpsgd_cli.noise.price import Charge, NoiseStrategy

MOST_EPOCHS = 100_000
P = TypeVar("P", bound=Plan)


def _charged(mechanism: Mechanism, use: Charge) -> Release:
    """Return the uses of a correlated mechanism whose sum a record moves by root `use.squared` times as much."""
    assert isinstance(mechanism, CorrelatedSums)
    moved = math.sqrt(use.squared)
    rate = 1.0 if use.batching == "full" else mechanism.sampling_rate
    changed = replace(
        mechanism,
        noise_multiplier=mechanism.noise_multiplier / moved,
        sensitivity=mechanism.sensitivity * moved,
        batching=use.batching,
        sampling_rate=rate,
    )
    return Release(changed, use.uses)


def gradient(recipe: Experiment, facts: Facts) -> Plan:
    """Return the plan of a gradient method: one release a step or epoch, with the schedule's noise.

    Raises PrivacyError for a combination without a guarantee and InfeasibleBudget if nothing fits the budget.
    """
    privacy = recipe.required_privacy
    return _drafted(recipe, facts, privacy.schedule, recipe.length)


def one_gaussian(recipe: Experiment, facts: Facts, moved: float, label: str = "gradient") -> Plan:
    """Return the plan of one Gaussian on all records, with the least noise that the budget allows.

    `moved` bounds the L2 norm by which one record more moves the released vector; a replaced record moves it by twice
    that. Raises as `gradient` does.
    """
    return _drafted(recipe, facts, Uniform(), 1, moved, label)


def _drafted(
    recipe: Experiment,
    facts: Facts,
    schedule: Schedule,
    length: int | Literal["until-budget"],
    moved: float | None = None,
    label: str = "gradient",
) -> Plan:
    privacy, method = recipe.required_privacy, recipe.method
    batch = method.batch or facts.records
    if batch > facts.records:
        raise PrivacyError(
            f"method.batch_size is {batch}, more than the {facts.records} training records; make it smaller"
        )
    noise = privacy.correlated
    groups = 1 if noise is None else noise.groups_for(method.batching)
    sampling = Sampling(method.batching, facts.records, batch, recipe.adjacency, groups)
    _check_noise(privacy, sampling)
    if noise is not None and sampling.kind.sampled and NEIGHBOURS[sampling.adjacency].replaced:
        raise PrivacyError(
            f"no guarantee for privacy.noise {noise.kind} on {method.batching} batches under replace-one adjacency: its"
            " theorem is about a record that comes or goes; state it for add-remove or zero-out, or leave privacy.noise"
            " out"
        )
    unproved = sampling.kind.refusal(sampling.adjacency)
    if unproved is not None:
        others: list[str] = [name for name, kind in BATCHINGS.items() if sampling.adjacency in kind.proved]
        raise PrivacyError(f"no guarantee for {unproved}, or use method.batching {any_of(others)}")
    _check_sampler(sampling, privacy.accountant)
    before = with_preconditioner(method.conditioned, recipe.adjacency, privacy.budget, facts.preprocessing_releases)
    before = with_intervals(method.inferred, recipe.adjacency, privacy.budget, before)
    before = with_calibration(method.calibrated, recipe.adjacency, privacy.budget, before)
    facts = replace(facts, preprocessing_releases=before)
    draft = _Draft(recipe, privacy, sampling, facts, schedule, length, moved, label)
    if schedule.adaptive:
        return draft.adaptive(schedule)
    return draft.with_fewest_errors() if noise is not None and noise.bands == "auto" else draft.plan()


def of_own_code(recipe: Experiment, facts: Facts) -> Plan:
    """Return the gradient plan of a user's own method, which may freely choose what to release and when to stop."""
    return replace(gradient(recipe, facts), is_adaptive=True)


def _check_noise(privacy: Privacy, sampling: Sampling) -> None:
    """Raise PrivacyError for correlated noise on batches, or of sensitivities, that its theorem does not cover."""
    noise, clipping = privacy.correlated, privacy.clipping
    batching, steps = sampling.batching, sampling.steps_per_epoch
    if noise is None:
        return
    if clipping.moves:
        raise PrivacyError(
            f"no guarantee for privacy.noise {noise.kind} with privacy.clipping {clipping.kind}: its theorem is about"
            " sums of one sensitivity, and this bound moves from step to step; use clipping flat, or leave noise out"
        )
    most = sampling.records // sampling.batch_size
    if batching == "poisson" and sampling.groups > most:
        raise PrivacyError(
            f"privacy.noise.bands is {sampling.groups}: groups of {sampling.records} / {sampling.groups} records hold"
            f" no batches of {sampling.batch_size}; give at most {most} bands, or smaller batches"
        )
    if batching == "random-allocation" and steps % sampling.groups:
        raise PrivacyError(
            f"an epoch has {steps} steps, which {sampling.groups} groups of privacy.noise do not divide; give a number"
            f" of groups (bands of banded noise) that does: {any_of([str(one) for one in _divisors(steps)])}"
        )


def _divisors(steps: int) -> list[int]:
    return [groups for groups in range(1, steps + 1) if steps % groups == 0]


def _check_sampler(sampling: Sampling, accountant: str) -> None:
    """Raise PrivacyError for shuffled batches if the accountant's theorem needs sampled ones."""
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

    recipe: Experiment
    privacy: Privacy
    sampling: Sampling
    facts: Facts
    schedule: Schedule
    length: int | Literal["until-budget"]
    moved: float | None
    label: str

    def plan(self) -> Plan:
        kind, multipliers = self._solve()
        for multiplier in set(multipliers):
            self.privacy.clipping.applied(multiplier)
        plan = self._made(
            Plan,
            noise_multipliers=tuple(multipliers),
            epochs=self._epochs(multipliers),
            schedule=kind,
            correlated=self._correlated(multipliers),
        )
        if self.accountant.name == BestAccountant.name:
            plan = replace(plan, accountant=BestAccountant().best(plan.releases, plan.delta)[1])
        if self._excess(multipliers) > 0:
            fitting = epochs_that_fit(kind, len(multipliers), self._excess)
            raise InfeasibleBudget(
                f"{count(len(multipliers), 'epoch')} of this schedule would pass the budget"
                f" ({format_budget(self.privacy.budget)}); {fitting} fit: train fewer epochs, add noise, raise the"
                " budget, or use epochs: until-budget"
            )
        return plan

    def with_fewest_errors(self) -> Plan:
        """Return the plan with the number of bands of least predicted error at the budget.

        Of equal errors, the fewest bands win. Numbers are tried upwards until the error has grown twice in a row.
        """
        wanted, free = self.length, self.schedule.free_numbers()
        if self.privacy.budget is None or not free or wanted == "until-budget":
            raise PrivacyError(
                "privacy.noise.bands: auto compares predicted errors at one budget and length; give privacy.budget,"
                " epochs as a number and one number of privacy.schedule as auto, or give bands"
            )
        tried: list[tuple[float, Plan]] = []
        for bands in self._numbers_of_bands(wanted):
            plan = self._with_bands(bands).plan()
            assert plan.correlated is not None
            tried.append((plan.correlated.error, plan))
            if len(tried) > 2 and tried[-3][0] < min(tried[-2][0], tried[-1][0]):
                break
        best = min(tried, key=itemgetter(0))[1]
        assert best.correlated is not None
        return replace(best, correlated=replace(best.correlated, independent=tried[0][0]))

    def _numbers_of_bands(self, epochs: int) -> list[int]:
        steps = self.sampling.steps_per_epoch
        if self.sampling.batching == "random-allocation":
            return _divisors(steps)
        return numbers_of_bands(min(self.facts.records // self.sampling.batch_size, epochs * steps))

    def _with_bands(self, bands: int) -> _Draft:
        noise = self.privacy.required_correlated.changed(bands=bands)
        sampling = replace(self.sampling, groups=noise.groups_for(self.sampling.batching))
        _check_noise(privacy := self.privacy.changed(noise=noise), sampling)
        return replace(self, privacy=privacy, sampling=sampling)

    def _correlated(self, multipliers: Sequence[float]) -> PlannedNoise | None:
        """Return the correlation of the noise and its predicted error; None for independent noise."""
        noise = self.privacy.correlated
        if noise is None or not multipliers:
            return None
        own = self._strategy(len(multipliers))
        return PlannedNoise(own.steps, own.taken, own.error(multipliers))

    def _strategy(self, epochs: int) -> NoiseStrategy:
        from dpsgd_cli.noise.price import strategy  # scipy, for which a plan of independent noise need not wait

        return strategy(self.privacy.required_correlated, epochs * self.sampling.steps_per_epoch)

    def adaptive(self, kind: Schedule) -> Plan:
        """Return a plan that follows the validation accuracy, within a budget that a filter can enforce.

        Raises PrivacyError for any other schedule whose noise is chosen while training runs: no planner covers it.
        """
        if not isinstance(kind, Validation):
            raise PrivacyError(f"privacy.schedule {kind.kind} chooses its noise while it runs, and has no plan")
        if self.privacy.correlated is not None:
            raise PrivacyError(
                "privacy.schedule validation chooses the noise of an epoch while it runs, and privacy.noise correlates"
                " it with that of earlier ones; leave privacy.noise out, or use a schedule that is known beforehand"
            )
        allowed, cut = self.privacy.budget, self.recipe.data.validation
        if allowed is None:
            raise PrivacyError("privacy.schedule validation stops when the budget is spent: give privacy.budget")
        if cut is None:
            raise PrivacyError("privacy.schedule validation needs data.validation: what accuracy is measured on")
        if self.sampling.kind.sampled or not self._filtered:
            raise PrivacyError(
                "privacy.schedule validation chooses its noise while it runs, and only budgets in rho, or in epsilon by"
                " the gaussian accountant, can be enforced then; use method.batching shuffle or full, or a"
                " schedule that is known beforehand"
            )
        self.privacy.clipping.applied(kind.initial)
        look = None
        if cut.noise_multiplier is not None:
            look = Release(GaussianSum(cut.noise_multiplier, self.sampling.adjacency, label="validation"))
        most = self._most_epochs(Uniform(initial=kind.initial))
        wanted = self.length
        return self._made(
            AdaptiveSchedulePlan,
            is_adaptive=True,
            noise_multipliers=(kind.initial,),
            schedule=kind,
            release=self.release,
            look=look,
            most=most if wanted == "until-budget" else min(most, wanted),
        )

    def _made(self, kind: type[P], **own: Any) -> P:
        """Return a plan of `kind` with the numbers that all plans of gradients share."""
        return self.recipe.planned(
            kind,
            self.facts,
            sampling=self.sampling,
            sensitivity=self.sensitivity,
            accountant=self.accountant.name,
            **own,
        )

    @property
    def accountant(self) -> Accountant:
        name = self.privacy.accountant
        if self.facts.priced_by is not None:
            return self.facts.priced_by
        if name == "auto":
            # nothing is below what is exact, and its filter lets a method choose
            return BestAccountant() if self.sampling.kind.sampled else accountants.get("gaussian")
        return accountants.get(name)

    @property
    def sensitivity(self) -> float:
        moved = self.privacy.clipping.norm_bound(self.facts.groups) if self.moved is None else self.moved
        return moved * replace_factor(self.sampling.adjacency)

    def release(self, multiplier: float) -> Release:
        """Return the release of one epoch at schedule value `multiplier`; `_charged` changes correlated ones."""
        numbers: dict[str, Any] = {
            "noise_multiplier": self.privacy.clipping.charged(multiplier, self.facts.groups),
            "adjacency": self.sampling.adjacency,
            "batching": self.sampling.batching,
            "sampling_rate": self.sampling.rate,
            "sensitivity": self.sensitivity,
            "label": self.label,
        }
        noise = self.privacy.correlated
        if noise is None:
            return Release(GaussianSum(**numbers), self.sampling.releases_per_epoch)
        bands = self.sampling.groups if self.sampling.batching == "poisson" else self.sampling.steps_per_epoch
        return Release(CorrelatedSums(**numbers, correlation=noise.kind, bands=bands))

    def _epochs(self, multipliers: Sequence[float]) -> tuple[tuple[Release, ...], ...]:
        """Return the releases of each epoch; equal releases are one object."""
        noise = self.privacy.correlated
        made = {z: self.release(z) for z in set(multipliers)}
        if noise is None:
            return tuple((made[z],) for z in multipliers)
        charged = self._charges(multipliers) if multipliers else []
        uses = {use: _charged(made[use.multiplier].mechanism, use) for uses in charged for use in uses}
        return tuple(tuple(uses[use] for use in epoch) for epoch in charged)

    def _charges(self, multipliers: Sequence[float]) -> list[list[Charge]]:
        from dpsgd_cli.noise.price import by_cycle

        sampling, steps = self.sampling, self.sampling.steps_per_epoch
        if sampling.batching == "poisson":
            return by_cycle(multipliers, steps, sampling.groups)
        return self._strategy(len(multipliers)).charges(sampling.batching, multipliers, steps, sampling.groups)

    def _excess(self, multipliers: Sequence[float]) -> float:
        released = [release for epoch in self._epochs(multipliers) for release in epoch]
        before = self.facts.preprocessing_releases if self.privacy.budget_covers == "total" else ()
        return over_budget(self.privacy.budget, self.accountant, [*before, *released])

    def _solve(self) -> tuple[Schedule, list[float]]:
        """Return the schedule without free numbers, and its values by epoch."""
        wanted, kind = self.length, self.schedule
        free = kind.free_numbers()
        lacking = ["privacy.budget"] * (self.privacy.budget is None)
        lacking += ["epochs as a number, not until-budget"] * (wanted == "until-budget")
        if free and lacking:
            raise PrivacyError(f"privacy.schedule.{free[0]}: auto is solved for; give {' and '.join(lacking)}")
        if wanted == "until-budget":
            wanted = self._most_epochs(kind)
        elif free:
            kind = self._solved(kind, wanted)
        return kind, [kind.noise_multiplier(epoch) for epoch in range(wanted)]

    def _solved(self, kind: Schedule, epochs: int) -> Schedule:
        try:
            # where only an accountant can tell the price, each question takes long
            return solve_schedule(kind, epochs, self._excess, 0.0 if self._filtered else PRECISION)
        except InfeasibleBudget:
            if self._excess([]) < 0:
                raise
            raise InfeasibleBudget(
                f"private preprocessing alone spends the budget ({format_budget(self.privacy.budget)}); give it more"
                " noise, or raise the budget"
            ) from None

    @property
    def _filtered(self) -> bool:
        return isinstance(self.privacy.budget, RhoBudget) or self.accountant.name == "gaussian"

    def _most_epochs(self, kind: Schedule) -> int:
        """Return how many epochs the budget allows. Raises InfeasibleBudget for none, or too many to count."""
        if self.privacy.budget is None:
            raise PrivacyError("epochs: until-budget needs privacy.budget")
        if self.privacy.correlated is not None and self.sampling.batching != "poisson":
            raise PrivacyError(
                f"epochs: until-budget: on {self.sampling.batching} batches the strategy of privacy.noise depends on"
                " the length; give epochs as a number"
            )
        fitting = epochs_that_fit(kind, MOST_EPOCHS, self._excess)
        if fitting == 0:
            raise InfeasibleBudget(
                f"not one epoch fits the budget ({format_budget(self.privacy.budget)}): add noise or raise the budget"
            )
        if fitting == MOST_EPOCHS:
            raise InfeasibleBudget(f"the budget is not spent after {MOST_EPOCHS} epochs; give epochs as a number")
        return fitting
