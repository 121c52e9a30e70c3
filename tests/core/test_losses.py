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
