from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.core.folds import held_out
from dpsgd_cli.core.sampling import Batch
from dpsgd_cli.core.tensors import Table


@given(st.integers(2, 60), st.integers(2, 7), st.integers(1, 3))
def test_folds_of_a_repeat_are_disjoint_and_trials_train_on_equally_many(
    records: int, folds: int, repeats: int
) -> None:
    out = held_out(records, folds, repeats, seed=3)
    assert out.shape == (records, folds * repeats)
    assert set((~out).sum(dim=0).tolist()) == {records - records // folds}
    for repeat in range(repeats):
        one = out[:, repeat * folds : (repeat + 1) * folds]
        assert int(one.sum(dim=1).max()) <= 1
        assert int((~one.any(dim=1)).sum()) == records % folds


def test_repeats_differ_and_seeds_repeat() -> None:
    out = held_out(50, 5, 2, seed=1)
    assert not torch.equal(out[:, :5], out[:, 5:])
    assert torch.equal(held_out(50, 5, 1, seed=2), out[:, 5:])


def test_batches_of_a_table_with_folds_hold_a_trials_own_records_only() -> None:
    x = torch.arange(12.0).unsqueeze(1).numpy()
    table = Table.load(x, x[:, 0], False, torch.device("cpu"), torch.float32).with_folds(held_out(12, 3, 1))
    assert (len(table), table.rows) == (8, 12)
    drawn = torch.stack([torch.arange(8)] * 3).numpy()
    (inputs, labels, mask) = next(iter(table.chunks(Batch(rows=drawn), 100)))
    assert mask is None
    assert table.held_out is not None
    for trial in range(3):
        own = set(torch.arange(12.0)[~table.held_out[:, trial]].tolist())
        assert set(labels[trial].tolist()) == own == set(inputs[trial, :, 0].tolist())
    whole = list(table.chunks(Batch(rows=None), 5))
    masks = torch.cat([piece[2] for piece in whole if piece[2] is not None], dim=1)
    assert torch.equal(masks, ~table.held_out.T)
