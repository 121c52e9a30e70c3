"""Tables: which numbers a batch of row numbers becomes, in pieces, for shared and for own inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.engine.tensors import Batch, Table, to_host

CPU = torch.device("cpu")


def table(records: int, per_trial: bool, trials: int = 2) -> Table:
    shape = (trials, records, 2, 3) if per_trial else (records, 2, 3)
    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    return Table.load(x, np.arange(records) % 4, per_trial, CPU, torch.float32)


@settings(max_examples=60)
@given(
    records=st.integers(1, 9),
    size=st.integers(0, 6),
    most=st.integers(1, 7),
    per_trial=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pieces_hold_the_rows_of_the_batch(
    records: int, size: int, most: int, per_trial: bool, masked: bool, seed: int
) -> None:
    made, rng = table(records, per_trial), np.random.default_rng(seed)
    rows = rng.integers(0, records, (2, size))
    mask = rng.random((2, size)) < 0.5 if masked else None
    pieces = list(made.chunks(Batch(rows, mask), most))
    assert sum(x.shape[1] for x, _, _ in pieces) == size
    assert all(x.shape[1] <= most for x, _, _ in pieces)
    place = 0
    for x, y, present in pieces:
        for column in range(x.shape[1]):
            for trial in range(2):
                row = rows[trial, place]
                wanted = made.x[trial, row] if per_trial else made.x[row]
                assert torch.equal(x[trial, column], wanted)
                assert y[trial, column] == row % 4
                assert (mask is None) == (present is None)
                if mask is not None and present is not None:
                    assert present[trial, column] == mask[trial, place]
            place += 1


@pytest.mark.parametrize("per_trial", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_the_whole_in_pieces(per_trial: bool, most: int) -> None:
    made = table(5, per_trial)
    pieces = list(made.chunks(Batch(None), most))
    assert torch.equal(torch.cat([x for x, _, _ in pieces], dim=1), made.x if per_trial else made.x[None])
    assert torch.cat([y for _, y, _ in pieces], dim=1).tolist() == [[0, 1, 2, 3, 0]]
    assert all(mask is None and x.shape[1] <= most for x, _, mask in pieces)


def test_rows_of_folds_are_each_trials_own() -> None:
    """Trial 0 holds out rows 1 and 3, trial 1 rows 0 and 2; batches number the rest, the whole masks them."""
    held = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 0]]).bool()
    for per_trial in (False, True):
        made = table(5, per_trial).with_folds(held)
        assert len(made) == 3 and made.rows == 5
        ((x, y, mask),) = made.chunks(Batch(np.array([[0, 2], [1, 0]])), 9)
        assert mask is None and y.tolist() == [[0, 0], [3, 1]]
        source = made.x if per_trial else made.x.expand(2, *made.x.shape)
        assert torch.equal(x[0], source[0][[0, 4]]) and torch.equal(x[1], source[1][[3, 1]])
        masks = [mask for _, _, mask in made.chunks(Batch(None), 2)]
        assert torch.equal(torch.cat([own for own in masks if own is not None], dim=1), ~held.T)


def test_a_fold_of_fewer_records_has_places_that_add_nothing() -> None:
    """Trial 0 trains on 3 of 5 rows, trial 1 on 4: both have 4 places, and each record one of them."""
    held = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 0], [0, 0]]).bool()
    for per_trial in (False, True):
        made = table(5, per_trial).with_folds(held, 4)
        assert len(made) == 4 and made.counts.tolist() == [3, 4]
        for masked in (None, np.array([[True, False, True, True]] * 2)):
            ((x, y, mask),) = made.chunks(Batch(np.array([[0, 1, 2, 3]] * 2), masked), 9)
            there = torch.tensor([[True, True, True, False], [True] * 4])
            assert mask is not None
            assert torch.equal(mask, there if masked is None else there & torch.from_numpy(masked))
            assert y[0, :3].tolist() == [0, 2, 0] and y[1].tolist() == [1, 2, 3, 0]
            source = made.x if per_trial else made.x.expand(2, *made.x.shape)
            assert torch.equal(x[0, :3], source[0][[0, 2, 4]]) and torch.equal(x[1], source[1][1:])


def test_what_is_kept_on_the_host_is_a_copy() -> None:
    values = torch.ones(2, requires_grad=True)
    kept = to_host(values)
    with torch.no_grad():
        values.zero_()
    assert kept.tolist() == [1, 1] and not kept.requires_grad


def test_labels_keep_their_kind() -> None:
    x = np.zeros((2, 1))
    assert Table.load(x, np.array([1, 0]), False, CPU, torch.float32).y.dtype == torch.int64
    assert Table.load(x, np.array([1.5, 0]), False, CPU, torch.float32).y.dtype == torch.float32
    assert table(3, True).input_shape == table(3, False).input_shape == (2, 3)
