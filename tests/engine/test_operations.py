"""Every operation of torch on one example at a time: outputs and gradients are those of each example alone.

The samples are torch's own (`torch.testing._internal`); integer and boolean inputs differ between examples, too.
"""

from __future__ import annotations

import sys
import unittest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpsgd_cli.engine.apart import Passes
from dpsgd_cli.errors import ModelError

# torch's samples name a base class of tests that they do not need
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

MOST, LARGEST = 2, 20_000
WITH_MASKS = {"nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"}
"""Dropout does nothing in a pass that records nothing (`test_dropout.py`)."""


class Operation(nn.Module):
    """A sample of an operation as a model: all of its tensors are one row of numbers (1, F)."""

    def __init__(self, operation: Any, sample: Any) -> None:
        super().__init__()
        self.operation = operation
        self.leaves, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))

    def row(self, whole: bool) -> Tensor:
        """Another row (F,): real numbers a little larger; if `whole`, integers in another order."""
        return torch.cat([self._other(x.detach(), whole).double().flatten() for x in self.leaves if _is(x)])

    def _other(self, x: Tensor, whole: bool) -> Tensor:
        if x.is_floating_point():
            return x * (1 + 0.1 * torch.rand_like(x))
        return x.flatten().flip(0).view(x.shape) if whole else x

    def forward(self, x: Tensor) -> Tensor:
        parts, start = [], 0
        for leaf in self.leaves:
            part = leaf
            if _is(leaf):
                part = x[0, start : start + leaf.numel()].view(leaf.shape)
                start += leaf.numel()
                part = part != 0 if leaf.dtype == torch.bool else part.to(leaf.dtype)
            parts.append(part)
        first, args, options = tree_unflatten(parts, self.spec)
        found = tree_flatten(self.operation(first, *args, **options))[0]
        return torch.cat([y.flatten() for y in found if _is(y) and y.is_floating_point()])[None]


def _is(x: object) -> bool:
    return isinstance(x, Tensor)


def with_gradient(y: Tensor, x: Tensor) -> Tensor:
    """Outputs beside the gradient of a weighted sum of them."""
    weights = torch.arange(1, y.shape[1] + 1).to(y).cos()
    if not y.requires_grad:
        return torch.cat([y, torch.zeros_like(x)], 1)
    return torch.cat([y, torch.autograd.grad((y * weights).sum(), x)[0]], 1).detach()


def alone(model: Operation) -> tuple[Tensor, Tensor] | None:
    """Two rows (2, F) and what autograd finds for each alone; None if the operation takes no such rows."""
    for whole in (True, False):
        try:
            rows = torch.stack([model.row(False), model.row(whole)])
            each = [row[None].clone().requires_grad_() for row in rows]
            found = [(model(row), row) for row in each]
            if any(y.requires_grad for y, _ in found):
                return rows, torch.cat([with_gradient(y, row) for y, row in found])
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
    return None


def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    # which forbids all other tests of this process to set flags of cuDNN
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

    return [one for one in op_db if torch.float64 in one.dtypes and one.supports_autograd]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_operation_is_that_of_each_example_alone_or_refused() -> None:
    """Select_scatter is right in its outputs and wrong in its gradients under vmap; so it is refused by name."""
    torch.manual_seed(0)
    compared, wrong, refused = 0, set(), set()
    for one in database():
        for sample, _ in zip(one.sample_inputs_func(one, "cpu", torch.float64, True), range(MOST), strict=False):
            model = Operation(one.op, sample)
            tensors = [x for x in model.leaves if _is(x)]
            odd = any(x.layout != torch.strided or x.is_complex() or x.dtype == torch.float32 for x in tensors)
            found = None if odd or sum(x.numel() for x in tensors) > LARGEST else alone(model)
            if found is None or one.name in WITH_MASKS or sample.kwargs.get("dropout_p"):
                continue
            rows, true = found[0].requires_grad_(), found[1]
            try:
                passes = Passes()
                y = passes.run(model, rows)
                if passes.masks.drew:
                    continue  # its own numbers are random, too
                compared += 1
                if not torch.allclose(with_gradient(y, rows), true, 1e-6, 1e-9, equal_nan=True):
                    wrong.add(one.formatted_name)
            except (ModelError, RuntimeError):
                refused.add(one.formatted_name)
    assert not wrong
    assert compared > 800 and "select_scatter" in refused and len(refused) < 40


@pytest.mark.parametrize("name", ["select_scatter", "nn_functional_linear_cross_entropy_chunked"])
def test_operations_with_a_wrong_gradient_are_refused_by_name(name: str) -> None:
    one = next(one for one in database() if one.formatted_name == name)
    sample = next(one.sample_inputs_func(one, "cpu", torch.float64, True))
    model = Operation(one.op, sample)
    with pytest.raises(ModelError, match=r"has no gradient of one example; write"):
        Passes().run(model, model.row(False)[None])
