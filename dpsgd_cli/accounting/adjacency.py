"""How records reach a step: the kinds of batching, and what is proved for each under which adjacency.

A kind of batching is one entry of `BATCHINGS`, which names what draws and prices it, and its name in `Batching`; a
method says which of them it takes. An adjacency is one entry of `NEIGHBOURS`, and its name in `Adjacency`.

Not here: drawing batches (`batching/run.py`), prices (`accounting/sampled_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Adjacency = Literal["add-remove", "replace-one", "zero-out"]
Batching = Literal["poisson", "shuffle", "full", "fixed", "truncated-poisson", "random-allocation"]


@dataclass(frozen=True, kw_only=True)
class NeighbourKind:
    """What depends on who is a neighbour. No field has a default.

    `moves`: how many times the bound on one record's part a sum may move.
    `replaced`: two different records may be compared, so that what one of them adds is taken away and something else
    comes in its place; otherwise a record's part is only added or only taken away.
    `counted`: the number of records differs, so that nothing which depends on it may be taken for public.
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


def of_whom(adjacency: str, unit: object) -> str:
    """The adjacency as one that is told from others: of single records, or with a `unit` of users with all their rows.

    >>> of_whom("add-remove", None), of_whom("add-remove", "user")
    ('add-remove', 'add-remove of users')
    """
    return adjacency if unit is None else f"{adjacency} of users"


@dataclass(frozen=True, kw_only=True)
class BatchingKind:
    """What depends on how records reach a step. Names are `module:name`, imported when they are needed.

    No field has a default. Raises ValueError for statements that contradict each other.

    `adjacency`: what a statement is for where nobody says. `claim`: what an epoch is charged, in words. `sampler`: what
    draws batches, from the streams of the trials, the number of records and the size of a batch; None for all records.
    `sampled`: a record is in a batch with some rate, which amplifies what a batch guarantees; otherwise it takes part
    in every use. `by_epoch`: one use of the mechanism is an epoch, not a step; where it is sampled, too, its rate is 1
    over the steps of an epoch. `recorded`: the kind of mechanism that says all its price depends on.

    `losses`: from a mechanism and the width of a cell to its dominating losses. `divergence`: from a mechanism and an
    order to a bound on its Renyi divergence. Both None where a use is one Gaussian, or nothing is proved here.
    `amplifies_pairs`: whether sampling makes (log(1 + q (e^eps - 1)), q delta) of (eps, delta).
    `proved`: the neighbours that a theorem covers. `unproved`: why none covers the others.
    """

    adjacency: Adjacency
    claim: str
    sampler: str | None
    sampled: bool
    by_epoch: bool
    recorded: str
    losses: str | None
    divergence: str | None
    amplifies_pairs: bool
    proved: tuple[Adjacency, ...]
    unproved: Mapping[Adjacency, str]

    def __post_init__(self) -> None:
        if sorted([*self.proved, *self.unproved]) != sorted(NEIGHBOURS):
            raise ValueError(f"each of {', '.join(NEIGHBOURS)} must be proved, or unproved with a reason, and not both")
        if self.adjacency not in self.proved:
            raise ValueError(f"adjacency {self.adjacency} is what is stated where nobody says, but is not proved")
        if self.sampled and self.losses is None:
            raise ValueError("batches that amplify must name their dominating losses")

    def refusal(self, adjacency: Adjacency) -> str | None:
        """Why no theorem covers this batching for `adjacency`; None where one does. KeyError for an unknown one."""
        return None if adjacency in self.proved else self.unproved[adjacency]

    def rate(self, batch_size: int, records: int) -> float:
        """The share of the records that a batch is expected to hold, where that amplifies; else 1."""
        if self.sampled and self.by_epoch:
            return 1 / -(-records // batch_size)
        return batch_size / records if self.sampled else 1.0


_FIXED = (
    "batches of fixed size under {} adjacency: amplification by sampling without replacement is proved for replace-one;"
    " choose it, with the sensitivity it has"
)
BATCHINGS: dict[Batching, BatchingKind] = {
    # The null record of zero-out adds nothing to a sum whether it is drawn or not, so the two output distributions are
    # those of add-remove. Of replaced records: `accounting/sampled_pairs.py`.
    "poisson": BatchingKind(
        adjacency="add-remove",
        claim="a step is a subsampled Gaussian (rdp, pld, moments, zcdp-rs); any adjacency",
        sampler="dpsgd_cli.batching.run:PoissonSampler",
        sampled=True,
        by_epoch=False,
        recorded="gaussian",
        losses="dpsgd_cli.accounting.sampled_pairs:poisson",
        divergence="dpsgd_cli.accounting.sampled_divergences:poisson",
        amplifies_pairs=True,
        proved=("add-remove", "replace-one", "zero-out"),
        unproved={},
    ),
    # Yu et al. 2019, Theorem 2, needs the partition to be drawn without looking at the data, and it depends on the
    # number of records.
    "shuffle": BatchingKind(
        adjacency="zero-out",
        claim="an epoch is one Gaussian (zcdp, gaussian, rdp, pld); zero-out or replace-one",
        sampler="dpsgd_cli.batching.run:ShuffleSampler",
        sampled=False,
        by_epoch=True,
        recorded="gaussian",
        losses=None,
        divergence=None,
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
        recorded="gaussian",
        losses=None,
        divergence=None,
        amplifies_pairs=True,
        proved=("add-remove", "replace-one", "zero-out"),
        unproved={},
    ),
    # The record is swapped for another one of the data, which only replace-one bounds.
    "fixed": BatchingKind(
        adjacency="replace-one",
        claim="a step is a Gaussian on a batch drawn without replacement (pld, rdp); replace-one",
        sampler="dpsgd_cli.batching.run:fixed_sampler",
        sampled=True,
        by_epoch=False,
        recorded="gaussian",
        losses="dpsgd_cli.accounting.sampled_pairs:fixed",
        divergence="dpsgd_cli.accounting.sampled_divergences:fixed",
        amplifies_pairs=True,
        proved=("replace-one",),
        unproved={"add-remove": _FIXED.format("add-remove"), "zero-out": _FIXED.format("zero-out")},
    ),
    "truncated-poisson": BatchingKind(
        adjacency="add-remove",
        claim="a Poisson batch, of which at most largest_batch records are kept (pld, rdp); any adjacency",
        sampler="dpsgd_cli.batching.run:TruncatedSampler",
        sampled=True,
        by_epoch=False,
        recorded="truncated",
        losses="dpsgd_cli.accounting.sampled_pairs:truncated",
        divergence="dpsgd_cli.accounting.sampled_divergences:truncated",
        amplifies_pairs=False,
        proved=("add-remove", "replace-one", "zero-out"),
        unproved={},
    ),
    "random-allocation": BatchingKind(
        adjacency="add-remove",
        claim="an epoch is one draw of a step for each record (pld); add-remove or zero-out",
        sampler="dpsgd_cli.batching.run:AllocationSampler",
        sampled=True,
        by_epoch=True,
        recorded="gaussian",
        losses="dpsgd_cli.accounting.allocation:losses",
        divergence=None,
        amplifies_pairs=False,
        proved=("add-remove", "zero-out"),
        unproved={
            "replace-one": "random allocation under replace-one adjacency: the epoch's pair is proved for a record that"
            " comes or goes, not for one that is another; choose add-remove or zero-out"
        },
    ),
}


def moves_of_a_sum(adjacency: Adjacency) -> float:
    """How many times the bound on one record's part a sum may move: 2 where another record replaces it, else 1."""
    return NEIGHBOURS[adjacency].moves
