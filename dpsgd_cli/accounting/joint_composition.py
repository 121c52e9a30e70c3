"""The one rule that decides if ledgers of several trials may be added: for `account`, `result.json`, `compare`, sweeps.

Publishing several trials publishes all that each of them reveals about the records, with noise and without: its
weights, and what was measured on records that its statement does not protect (test records, folds held out, validation
records that are declared public). The price of the merged ledgers bounds that under four conditions:

noise       Every trial drew its own noise. Trials of equal seed draw the same numbers: of two sums with one noise at
            the scales 4 and 8, twice the first less the second is the exact sum.
records     No trial measured, without noise, records that another trained on: all leave out the same records. With
            folds, every record is left out by some trial, whatever the others were charged for it.
data        All trials use the same data. For different data it is unknown if a record of one is a test record of the
            other.
adjacency   All trials are stated for the same adjacency.

Guarantee: given the records that are left out, neighbouring data sets then differ in one record of the part that all
trials train on. Each trial is bounded by its own ledger (`ledger.priced_releases`), their noise is independent, and the
whole is their sequential composition. A trial's releases may depend on earlier trials. The number of trials and the
noise of each may not, because a sum that was chosen on the way is no bound (`ledger.py`). If one of these conditions
does not hold, or is not known, no joint guarantee is given. Parts of one trial (the candidates of `private-selection`)
are covered by that method's own proof, and count as one trial here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Records:
    """The records of a run.

    `data` is equal for the same data. `left_out` describes in words the records of it that nothing protects.
    """

    data: Hashable
    left_out: str
    folds: int | None = None


@dataclass(frozen=True)
class Run:
    """Trials of one recipe, with the facts that their ledgers do not contain.

    `seeds` has one entry a trial, None for noise of the operating system. `adjacency` is None without privacy. `seeds`
    or `records` is None if it is not known. `started`: from an earlier result, whose price is in each trial's own.
    """

    name: str
    seeds: Sequence[int | None] | None
    adjacency: str | None
    records: Records | None
    started: bool = False


def why_apart(runs: Sequence[Run], trials: int | None = None) -> str | None:
    """Return why there is no joint guarantee for all trials of `runs`; None if their ledgers add up, or for one trial.

    `trials` is their number, for runs whose seeds may be unknown. Without it, a run without seeds counts as several
    trials.
    """
    if trials is None:
        trials = sum(2 if run.seeds is None else len(run.seeds) for run in runs)
    if trials < 2:
        return None
    if started := next((run.name for run in runs if run.started), None):
        return (
            f"{started} starts from an earlier result, and of both only the sum of their epsilons is proved; ask about"
            " one trial at a time"
        )
    return _noise(runs) or why_records_apart(runs) or _adjacency(runs)


def why_records_apart(runs: Sequence[Run]) -> str | None:
    """Return why the trials' records rule out a joint guarantee; None if they do not.

    Noise and adjacency are not checked. A single run may be given: it may have several trials.
    """
    unknown = next((run.name for run in runs if run.records is None), None)
    if unknown is not None:
        return (
            f"{unknown} does not say which records its trials left out, and on which data they ran: that is told by the"
            " recipe.yaml and the result.json that came with the ledger"
        )
    found = [run.records for run in runs if run.records is not None]
    folds = next((one.folds for one in found if one.folds is not None), None)
    if folds is not None:
        return (
            f"with folds: {folds} each record is tested, without noise, in one fold and trained on in the others; each"
            " trial's own statement does not cover its test records (leave folds out)"
        )
    if len({one.data for one in found}) > 1:
        return "they are of different data, and a record of the one may be a test record of the other"
    ways = list(dict.fromkeys(one.left_out for one in found))
    if len(ways) > 1:
        return (
            f"they leave out different records ({'; '.join(ways[:2])}), so what one measured without noise another"
            " trained on"
        )
    return None


def _noise(runs: Sequence[Run]) -> str | None:
    owners: dict[int, str] = {}
    for run in runs:
        if run.seeds is None:
            return f"{run.name} does not say the seeds of its trials, so they may share noise"
        for seed in run.seeds:
            if seed is None:
                continue
            if seed in owners:
                both = run.name if owners[seed] == run.name else f"{owners[seed]} and {run.name}"
                return (
                    f"trials share seed {seed}, and thus noise ({both}): sums with the same noise at two scales give"
                    " the exact sum away; give every run seeds of its own, or none"
                )
            owners[seed] = run.name
    return None


def _adjacency(runs: Sequence[Run]) -> str | None:
    without = next((run.name for run in runs if run.adjacency is None), None)
    if without is not None:
        return f"{without} has no privacy"
    stated = sorted({run.adjacency for run in runs if run.adjacency is not None})
    return f"they are stated for different adjacencies ({', '.join(stated)})" if len(stated) > 1 else None
