"""How records reach a step: the kinds of batching, and what is proved for each under which adjacency.

A kind of batching is one entry of `BATCHINGS`, which names what draws and prices it, and its name in `Batching`; a
method says which of them it takes. Not here: drawing batches (`core/sampling.py`), prices (`privacy/sampled_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Adjacency = Literal["add-remove", "replace-one", "zero-out"]
Batching = Literal["poisson", "shuffle", "full", "fixed", "truncated-poisson", "random-allocation"]

NEIGHBOURS: dict[Adjacency, str] = {
    "add-remove": "whether a record was in the file at all, and so what it says: the file is compared with the same"
    " file without that record, or with one more, in any order",
    "replace-one": "what a record says: the file is compared with the same file in which one row is any other record."
    " The number of records is not hidden",
    "zero-out": "whether a record took part, and so what it says: the file is compared with the same file in which one"
    " row is empty and adds nothing. The number of records is not hidden",
}
"""What a statement for each adjacency hides."""
NEIGHBOURS_OF_USERS: dict[Adjacency, str] = {
    "add-remove": "whether a user was in the file at all, and so what all of their rows say: the file is compared"
    " with the same file without every row of theirs, or with one more user's rows, in any order",
    "replace-one": "what all rows of a user say, and how many they are: the file is compared with the same file in"
    " which all rows of one user are any others under the same name. The number of users is not hidden",
    "zero-out": "whether a user took part, and so what all of their rows say: the file is compared with the same file"
    " in which one user is empty and adds nothing. The number of users is not hidden",
}
"""What a statement about all rows of a user (`privacy.unit`) hides, by adjacency."""


def of_whom(adjacency: str, unit: object) -> str:
    """The adjacency as one that is told from others: of single records, or with a `unit` of users with all their rows.

    >>> of_whom("add-remove", None), of_whom("add-remove", "user")
    ('add-remove', 'add-remove of users')
    """
    return adjacency if unit is None else f"{adjacency} of users"


@dataclass(frozen=True)
class BatchingKind:
    """What depends on how records reach a step. Names are `module:name`, imported when they are needed.

    `adjacency`: what a statement is for where nobody says. `claim`: what an epoch is charged, in words. `sampler`: what
    draws batches, from the streams of the trials, the number of records and the size of a batch; None for all records.
    `sampled`: a record is in a batch with some rate, which amplifies what a batch guarantees; otherwise it takes part
    in every use. `by_epoch`: one use of the mechanism is an epoch, not a step; where it is sampled, too, its rate is 1
    over the steps of an epoch. `recorded`: the kind of mechanism that says all its price depends on.

    `losses`: from a mechanism and the width of a cell to its dominating losses. `divergence`: from a mechanism and an
    order to a bound on its Renyi divergence. Both None where a use is one Gaussian, or nothing is proved here.
    `amplifies_pairs`: whether sampling makes (log(1 + q (e^eps - 1)), q delta) of (eps, delta). `unproved`: why nothing
    is proved, by adjacency.
    """

    adjacency: Adjacency
    claim: str
    sampler: str | None = None
    sampled: bool = False
    by_epoch: bool = False
    recorded: str = "gaussian"
    losses: str | None = None
    divergence: str | None = None
    amplifies_pairs: bool = True
    unproved: Mapping[Adjacency, str] = field(default_factory=dict)

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
    # those of add-remove. Of replaced records: `privacy/sampled_pairs.py`.
    "poisson": BatchingKind(
        "add-remove",
        "a step is a subsampled Gaussian (rdp, pld, moments, zcdp-rs); any adjacency",
        sampler="dpsgd_cli.core.sampling:PoissonSampler",
        sampled=True,
        losses="dpsgd_cli.privacy.sampled_pairs:poisson",
        divergence="dpsgd_cli.privacy.sampled_divergences:poisson",
    ),
    # Yu et al. 2019, Theorem 2, needs the partition to be drawn without looking at the data, and it depends on the
    # number of records.
    "shuffle": BatchingKind(
        "zero-out",
        "an epoch is one Gaussian (zcdp, gaussian, rdp, pld); zero-out or replace-one",
        sampler="dpsgd_cli.core.sampling:ShuffleSampler",
        by_epoch=True,
        unproved={
            "add-remove": "shuffled batches under add-remove adjacency: one record more or less changes N and with it"
            " the partition of all records, so batches no longer differ in one record; state it for zero-out or"
            " replace-one"
        },
    ),
    "full": BatchingKind("add-remove", "a step is one Gaussian; any adjacency"),
    # The record is swapped for another one of the data, which only replace-one bounds.
    "fixed": BatchingKind(
        "replace-one",
        "a step is a Gaussian on a batch drawn without replacement (pld, rdp); replace-one",
        sampler="dpsgd_cli.core.sampling:fixed_sampler",
        sampled=True,
        losses="dpsgd_cli.privacy.sampled_pairs:fixed",
        divergence="dpsgd_cli.privacy.sampled_divergences:fixed",
        unproved={"add-remove": _FIXED.format("add-remove"), "zero-out": _FIXED.format("zero-out")},
    ),
    "truncated-poisson": BatchingKind(
        "add-remove",
        "a Poisson batch, of which at most largest_batch records are kept (pld, rdp); any adjacency",
        sampler="dpsgd_cli.core.sampling:TruncatedSampler",
        sampled=True,
        recorded="truncated",
        losses="dpsgd_cli.privacy.sampled_pairs:truncated",
        divergence="dpsgd_cli.privacy.sampled_divergences:truncated",
        amplifies_pairs=False,
    ),
    "random-allocation": BatchingKind(
        "add-remove",
        "an epoch is one draw of a step for each record (pld); add-remove or zero-out",
        sampler="dpsgd_cli.core.sampling:AllocationSampler",
        sampled=True,
        by_epoch=True,
        losses="dpsgd_cli.privacy.allocation:losses",
        amplifies_pairs=False,
        unproved={
            "replace-one": "random allocation under replace-one adjacency: the epoch's pair is proved for a record that"
            " comes or goes, not for one that is another; choose add-remove or zero-out"
        },
    ),
}


def moves_of_a_sum(adjacency: Adjacency) -> float:
    """How many times the bound on one record's part a sum may move: 2 where another record replaces it, else 1."""
    return 2.0 if adjacency == "replace-one" else 1.0
