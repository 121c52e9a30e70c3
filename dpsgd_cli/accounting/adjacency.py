"""Kinds of batching, and the adjacencies that each is proved for.

A kind of batching is an entry of `BATCHINGS`, which names the code that draws it (`batching/run.py`) and has the
functions that price it, and a name in `Batching`. A method states the kinds that it takes. An adjacency is an entry of
`NEIGHBOURS` and a name in `Adjacency`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # NumPy
    from dpsgd_cli.accounting.losses import Pair

Adjacency = Literal["add-remove", "replace-one", "zero-out"]
Batching = Literal["poisson", "shuffle", "full", "fixed", "random-allocation"]


@dataclass(frozen=True, kw_only=True)
class NeighbourKind:
    """Properties of an adjacency. No field has a default.

    `moves`: the most that a sum differs between neighbours, in units of the bound on one record's contribution.
    `replaced`: neighbours may hold two different records, so one contribution is removed and another one added.
    Otherwise a contribution is only added or only removed.
    `counted`: the number of records differs between neighbours, so nothing that depends on it is public.
    `hides`: what a statement about one record hides, in words; `hides_of_users`: about all rows of a user.
    """

    moves: float
    replaced: bool
    counted: bool
    hides: str
    hides_of_users: str


NEIGHBOURS: dict[Adjacency, NeighbourKind] = {
    "add-remove": NeighbourKind(
        moves=1.0,
        replaced=False,
        counted=True,
        hides="whether a record was in the file at all, and so what it says: the file is compared with the same file"
        " without that record, or with one more, in any order",
        hides_of_users="whether a user was in the file at all, and so what all of their rows say: the file is compared"
        " with the same file without every row of theirs, or with one more user's rows, in any order",
    ),
    "replace-one": NeighbourKind(
        moves=2.0,
        replaced=True,
        counted=False,
        hides="what a record says: the file is compared with the same file in which one row is any other record. The"
        " number of records is not hidden",
        hides_of_users="what all rows of a user say, and how many they are: the file is compared with the same file in"
        " which all rows of one user are any others under the same name. The number of users is not hidden",
    ),
    "zero-out": NeighbourKind(
        moves=1.0,
        replaced=False,
        counted=False,
        hides="whether a record took part, and so what it says: the file is compared with the same file in which one"
        " row is empty and adds nothing. The number of records is not hidden",
        hides_of_users="whether a user took part, and so what all of their rows say: the file is compared with the same"
        " file in which one user is empty and adds nothing. The number of users is not hidden",
    ),
}


def adjacency_label(adjacency: str, unit: object) -> str:
    """Return the name of an adjacency of single records, or with a `unit`, of users with all their rows.

    >>> adjacency_label("add-remove", None), adjacency_label("add-remove", "user")
    ('add-remove', 'add-remove of users')
    """
    return adjacency if unit is None else f"{adjacency} of users"


@dataclass(frozen=True, kw_only=True)
class BatchingKind:
    """Properties of a kind of batching.

    No field has a default. Raises ValueError for fields that contradict each other.

    `adjacency`: the adjacency of a statement if the recipe gives none.
    `claim`: the charge of an epoch, in words.
    `sampler`: a function, as `module:name`, that draws batches from the trials' streams, the number of records and the
    batch size; None if a batch is all records.
    `sampled`: a record is in a batch at some rate, which amplifies the guarantee. Otherwise it takes part in every use.
    `by_epoch`: one use of the mechanism is an epoch, not a step. If it is sampled, too, the rate is 1 over the steps of
    an epoch in which a record is once.
    `losses`: the pair of dominating losses of one use, given the sampling rate, the noise multiplier and whether a
    record is replaced. `divergence`: a bound on the Renyi divergence of one use, given these and the order; None if
    nothing is proved here.
    `amplifies_pairs`: True if sampling turns (eps, delta) into (log(1 + q (e^eps - 1)), q delta).
    `proved`: the adjacencies that a theorem covers. `unproved`: the reason for each of the others.
    """

    adjacency: Adjacency
    claim: str
    sampler: str | None
    sampled: bool
    by_epoch: bool
    losses: Callable[[float, float, bool], Pair]
    divergence: Callable[[float, float, bool, float], float] | None
    amplifies_pairs: bool
    proved: tuple[Adjacency, ...]
    unproved: Mapping[Adjacency, str]

    def __post_init__(self) -> None:
        if sorted([*self.proved, *self.unproved]) != sorted(NEIGHBOURS):
            raise ValueError(f"each of {', '.join(NEIGHBOURS)} must be proved, or unproved with a reason, and not both")
        if self.adjacency not in self.proved:
            raise ValueError(f"adjacency {self.adjacency} is the default, but is not proved")

    def refusal(self, adjacency: Adjacency) -> str | None:
        """Return why no theorem covers this batching for `adjacency`; None if one does. Raise KeyError if unknown."""
        return None if adjacency in self.proved else self.unproved[adjacency]

    def rate(self, batch_size: int, records: int) -> float:
        """Return the expected share of the records in a batch if sampling amplifies, else 1."""
        if self.sampled and self.by_epoch:
            return 1 / -(-records // batch_size)
        return batch_size / records if self.sampled else 1.0


def _gaussian_losses(rate: float, noise: float, replaced: bool) -> Pair:
    from dpsgd_cli.accounting.losses import gaussian_pair

    return gaussian_pair(1.0, noise)


def _gaussian_divergence(rate: float, noise: float, replaced: bool, order: float) -> float:
    from dpsgd_cli.accounting.renyi import gaussian_divergence

    return gaussian_divergence(noise, order)


def _poisson_losses(rate: float, noise: float, replaced: bool) -> Pair:
    """Return the losses of a record that is present with probability q, or of another that replaces it."""
    from dpsgd_cli.accounting.losses import gaussian_pair, replaced_pair

    return replaced_pair(rate, noise) if replaced else gaussian_pair(rate, noise)


def _poisson_divergence(rate: float, noise: float, replaced: bool, order: float) -> float:
    from dpsgd_cli.accounting.renyi import poisson_gaussian_divergence, replaced_divergence

    return (replaced_divergence if replaced else poisson_gaussian_divergence)(rate, noise, order)


def _fixed_losses(rate: float, noise: float, replaced: bool) -> Pair:
    from dpsgd_cli.accounting.losses import fixed_pair

    return fixed_pair(rate, noise)


def _fixed_divergence(rate: float, noise: float, replaced: bool, order: float) -> float:
    from dpsgd_cli.accounting.renyi import fixed_size_gaussian_divergence

    return fixed_size_gaussian_divergence(rate, noise, order)


def _allocation_losses(rate: float, noise: float, replaced: bool) -> Pair:
    from dpsgd_cli.accounting.allocation_pairs import allocated_pair

    return allocated_pair(noise, round(1 / rate))


_FIXED = (
    "batches of fixed size under {} adjacency: amplification by sampling without replacement is proved for replace-one;"
    " choose it, with the sensitivity it has"
)
BATCHINGS: dict[Batching, BatchingKind] = {
    # The null record of zero-out adds nothing to a sum whether it is drawn or not, so the two output distributions are
    # those of add-remove. For replace-one see `accounting/losses.py`.
    "poisson": BatchingKind(
        adjacency="add-remove",
        claim="a step is a subsampled Gaussian (rdp, pld, moments, zcdp-rs); any adjacency",
        sampler="dpsgd_cli.batching.run:PoissonSampler",
        sampled=True,
        by_epoch=False,
        losses=_poisson_losses,
        divergence=_poisson_divergence,
        amplifies_pairs=True,
        proved=("add-remove", "replace-one", "zero-out"),
        unproved={},
    ),
    # Yu et al. 2019, Theorem 2, needs a partition that is drawn independently of the data; it depends on the number of
    # records.
    "shuffle": BatchingKind(
        adjacency="zero-out",
        claim="an epoch is one Gaussian (zcdp, gaussian, rdp, pld); zero-out or replace-one",
        sampler="dpsgd_cli.batching.run:ShuffleSampler",
        sampled=False,
        by_epoch=True,
        losses=_gaussian_losses,
        divergence=_gaussian_divergence,
        amplifies_pairs=True,
        proved=("replace-one", "zero-out"),
        unproved={
            "add-remove": "shuffled batches under add-remove adjacency: one record more or less changes N and with it"
            " the partition of all records, so batches no longer differ in one record; state it for zero-out or"
            " replace-one"
        },
    ),
    "full": BatchingKind(
        adjacency="add-remove",
        claim="a step is one Gaussian; any adjacency",
        sampler=None,
        sampled=False,
        by_epoch=False,
        losses=_gaussian_losses,
        divergence=_gaussian_divergence,
        amplifies_pairs=True,
        proved=("add-remove", "replace-one", "zero-out"),
        unproved={},
    ),
    # Another record of the data takes the record's place in a batch; only replace-one bounds that.
    "fixed": BatchingKind(
        adjacency="replace-one",
        claim="a step is a Gaussian on a batch drawn without replacement (pld, rdp); replace-one",
        sampler="dpsgd_cli.batching.run:FixedSampler",
        sampled=True,
        by_epoch=False,
        losses=_fixed_losses,
        divergence=_fixed_divergence,
        amplifies_pairs=True,
        proved=("replace-one",),
        unproved={"add-remove": _FIXED.format("add-remove"), "zero-out": _FIXED.format("zero-out")},
    ),
    "random-allocation": BatchingKind(
        adjacency="add-remove",
        claim="an epoch is one draw of a step for each record (pld); add-remove or zero-out",
        sampler="dpsgd_cli.batching.run:AllocationSampler",
        sampled=True,
        by_epoch=True,
        losses=_allocation_losses,
        divergence=None,
        amplifies_pairs=False,
        proved=("add-remove", "zero-out"),
        unproved={
            "replace-one": "random allocation under replace-one adjacency: the epoch's pair is proved for a record that"
            " comes or goes, not for one that is another; choose add-remove or zero-out"
        },
    ),
}


def replace_factor(adjacency: Adjacency) -> float:
    """Return the most that a sum may move, in bounds on one record's part: 2 if another record replaces it, else 1."""
    return NEIGHBOURS[adjacency].moves
