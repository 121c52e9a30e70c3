"""Losses of single examples against their formulas; metrics against counting by hand, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpsgd_cli.engine.evaluate import evaluate
from dpsgd_cli.engine.losses import LOSSES, cross_entropy, squared_error
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.tensors import Table
from tests.engine.conftest import parameters_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 300.0])
def test_cross_entropy_and_its_gradient_are_those_of_torch(dtype: torch.dtype, size: float) -> None:
    """Also where the exponential of an output would overflow."""
    outputs = (size * torch.randn(3, 50, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))).requires_grad_()
    labels = torch.arange(150).view(3, 50) % 7
    weights = torch.rand(3, 50, dtype=dtype, generator=torch.Generator().manual_seed(1))
    wanted = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="none").view(3, 50)
    (slow,) = torch.autograd.grad((wanted * weights).sum(), outputs)
    found = cross_entropy(outputs, labels)
    (fast,) = torch.autograd.grad((found * weights).sum(), outputs)
    precision = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found, wanted, rtol=precision, atol=precision * size)
    torch.testing.assert_close(fast, slow, rtol=precision, atol=precision)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_that_is_no_number_spoils_its_own_example_only(bad: float) -> None:
    outputs = torch.zeros(2, 3, 4)
    outputs[1, 2, 0] = bad
    outputs.requires_grad_()
    found = cross_entropy(outputs, torch.zeros(2, 3, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    wanted = torch.ones(2, 3, dtype=torch.bool)
    wanted[1, 2] = False
    assert torch.equal(found.isfinite(), wanted)
    assert torch.equal(gradient.isfinite().all(dim=-1), wanted)


def test_no_examples_have_no_losses() -> None:
    outputs = torch.zeros(2, 0, 4, requires_grad=True)
    found = cross_entropy(outputs, torch.zeros(2, 0, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (2, 0) and outputs.grad is not None and outputs.grad.shape == (2, 0, 4)


def test_squared_error() -> None:
    outputs = torch.tensor([[[1.0], [4.0]], [[-1.0], [0.0]]])
    assert squared_error(outputs, torch.tensor([[3.0, 4.0], [1.0, 0.5]])).tolist() == [[2.0, 0.0], [2.0, 0.125]]


@pytest.mark.parametrize("task", LOSSES)
def test_an_examples_loss_has_no_gradient_in_other_examples(task: str) -> None:
    outputs = torch.randn(2, 3, 4 if task == "classification" else 1, requires_grad=True)
    labels = torch.tensor([[0, 1, 0], [1, 1, 0]])
    LOSSES[task](outputs, labels)[1, 2].backward()
    assert outputs.grad is not None and outputs.grad[1, 2].any()
    outputs.grad[1, 2] = 0.0
    assert not outputs.grad.any()


PLACE = Placement(torch.device("cpu"), torch.float64)


def made(outputs: int, classes: int | None) -> tuple[Pack, Table]:
    rng = np.random.default_rng(0)
    y = rng.normal(size=11) if classes is None else rng.integers(0, classes, 11)
    pack = Pack(lambda: nn.Linear(3, outputs), [0, 1], PLACE, trusted=True)
    return pack, Table.load(rng.normal(size=(11, 3)), y, False, PLACE.device, PLACE.dtype)


def scores(pack: Pack, table: Table, trial: int) -> list[list[float]]:
    own = parameters_of(pack, trial)
    return [(own["weight"] @ x + own["bias"]).tolist() for x in table.x]


@pytest.mark.parametrize("most", [1, 4, 100])
def test_classification(most: int) -> None:
    pack, table = made(3, 3)
    found = evaluate(pack, pack.values, table, "classification", most)
    for trial in range(2):
        rows = list(zip(scores(pack, table, trial), table.y.tolist(), strict=True))
        right = sum(max(range(3), key=row.__getitem__) == label for row, label in rows)
        loss = sum(math.log(sum(math.exp(s) for s in row)) - row[label] for row, label in rows)
        assert float(found["accuracy"][trial]) == pytest.approx(right / 11)
        assert float(found["loss"][trial]) == pytest.approx(loss / 11)


@pytest.mark.parametrize("most", [3, 100])
def test_regression(most: int) -> None:
    pack, table = made(1, None)
    found = evaluate(pack, pack.values, table, "regression", most)
    for trial in range(2):
        errors = [row[0] - y for row, y in zip(scores(pack, table, trial), table.y.tolist(), strict=True)]
        assert float(found["mae"][trial]) == pytest.approx(sum(map(abs, errors)) / 11)
        assert float(found["loss"][trial]) == pytest.approx(sum(e * e / 2 for e in errors) / 11)


def test_other_weights_are_tried_and_put_back() -> None:
    pack, table = made(3, 3)
    other, before = torch.zeros_like(pack.values), pack.values.clone()
    found = evaluate(pack, other, table, "classification", 4)
    assert found["loss"].tolist() == pytest.approx([math.log(3)] * 2)
    assert torch.equal(pack.values, before)


def test_an_empty_table_has_no_metrics() -> None:
    pack, _ = made(3, 3)
    empty = Table.load(np.zeros((0, 3)), np.zeros(0, dtype=np.int64), False, PLACE.device, PLACE.dtype)
    assert evaluate(pack, pack.values, empty, "classification", 4) == {}


def test_one_output_tells_two_classes_apart_and_folds_count_their_own_rows() -> None:
    pack, table = made(1, 2)
    held = torch.arange(22).view(11, 2) % 11 < 2
    held[7, 1] = True  # trial 1 has one row fewer
    found = evaluate(
        pack, pack.values, table.with_folds(held), "classification", 4, lambda outputs, labels: outputs.squeeze(-1)
    )
    for trial in range(2):
        own = [row for row in range(11) if not held[row, trial]]
        values = scores(pack, table, trial)
        right = sum((values[row][0] > 0) == bool(table.y[row]) for row in own)
        assert float(found["accuracy"][trial]) == pytest.approx(right / len(own))
        assert float(found["loss"][trial]) == pytest.approx(sum(values[row][0] for row in own) / len(own))
