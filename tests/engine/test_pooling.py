from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.pooling import MaxPool, vectorised


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (3, 2, 5, 4), (2, 3, 2, 9)])
def test_outputs_and_gradients_are_those_of_pytorch_with_ties(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, shape, generator=generator).double().requires_grad_()
    wanted = F.max_pool2d(x, 2, 1)
    d = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    found = MaxPool()(x)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found, x, d)[0], torch.autograd.grad(wanted, x, d)[0])


def test_what_is_undefined_in_one_example_stays_there() -> None:
    x = torch.zeros(3, 1, 3, 3)
    x[1] = float("nan")
    x.requires_grad_()
    y = MaxPool()(x)
    assert torch.isfinite(y[[0, 2]]).all()
    assert torch.isnan(y[1]).all()
    d = torch.ones_like(y)
    d[1] = float("inf")
    (found,) = torch.autograd.grad(y, x, d)
    assert torch.isfinite(found[[0, 2]]).all()
    assert found[[0, 2]].flatten(1).sum(dim=1).tolist() == [4.0, 4.0]
    assert not torch.isfinite(found[1]).all()


def test_only_two_by_two_windows_at_every_position_are_replaced() -> None:
    assert vectorised(nn.MaxPool2d(2, 1)) is not None
    others = [
        nn.MaxPool2d(2), nn.MaxPool2d(3, 1), nn.MaxPool2d(2, 1, padding=1), nn.MaxPool2d(2, 1, dilation=2),
        nn.MaxPool2d(2, 1, return_indices=True), nn.MaxPool2d((2, 3), 1), nn.AvgPool2d(2, 1),
    ]  # fmt: skip
    assert [vectorised(module) for module in others] == [None] * len(others)


def test_a_pack_pools_with_it() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))

    pack = Pack(build, [0, 1], Placement(torch.device("cpu")))
    assert any(isinstance(module, MaxPool) for module in pack.template.modules())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        alone = build()
    x = torch.randn(2, 5, 1, 6, 6)
    torch.testing.assert_close(pack(x)[1], alone(x[1]))
