"""Merged rows against the records that they stand for."""

from __future__ import annotations

import pytest
import torch

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.loss_bounds import Loss
from dpsgd_cli.engine.losses import margin_loss
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.risks import rows as module
from dpsgd_cli.methods.risks.problem import rows_of
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows

N, D, R = 60, 3, 4


@pytest.fixture(autouse=True)
def _merge_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH_MERGING", 1)


def repeated(folds: bool = True, dtype: torch.dtype = torch.float64) -> SignedRows:
    """60 records of which 20 are different: some occur once, one 21 times."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, D, generator=generator, dtype=dtype), torch.randint(2, (20,), generator=generator)
    index = torch.cat([torch.arange(20), torch.full((20,), 7), torch.arange(12), torch.arange(8)])
    index = index[torch.randperm(N, generator=generator)]
    out = torch.from_numpy(Keys.of_places([N]).folds(2, R // 2, seed=0)) if folds else None
    return SignedRows.load(x[index], y[index], False, bias=True, held_out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_record_is_counted_once(dtype: torch.dtype) -> None:
    rows = repeated(dtype=dtype)
    merged = rows.merged()
    assert rows.weights is not None and merged.weights is not None
    assert len(merged) == 20
    assert torch.equal(torch.as_tensor(merged.counts), torch.as_tensor(rows.counts))
    copies = []
    for row, weights in zip(merged.z, merged.weights, strict=True):
        equal = (rows.z == row).all(dim=1)
        copies.append(int(equal.sum()))
        assert torch.equal(rows.weights[equal].sum(dim=0), weights)
    assert copies == sorted(copies, reverse=True)
    assert copies[0] == 23
    assert merged.several == 12


@pytest.mark.parametrize("name", ["logistic", "hinge", "huber-svm"])
@pytest.mark.parametrize("folds", [False, True])
def test_sums_over_merged_rows_are_those_over_records(name: Loss, folds: bool) -> None:
    rows, loss = repeated(folds), margin_loss(name)
    whole, merged = LinearRisk(rows, loss), LinearRisk(rows.merged(), loss)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(R, D + 1, generator=generator, dtype=torch.float64)
    direction = torch.randn(R, D + 1, generator=generator, dtype=torch.float64)
    bounds = torch.tensor([0.3, 2.0, 1.0, 100.0], dtype=torch.float64)
    spacing = torch.tensor([0.1, 0.3, 0.0, 1.0], dtype=torch.float64)
    assert torch.allclose(merged.gradient_sums_at(values, bounds), whole.gradient_sums_at(values, bounds))
    assert torch.allclose(merged.loss_sums(values), whole.loss_sums(values))
    assert torch.equal(merged.misses(values), whole.misses(values))
    for risk in (whole, merged):
        risk.start(values.clone())
        risk.aim(direction)
    assert torch.allclose(merged.gradient_sums(bounds), whole.gradient_sums(bounds))
    assert torch.allclose(merged.line_losses(spacing, 5, bounds), whole.line_losses(spacing, 5, bounds))
    some = torch.tensor([2, 0])
    assert torch.allclose(merged.line_losses(spacing, 5, bounds, some), whole.line_losses(spacing, 5, bounds, some))


def test_chunks_of_single_records_are_told_from_the_others() -> None:
    merged = repeated().merged()
    assert not merged.all_single(slice(11, 16))
    assert merged.all_single(slice(12, 20))
    assert repeated().all_single(slice(0, N))


def test_rows_of_which_few_are_equal_and_residuals_stay_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, D, generator=generator)
    different = SignedRows.load(x, torch.ones(40), False, bias=True)
    assert different.merged() is different
    residual = SignedRows.load(x[:1].expand(40, -1), torch.randn(40, generator=generator), True, bias=True)
    assert residual.merged() is residual


def test_equal_hashes_of_different_rows_merge_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = repeated()
    monkeypatch.setattr(torch, "unique", lambda hashes, return_inverse: (hashes[:1], torch.zeros_like(hashes)))
    assert rows.merged() is rows


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
