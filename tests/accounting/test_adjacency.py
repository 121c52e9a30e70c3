"""The registries of batchings and neighbours: what each entry states, against draws and against neighbouring tables."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS, Adjacency, Batching, BatchingKind
from dpsgd_cli.common.plugins import named
from dpsgd_cli.engine.streams import SeededStreams

RECORDS, BATCH, EPOCHS = 6, 2, 600
Table = tuple[tuple[float, float], ...]
ROWS = [(1.0, 0.0), (-1.0, 0.0), (0.0, 1.0)]
NULL = (0.0, 0.0)


def without_one(table: Table) -> list[Table]:
    return [table[:at] + table[at + 1 :] for at in range(len(table))]


def with_one_null(table: Table) -> list[Table]:
    return [(*table[:at], NULL, *table[at + 1 :]) for at in range(len(table))]


def with_one_other(table: Table) -> list[Table]:
    return [(*table[:at], row, *table[at + 1 :]) for at in range(len(table)) for row in ROWS]


OTHERS: dict[Adjacency, Callable[[Table], list[Table]]] = {
    "add-remove": without_one,
    "zero-out": with_one_null,
    "replace-one": with_one_other,
}
"""Neighbours of a table, by the definition of each adjacency."""


def test_every_name_has_an_entry_and_every_adjacency_a_definition_here() -> None:
    assert set(NEIGHBOURS) == set(get_args(Adjacency)) == set(OTHERS)
    assert set(BATCHINGS) == set(get_args(Batching))


@pytest.mark.parametrize("adjacency", NEIGHBOURS)
def test_what_an_adjacency_states_holds_of_all_its_neighbours_and_is_reached(adjacency: Adjacency) -> None:
    """Of all tables of three unit vectors: how far a sum moves, whether two records are compared, and counts."""
    tables = list(itertools.product(ROWS, repeat=3))
    pairs = [(table, other) for table in tables for other in OTHERS[adjacency](table)]
    moved = max(float(np.linalg.norm(np.sum(one, axis=0) - np.sum(other, axis=0))) for one, other in pairs)
    apart = [(Counter(one) - Counter(other), Counter(other) - Counter(one)) for one, other in pairs]
    two_records = any(set(gone) - {NULL} and set(come) - {NULL} for gone, come in apart)
    stated = NEIGHBOURS[adjacency]
    assert moved == stated.moves
    assert two_records == stated.replaced
    assert any(len(one) != len(other) for one, other in pairs) == stated.counted


def batches(kind: BatchingKind) -> list[list[list[int]]]:
    """The records of each step, epoch by epoch."""
    assert kind.sampler is not None
    sampler = named(kind.sampler)([SeededStreams(7)], RECORDS, BATCH)
    steps = RECORDS // BATCH
    drawn = [sampler.batch(step) for step in range(EPOCHS * steps)]
    rows = [
        (one.rows[0] if one.mask is None else one.rows[0][np.asarray(one.mask[0])]).tolist()
        for one in drawn
        if one.rows is not None
    ]
    return [rows[at : at + steps] for at in range(0, len(rows), steps)]


@pytest.mark.parametrize("batching", [name for name, kind in BATCHINGS.items() if kind.sampler is not None])
def test_a_sampler_draws_what_its_entry_is_charged_for(batching: Batching) -> None:
    """At most the stated rate, and one step of an epoch for each record where a use is an epoch. A binomial tail of
    1e-9 would have to be wrong for a right sampler to fail; a rate too high by a third fails for certain."""
    kind, epochs = BATCHINGS[batching], batches(BATCHINGS[batching])
    times = np.array([[sum(record in step for step in epoch) for record in range(RECORDS)] for epoch in epochs])
    if kind.by_epoch:
        assert bool((times == 1).all())
    elif kind.sampled:
        steps = EPOCHS * RECORDS // BATCH
        most = stats.binom.isf(1e-9, steps, kind.rate(BATCH, RECORDS))
        assert times.sum(axis=0).max() <= most
        assert times.max() > 1
    # where nothing amplifies, a record's part in an epoch is certain: nothing else is charged by the epoch as a whole
    assert kind.sampled or kind.by_epoch


@pytest.mark.parametrize("batching", BATCHINGS)
def test_names_of_an_entry_are_there_and_what_it_states_agrees(batching: Batching) -> None:
    kind = BATCHINGS[batching]
    assert kind.sampler is None or callable(named(kind.sampler))
    for adjacency in NEIGHBOURS:
        refusal = kind.refusal(adjacency)
        assert (refusal is None) == (adjacency in kind.proved)
        assert refusal is None or adjacency in refusal
    with pytest.raises(KeyError):
        kind.refusal("someone")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"proved": ("add-remove",)}, "must be proved, or unproved"),
        ({"unproved": {"zero-out": "no"}}, "must be proved, or unproved"),
        ({"proved": ("replace-one", "zero-out"), "unproved": {"add-remove": "no"}}, "is not proved"),
    ],
)
def test_statements_that_contradict_each_other_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(BATCHINGS["poisson"], **changes)
