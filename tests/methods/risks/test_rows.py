"""Signed rows of records that are not finite, and of targets beyond their bound."""

from __future__ import annotations

import torch

from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.risks.problem import rows_of
from dpsgd_cli.methods.risks.rows import SignedRows


def test_a_record_that_is_not_finite_adds_nothing() -> None:
    x = torch.tensor([[1.0], [float("nan")], [2.0]])
    rows = SignedRows.load(x, torch.tensor([1, 1, 0]), False, bias=False)
    assert rows.weights is not None
    assert rows.weights.squeeze(1).tolist() == [1.0, 0.0, 1.0]
    assert rows.counts == torch.tensor([2])


def test_targets_are_no_larger_than_their_public_bound() -> None:
    """On which the slope of a squared loss inside a ball counts: |w.x - y| <= R B + Y (`risks/constants.py`)."""
    x, y = torch.zeros(4, 2, dtype=torch.float64), torch.tensor([-9.0, -1.0, 2.0, 1e30], dtype=torch.float64)
    model = ConvexModel(loss="squared", radius=1.0, target_bound=3.0)
    offset = rows_of(model, Table(x, y, False)).offset
    assert offset is not None
    assert offset.tolist() == [3.0, 1.0, -2.0, -3.0]
