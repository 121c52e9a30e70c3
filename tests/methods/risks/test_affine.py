"""Fast sums of one dense layer against one record at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.risks import affine
from dpsgd_cli.methods.risks.affine import AffineRisk

N, D, K, R = 41, 4, 3, 4


def problem(folds: bool, factors: bool) -> tuple[Table, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    table = Table(x, torch.arange(N) % K, False)
    if folds:
        table = table.with_folds(torch.from_numpy(Keys.of_places([N]).folds(2, R // 2, seed=0)))
    if factors:
        table = replace(table, factors=torch.rand(R, N, generator=generator, dtype=torch.float64) / 4)
    return table, torch.randn(R, K * D + K, generator=generator, dtype=torch.float64)


def slow(table: Table, values: torch.Tensor, bias: bool, norm: float, longest: float | None) -> torch.Tensor:
    """Sums, each record's gradient being as long as its loss's by the outputs times `longest`, where that is given."""
    total = torch.zeros_like(values)
    for trial in range(len(values)):
        for i in range(N):
            if table.held_out is not None and table.held_out[i, trial]:
                continue
            row = table.x[i] * (1 if table.factors is None else table.factors[trial, i])
            w = values[trial].clone().requires_grad_()
            t = w[: K * D].view(K, D) @ row + (w[K * D :] if bias else 0)
            t.retain_grad()
            torch.nn.functional.cross_entropy(t[None], table.y[i][None]).backward()
            assert w.grad is not None and t.grad is not None
            length = w.grad.norm() if longest is None else t.grad.norm() * math.sqrt(longest**2 + bias)
            total[trial] += w.grad * min(1.0, norm / float(length))
    return total


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("longest", [None, 1.5])
@pytest.mark.parametrize("norm", [0.2, math.inf])
def test_sums_are_those_of_clipped_single_records(
    folds: bool, bias: bool, longest: float | None, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affine, "_LEAST", 16)
    table, values = problem(folds, longest is not None)
    values = values if bias else values[:, : K * D]
    clipping = None if norm == math.inf else Clipping(torch.full((1, R), norm, dtype=torch.float64))
    seen, sums = Diagnostics(R, torch.device("cpu")), torch.zeros_like(values)
    lengths = None if longest is None else torch.full((1, N), longest, dtype=torch.float64)
    AffineRisk(table, cross_entropy, bias, lengths).add_sums(values, sums, clipping, seen)
    assert torch.allclose(sums, slow(table, values, bias, norm, longest))
    assert seen.sums()["examples"] == [
        float(len(table)) if table.own is None else float(n) for n in table.counts.expand(R)
    ]


def test_each_record_is_clipped_by_its_own_length_in_each_trial() -> None:
    """Sums of trials with lengths of their own are those of trials alone."""
    table, values = problem(False, False)
    lengths = torch.rand(R, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    clipping = Clipping(torch.full((1, R), 0.2, dtype=torch.float64))
    sums = torch.zeros_like(values)
    AffineRisk(table, cross_entropy, True, lengths).add_sums(
        values, sums, clipping, Diagnostics(R, torch.device("cpu"))
    )
    expected = torch.zeros_like(values)
    for i in range(N):
        one = Table(table.x[i : i + 1], table.y[i : i + 1], False)
        for trial in range(R):
            expected[trial] += slow_one(one, values[trial], 0.2, float(lengths[trial, i]))
    assert torch.allclose(sums, expected)


def slow_one(one: Table, values: torch.Tensor, norm: float, length: float) -> torch.Tensor:
    """A record's gradient, clipped as if its row had that length."""
    w = values.clone().requires_grad_()
    t = w[: K * D].view(K, D) @ one.x[0] + w[K * D :]
    t.retain_grad()
    torch.nn.functional.cross_entropy(t[None], one.y).backward()
    assert w.grad is not None and t.grad is not None
    return w.grad * min(1.0, norm / float(t.grad.norm() * math.hypot(length, 1)))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_record_that_is_not_finite_adds_nothing(value: float) -> None:
    table, values = problem(False, False)
    clipping = Clipping(torch.full((1, R), 0.2, dtype=torch.float64))
    odd = table.x.clone()
    odd[7, 2] = value
    kept = [i for i in range(N) if i != 7]
    found = []
    for one in (replace(table, x=odd), Table(table.x[kept], table.y[kept], False)):
        sums, seen = torch.zeros_like(values), Diagnostics(R, torch.device("cpu"))
        AffineRisk(one, cross_entropy, True).add_sums(values, sums, clipping, seen)
        found.append(sums)
    assert torch.allclose(found[0], found[1])


def test_float32_rows_are_added_up_in_float64() -> None:
    """One record more moves the sum by its own part, where float32 sums of 200,000 others lose it."""
    x = torch.cat([torch.full((200_000, 1), 1.0), torch.tensor([[1.0]])])
    clipping = Clipping(torch.full((1, 1), 1e-3))
    found = []
    for rows in (x, x[:-1]):
        sums = torch.zeros(1, 2, dtype=torch.float64)
        risk = AffineRisk(Table(rows, torch.zeros(len(rows), dtype=torch.long), False), cross_entropy, False)
        risk.add_sums(torch.zeros(1, 2), sums, clipping, Diagnostics(1, torch.device("cpu")))
        found.append(sums)
    assert float((found[0] - found[1]).norm()) == pytest.approx(1e-3, rel=1e-6)
