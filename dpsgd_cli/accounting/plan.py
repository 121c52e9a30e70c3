"""What a plan is: exact noise multipliers, epochs and price, before any data is read; and which one a recipe gets.

Guarantee: whatever is planned, the ledger that `Plan.ledger()` gives refuses what the budget does not cover.
Not here: the planners, which each method's descriptor names (`methods/dp_sgd/price.py`, `schedules/price.py`,
`methods/private_selection/price.py`, `convex.py`), drawing batches or noise (`engine/`), prices (`accountants/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpsgd_cli.accounting import accountants, budget
from dpsgd_cli.accounting.accountants import Accountant, Guarantee
from dpsgd_cli.accounting.accountants.zcdp import rho_of
from dpsgd_cli.accounting.adjacency import BATCHINGS, Adjacency, Batching, BatchingKind
from dpsgd_cli.accounting.budget import Budget, Filter
from dpsgd_cli.accounting.ledger import Ledger, LedgerEntry
from dpsgd_cli.accounting.mechanism import Mechanism, Release, merge
from dpsgd_cli.common.text_format import count

if TYPE_CHECKING:  # scipy, for which a plan of independent noise need not wait
    from dpsgd_cli.noise.price import Correlation
    from dpsgd_cli.schedules.settings import Schedule


@dataclass(frozen=True)
class Sampling:
    """How records reach a step; all public. Step t holds records of group t mod `groups` only."""

    batching: Batching
    records: int
    batch_size: int
    adjacency: Adjacency
    groups: int = 1
    largest_batch: int | None = None

    @property
    def kind(self) -> BatchingKind:
        """What depends on the batching."""
        return BATCHINGS[self.batching]

    @property
    def truncation(self) -> dict[str, int]:
        """What a truncated batch's record says besides."""
        return {} if self.largest_batch is None else {"largest_batch": self.largest_batch}

    @property
    def rate(self) -> float:
        return self.kind.rate(self.groups * self.batch_size, self.records)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // self.batch_size)

    @property
    def releases_per_epoch(self) -> int:
        """Counts of a mechanism that an epoch spends: shuffled batches compose in parallel to one."""
        return 1 if self.kind.by_epoch else self.steps_per_epoch


@dataclass(frozen=True)
class Facts:
    """What is public about the data: training records, releases of preprocessing, layers, and the feature bound.

    Where users are the unit (`privacy.unit`), `records` are users: a user is to every price what a record is elsewhere.

    `feature_bound` covers the model's constant column; None where nothing bounds a record's features. `public_records`
    are those that PATE may ask about. `judge` is who prices a gradient plan's budget where somebody else than the
    recipe's accountant is asked.
    """

    records: int
    before: Sequence[Release] = ()
    groups: int | None = None
    feature_bound: float | None = None
    public_records: int = 0
    judge: Accountant | None = None


@dataclass(frozen=True)
class PlannedNoise:
    """Noise that is correlated across steps, and the error that it is predicted to leave (`Correlation.error`).

    None where noise is chosen on the way. `independent` is that of independent noise on the same batches at the same
    budget; None where nobody asked.
    """

    kind: str
    correlation: Correlation
    error: float | None
    independent: float | None = None

    @property
    def ratio(self) -> float | None:
        """The predicted error over that of independent noise, where both are known."""
        return None if self.error is None or self.independent is None else self.error / self.independent


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before data is read. `epochs[t]` are the releases of epoch t.

    `chooses`: whether the method may choose what to release, or when to stop, from what it released before. Then only
    what its filter never lets pass (`budget_cap`) is known of a run, before it and after it. `schedule` is the
    recipe's, with what was left `auto` solved for; None for methods that have none. `silent` epochs follow the last
    release, and only use what was released. `correlated` is noise that is; None where it is independent.
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
    chooses: bool
    schedule: Schedule | None = None
    silent: int = 0
    correlated: PlannedNoise | None = None

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

    def rest(self, made: Sequence[LedgerEntry], done: int, watched: bool) -> list[LedgerEntry]:
        """Charges beside `made`, those of one trial, if training ends after `done` epochs and its result is published.

        Guarantee: `made` and these together bound the trial (`ledger.to_price`).
        - Releases were planned, and nothing of them was seen before the end (not `watched`): the moment is no function
          of them, so those of the finished epochs are all. The result is empty.
        - Releases were planned, and metrics by epoch were watched: whoever stopped may have chosen the moment by them.
          A sum up to a chosen moment bounds nothing (`accounting/ledger.py`), so the whole plan is charged.
        - The method itself chooses: its budget is charged, which its entries name (one of no release does, where none
          was made), or all that the plan priced.
        """
        if self.budget_cap is not None:
            cap, named = self.budget_cap, any(entry.budget_cap is not None for entry in made)
            return [] if named else [LedgerEntry(Release(cap, 0), "train", 0, cap, _unit(made))]
        if self.chooses:
            counted = sum(1 for entry in made if self.covers_before or entry.phase == "train")
            return [LedgerEntry(release, "train", done - 1, unit=_unit(made)) for release in self._counted[counted:]]
        later = range(done, len(self.epochs)) if watched else ()
        return [LedgerEntry(release, "train", t, unit=_unit(made)) for t in later for release in self.epochs[t]]

    def guarantee(self) -> Guarantee:
        """What the whole run guarantees, private preprocessing included."""
        return accountants.get(self.accountant).guarantee(self.to_price, self.delta)

    def rho(self) -> float | None:
        """Total zCDP; None where no accountant has one (sampled batches)."""
        return rho_of(self.to_price)

    @property
    def budget_cap(self) -> Mechanism | None:
        """The budget as one mechanism, where a method that chooses is policed by it; None where releases are planned.

        Without a filter of mu^2 the ledger lets only what is planned pass, in order, and charges what is left out.
        """
        return budget.one_gaussian(self.budget, self.accountant, self.sampling.adjacency) if self.chooses else None

    @property
    def to_price(self) -> list[Release]:
        """Releases whose price bounds that of every run: those planned, or what the filter never lets pass."""
        cap = self.budget_cap
        return self.releases if cap is None else [*(() if self.covers_before else self.before), Release(cap)]

    def ledger(self) -> Ledger:
        """An empty ledger that enforces this plan's budget."""
        return Ledger(self._filter(), self.covers_before, budget_cap=self.budget_cap)

    def _filter(self) -> Filter:
        if self.budget_cap is not None and self.budget is not None:
            return budget.enforce_on_choices(self.budget)
        return budget.enforce(self.budget, accountants.get(self.accountant), self._counted)

    @property
    def _counted(self) -> list[Release]:
        """What the budget has to cover, in order."""
        return self.releases if self.covers_before else [r for epoch in self.epochs for r in epoch]


def _unit(made: Sequence[LedgerEntry]) -> str | None:
    return made[0].unit if made else None


def noise_text(noise: PlannedNoise) -> str:
    """Correlated noise in words, with the error that it is predicted to leave and that of independent noise."""
    said = f"{noise.kind}, correlated over {count(noise.correlation.bands, 'step')}"
    if noise.error is None:
        return said
    beside = "" if noise.ratio is None else f", {noise.ratio:.4g} of that of independent noise"
    return f"{said}; predicted error {noise.error:.6g}{beside}"
