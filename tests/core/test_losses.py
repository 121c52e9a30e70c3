"""Losses of single examples against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from dpsgd_cli.core.losses import LOSSES, cross_entropy, squared_error


def test_cross_entropy() -> None:
    outputs = torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], [[-1.0, 3.0, 0.5], [9.0, 1.0, 1.0]]]).double()
    labels = torch.tensor([[2, 0], [1, 2]])
    found = cross_entropy(outputs, labels)
    for trial in range(2):
        for row in range(2):
            scores = outputs[trial, row].tolist()
            wanted = math.log(sum(math.exp(score) for score in scores)) - scores[labels[trial, row]]
            assert float(found[trial, row]) == pytest.approx(wanted)


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
