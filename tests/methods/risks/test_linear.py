"""Fast sums against one record at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.loss_bounds import LOSSES, Loss
from dpsgd_cli.engine.losses import MarginLoss, margin_loss
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows

N, D, R = 37, 3, 4


def problem(name: Loss, folds: bool = True, seed: int = 0) -> tuple[LinearRisk, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = torch.randn(N, generator=generator, dtype=torch.float64)
    loss, residual = margin_loss(name), LOSSES[name].residual
    labels = y if residual else (y > 0).long()
    out = torch.from_numpy(Keys.of_places([N]).folds(2, R // 2, seed=0)) if folds else None
    rows = SignedRows.load(x, labels, residual, bias=True, held_out=out)
    return LinearRisk(rows, loss), torch.randn(R, D + 1, generator=generator, dtype=torch.float64)


def slow_gradient(risk: LinearRisk, w: torch.Tensor, trial: int, norm: float) -> torch.Tensor:
    rows, total = risk.rows, torch.zeros_like(w)
    for i in range(len(rows)):
        if rows.weights is not None and not rows.weights[i, trial]:
            continue
        v = w.clone().requires_grad_()
        t = rows.z[i] @ v + (0 if rows.offset is None else rows.offset[i])
        (g,) = torch.autograd.grad(risk.loss.value(t), v)
        total += g * min(1.0, norm / float(g.norm())) if float(g.norm()) > 0 else 0
    return total


def slow_loss(risk: LinearRisk, w: torch.Tensor, trial: int, bound: float) -> float:
    rows = risk.rows
    t = rows.z @ w + (0 if rows.offset is None else rows.offset)
    losses = risk.loss.value(t).clamp(max=bound)
    return float((losses * rows.weights[:, trial]).sum() if rows.weights is not None else losses.sum())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("norm", [0.3, 2.0, math.inf])
def test_gradient_sums_are_those_of_clipped_single_records(name: Loss, folds: bool, norm: float) -> None:
    risk, values = problem(name, folds)
    norms = torch.tensor([norm, norm / 2, norm, norm], dtype=torch.float64)
    expected = torch.stack([slow_gradient(risk, values[r], r, float(norms[r])) for r in range(R)])
    risk.start(values.clone())
    assert torch.allclose(risk.gradient_sums(norms), expected)
    assert torch.allclose(risk.gradient_sums_at(values, norms), expected)
    some = torch.tensor([2, 0])
    assert torch.allclose(risk.gradient_sums(norms, some), expected[some])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("bound", [0.4, 3.0, 100.0])
def test_losses_along_a_line_are_those_of_the_candidates_one_by_one(name: Loss, folds: bool, bound: float) -> None:
    risk, values = problem(name, folds)
    direction = torch.randn(R, D + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spacing = torch.tensor([0.1, 0.3, 0.0, 1.0], dtype=torch.float64)
    bounds = torch.full((R,), bound, dtype=torch.float64)
    expected = torch.tensor(
        [[slow_loss(risk, values[r] - i * spacing[r] * direction[r], r, bound) for i in range(6)] for r in range(R)],
        dtype=torch.float64,
    )
    risk.start(values.clone())
    risk.aim(direction)
    assert torch.allclose(risk.line_losses(spacing, 6, bounds), expected)
    some = torch.tensor([3, 1])
    assert torch.allclose(risk.line_losses(spacing, 6, bounds, some), expected[some])
    risk.start(values.clone())
    risk.aim(direction[some], some)
    assert torch.allclose(risk.line_losses(spacing, 6, bounds, some), expected[some])


def test_advance_moves_weights_and_margins_together() -> None:
    risk, values = problem("logistic")
    risk.start(values.clone())
    risk.aim(torch.ones_like(values))
    risk.advance(torch.tensor([0.0, 0.5, 1.0, -2.0], dtype=torch.float64))
    moved = values - torch.tensor([[0.0], [0.5], [1.0], [-2.0]], dtype=torch.float64)
    assert torch.allclose(risk.values, moved)
    assert torch.allclose(risk.margins, risk.rows.z @ moved.T)


@given(st.integers(0, 200), st.floats(0.01, 5.0), st.sampled_from(sorted(LOSSES)))
def test_one_record_more_moves_sums_by_at_most_the_bound_and_losses_one_way(
    seed: int, bound: float, name: Loss
) -> None:
    risk, values = problem(name, folds=False, seed=seed)
    rows = risk.rows
    fewer = LinearRisk(
        SignedRows(rows.z[1:], None if rows.offset is None else rows.offset[1:], rows.norms[1:]), margin_loss(name)
    )
    bounds, spacing = torch.full((R,), bound, dtype=torch.float64), torch.full((R,), 0.7, dtype=torch.float64)
    moved = risk.gradient_sums_at(values, bounds) - fewer.gradient_sums_at(values, bounds)
    assert float(moved.norm(dim=1).max()) <= bound * (1 + 1e-9)
    for one in (risk, fewer):
        one.start(values.clone())
        one.aim(values)
    more = risk.line_losses(spacing, 5, bounds) - fewer.line_losses(spacing, 5, bounds)
    assert float(more.min()) >= -1e-9
    assert float(more.max()) <= bound + 1e-9


@pytest.mark.parametrize("folds", [False, True])
def test_a_loss_below_zero_counts_as_nothing_in_a_selection(folds: bool) -> None:
    """Noisy-min's scale rests on sums that one record moves one way only."""

    class Signed(MarginLoss):
        def value(self, t: torch.Tensor) -> torch.Tensor:
            return t

        def slope(self, t: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(t)

    risk, values = problem("logistic", folds)
    risk.loss = Signed()
    risk.start(values)
    risk.aim(values)
    found = risk.line_losses(torch.zeros(R).double(), 1, torch.full((R,), 0.5).double())[:, 0]
    one = torch.stack([risk.rows.z @ w for w in values]).clamp(0, 0.5)
    own = one if risk.rows.weights is None else one * risk.rows.weights.T
    assert torch.allclose(found, own.sum(dim=1))


@pytest.mark.parametrize("name", ["logistic", "hinge"])
def test_extreme_weights_and_broken_records_stay_within_the_bounds(name: Loss) -> None:
    x = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float32)
    risk = LinearRisk(SignedRows.load(x, torch.tensor([1, 1, 0]), False, bias=False), margin_loss(name))
    values = torch.tensor([[1e30], [-1e30], [math.inf]])
    bounds = torch.full((3,), 2.0)
    sums = risk.gradient_sums_at(values, bounds)
    assert bool(torch.isfinite(sums).all())
    assert float(sums.abs().max()) <= 4.0
    risk.start(values)
    risk.aim(torch.ones(3, 1))
    losses = risk.line_losses(torch.full((3,), 1e30), 4, bounds)
    assert bool(((losses >= 0) & (losses <= 4.0)).all())


def test_counts_are_those_of_single_records() -> None:
    risk, values = problem("logistic")
    trained = ~torch.from_numpy(Keys.of_places([N]).folds(2, R // 2, seed=0))
    margins = risk.rows.z @ values.T
    assert torch.allclose(risk.loss_sums(values), (risk.loss.value(margins) * trained).sum(dim=0))
    assert torch.equal(risk.misses(values), ((margins <= 0) & trained).sum(dim=0).double())
    assert torch.equal(torch.as_tensor(risk.rows.counts), trained.sum(dim=0))


def test_the_loss_of_a_diverged_trial_is_not_hidden_by_its_fold() -> None:
    risk, values = problem("logistic")
    values[1] = math.nan
    assert torch.isnan(risk.loss_sums(values)).tolist() == [False, True, False, False]


def test_rows_can_be_held_to_a_public_bound() -> None:
    risk, _ = problem("logistic")
    short = risk.rows.shrunk(1.0)
    assert float(short.z.norm(dim=1).max()) <= 1 + 1e-12
    long = risk.rows.norms > 1
    assert torch.equal(short.z[~long], risk.rows.z[~long])
    assert bool(long.any())
