"""Plans: exact noise multipliers, epochs and price, before any data is read.

Guarantee: the ledger of `Plan.ledger()` refuses what the budget does not cover. The planners are `price.py` of each
method; `methods/experiment.py` calls the one that a recipe's method names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpsgd_cli.accounting import accountants, budget
from dpsgd_cli.accounting.accountants import Accountant, Guarantee
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.adjacency import BATCHINGS, Adjacency, Batching, BatchingKind
from dpsgd_cli.accounting.budget import Budget, Filter
from dpsgd_cli.accounting.ledger import Ledger, LedgerEntry
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, Release, merge
from dpsgd_cli.common.sections import Section
from dpsgd_cli.common.text_format import count


@dataclass(frozen=True)
class Sampling:
    """Public facts about how records reach a step. Step t holds records of group t mod `groups` only."""

    batching: Batching
    records: int
    batch_size: int
    adjacency: Adjacency
    groups: int = 1

    @property
    def kind(self) -> BatchingKind:
        """The batching's record: everything that depends on the batching."""
        return BATCHINGS[self.batching]

    @property
    def rate(self) -> float:
        return self.kind.rate(self.groups * self.batch_size, self.records)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // self.batch_size)

    @property
    def releases_per_epoch(self) -> int:
        """Number of uses of a mechanism that an epoch spends: 1 where a use is an epoch."""
        return 1 if self.kind.by_epoch else self.steps_per_epoch


@dataclass(frozen=True)
class Facts:
    """Public facts about the data: training records, releases of preprocessing, layers, and the feature bound.

    If users are the unit (`privacy.unit`), `records` counts users: in every price a user takes the role of a record.

    `feature_bound` covers the model's constant column; None if nothing bounds a record's features. `public_records` is
    the number of records that PATE may ask about. `priced_by`, if given, prices a gradient plan's budget instead of the
    recipe's accountant.
    """

    records: int
    preprocessing_releases: Sequence[Release] = ()
    groups: int | None = None
    feature_bound: float | None = None
    public_records: int = 0
    priced_by: Accountant | None = None


