"""Gradients whose terms cancel: norms and sums are rounded differently, and the bound must hold all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.packing import Pack, Placement
from tests.engine.conftest import Build, Of


def repeated(layer: nn.Module) -> nn.Module:
    """One layer called on two halves of the input, whose outputs are subtracted: the gradients nearly cancel."""
    return Of(lambda m, x: m.layer(x.chunk(2, dim=1)[0]) - m.layer(x.chunk(2, dim=1)[1]), layer=layer)


def added_norm(build: Build, x: Tensor, change: Callable[[Pack], None] | None = None) -> float:
    """Norm of what one example `x` adds under the bound 1."""
    pack = Pack(build, [0], Placement(torch.device("cpu")))
    if change is not None:
        change(pack)
    rows = (x[None, None], torch.zeros(1, 1), None)
    clipping = Clipping(torch.ones(1, 1))
    add_clipped_sums(pack, rows, lambda y, _: y.flatten(2).sum(dim=2), clipping, Diagnostics(1, x.device))
    return float(pack.sums.double().norm())


def near(shape: tuple[int, ...], size: float, seed: int) -> Tensor:
    """Inputs of `size` whose halves along the first axis are equal but for rounding."""
    half = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return torch.cat([half, half * (1 + 1e-7)])


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: repeated(nn.Conv2d(4, 12, 3)), (4, 6, 6)),
        (lambda: repeated(nn.Conv1d(8, 16, 2, groups=2)), (8, 9)),
        (lambda: repeated(nn.Linear(8, 8)), (4, 8)),
        (lambda: repeated(WeightStandardisedConv2d(4, 8, 3)), (4, 6, 6)),
        (lambda: repeated(Of(lambda m, x: x + m.value, value=nn.Parameter(torch.rand(4, 8)))), (4, 8)),
    ],
    ids=["conv2d", "conv1d", "linear", "standardised", "own"],
)
def test_what_is_added_keeps_the_bound_where_terms_cancel(build: Build, shape: tuple[int, ...], size: float) -> None:
    for seed in range(5):
        assert added_norm(build, near(shape, size, seed)) <= 1 + 1e-4


@pytest.mark.parametrize("size", [1e15, 1e17, 3e17, 1e18, 1e20])
def test_squares_of_a_standardised_convolution_do_not_overflow_one_by_one(size: float) -> None:
    x = size * (1 + 0.01 * torch.randn(64, 3, 3, generator=torch.Generator().manual_seed(0)))
    assert added_norm(lambda: WeightStandardisedConv2d(64, 8, 3), x) <= 1 + 1e-4


@pytest.mark.parametrize(("gain", "weight"), [(1.0, 1e6), (1.0, 1e8), (1e-4, 10.0), (1e-6, 100.0)])
def test_large_weights_and_small_gains_of_a_standardised_convolution_keep_the_bound(gain: float, weight: float) -> None:
    """Inputs that are nearly constant: what the projection leaves is small beside what it takes away."""

    def change(pack: Pack) -> None:
        for name, factor in (("gain", gain), ("weight", weight)):
            offset, shape = pack.spans[name]
            pack.values[:, offset : offset + shape.numel()] *= factor

    r = torch.randn(64, 3, 12, generator=torch.Generator().manual_seed(0))
    for size in (1e2, 1e4, 1e6):
        for spread in (0, 1e-7, 1e-6, 1e-5, 1e-4):
            x = size * (1 + spread * r)
            assert added_norm(lambda: WeightStandardisedConv2d(64, 8, 3, 3), x, change) <= 1 + 1e-4


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("sizes", [(8, 16, 6), (4, 12, 6), (16, 64, 14)])
def test_positions_that_cancel_keep_the_bound(sizes: tuple[int, int, int], size: float) -> None:
    inputs, outputs, positions = sizes
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(inputs, positions, generator=generator, dtype=torch.float64)
        x[:, -1] = -x[:, :-1].sum(dim=1)
        x = (x * size).float()
        assert added_norm(lambda: nn.Conv1d(inputs, outputs, 1, bias=False), x) <= 1 + 1e-4
        assert added_norm(lambda: nn.Linear(inputs, outputs, bias=False), x.T.contiguous()) <= 1 + 1e-4