@dataclass(frozen=True)
class PlannedNoise:
    """Noise that is correlated across `steps` steps: the data of a `NoiseStrategy` (`noise/price.py`), its error.

    `taken` are the shares of past noise that a step takes back. `error` is predicted (`NoiseStrategy.error`), and
    `independent` that of independent noise on the same batches at the same budget; None if it was not computed.
    """

    steps: int
    taken: tuple[float, ...]
    error: float
    independent: float | None = None

    @property
    def reach(self) -> int:
        """Number of steps over which noise is correlated."""
        return min(self.steps, 1 + len(self.taken))

    @property
    def ratio(self) -> float | None:
        """The predicted error over that of independent noise; None if the latter is unknown."""
        return None if self.independent is None else self.error / self.independent


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before data is read. `epochs[t]` are the releases of epoch t.

    `is_adaptive`: whether the method may choose what to release, or when to stop, from what it released before. If so,
    only the most that its filter ever admits (`budget_cap`) is known of a run, before it and after it. `schedule` is
    the recipe's section, with every `auto` number solved for; None for methods without a schedule.
    `postprocessing_epochs` follow the last release, and only use earlier releases. `correlated` describes correlated
    noise; None if it is independent. `held_out` are the releases that measure held-out records at the end
    (`evaluation/price.py`); each costs no more than the training, with which it composes in parallel, so no other
    property counts them.
    """

    sampling: Sampling
    noise_multipliers: tuple[float, ...]
    sensitivity: float
    preprocessing_releases: tuple[Release, ...]
    epochs: tuple[tuple[Release, ...], ...]
    accountant: str
    delta: float
    budget: Budget
    covers_before: bool
    is_adaptive: bool
    schedule: Section | None = None
    postprocessing_epochs: int = 0
    correlated: PlannedNoise | None = None
    held_out: tuple[Release, ...] = ()

    def mechanisms(self, *labels: str) -> list[GaussianSum]:
        """Return the Gaussians with one of `labels` among the preprocessing releases, in order."""
        made = [release.mechanism for release in self.preprocessing_releases]
        return [one for one in made if isinstance(one, GaussianSum) and one.label in labels]

    @property
    def releases(self) -> list[Release]:
        """All releases of the whole run, private preprocessing included."""
        return [*self.preprocessing_releases, *(release for epoch in self.epochs for release in epoch)]

    @property
    def most_epochs(self) -> int:
        """The largest number of epochs that a trial may train."""
        return len(self.epochs)

    def released_by(self, done: int) -> dict[int | None, list[Release]] | None:
        """Return the releases of the first `done` epochs, keyed as in `charged_by_epoch`; None if a method chooses."""
        return (
            None if self.is_adaptive else {t: merge(list(epoch)) for t, epoch in enumerate(self.epochs[:done]) if epoch}
        )

    def rest(self, made: Sequence[LedgerEntry], done: int) -> list[LedgerEntry]:
        """Return charges to add to `made`, one trial's entries, if training ends after `done` epochs and is published.

        Guarantee: `made` and these together bound the trial (`ledger.priced_releases`).
        - Releases were planned, and none of them is seen before the end. The moment of stopping does not depend on
          them, so those of the finished epochs are all. The result is empty.
        - The method itself chooses. Its budget is charged, which its entries name (if they do not, an entry of the
          budget that is used 0 times does), or else all that the plan priced.
        """
        if self.budget_cap is not None:
            cap, named = self.budget_cap, any(entry.budget_cap is not None for entry in made)
            return [] if named else [LedgerEntry(Release(cap, 0), "train", 0, cap, _unit(made))]
        if self.is_adaptive:
            counted = sum(1 for entry in made if self.covers_before or entry.phase == "train")
            return [LedgerEntry(release, "train", done - 1, unit=_unit(made)) for release in self._counted[counted:]]
        return []

    def guarantee(self) -> Guarantee:
        """Return the guarantee of the whole run, private preprocessing included."""
        return accountants.get(self.accountant).guarantee(self.priced_releases, self.delta)

    def rho(self) -> float | None:
        """Return the total zCDP; None if no accountant has one (sampled batches)."""
        return rho_of(self.priced_releases)

    @property
    def budget_cap(self) -> Mechanism | None:
        """The budget as one mechanism, if a filter enforces it on a method that chooses; None if releases are planned.

        Without a filter of mu^2 the ledger admits only what is planned, in order, and charges what is left out.
        """
        return budget.one_gaussian(self.budget, self.accountant, self.sampling.adjacency) if self.is_adaptive else None

    @property
    def priced_releases(self) -> list[Release]:
        """Releases whose price bounds that of every run: those planned, or the most that the filter ever admits."""
        if self.budget_cap is None:
            return self.releases
        return [*(() if self.covers_before else self.preprocessing_releases), Release(self.budget_cap)]

    def ledger(self) -> Ledger:
        """Return an empty ledger that enforces this plan's budget."""
        return Ledger(self._filter(), self.covers_before, budget_cap=self.budget_cap, held_out=[*self.held_out])

    def _filter(self) -> Filter:
        if self.budget_cap is not None and self.budget is not None:
            return budget.enforce_on_choices(self.budget)
        return budget.enforce(self.budget, accountants.get(self.accountant), self._counted)

    @property
    def _counted(self) -> list[Release]:
        """The releases that the budget has to cover, in order."""
        return self.releases if self.covers_before else [r for epoch in self.epochs for r in epoch]


def _unit(made: Sequence[LedgerEntry]) -> str | None:
    return made[0].unit if made else None


def noise_text(noise: PlannedNoise) -> str:
    """Describe correlated noise in words, with its predicted error and its `ratio`, as far as they are known."""
    said = f"banded, correlated over {count(noise.reach, 'step')}"
    beside = "" if noise.ratio is None else f", {noise.ratio:.4g} of that of independent noise"
    return f"{said}; predicted error {noise.error:.6g}{beside}"
