"""Users with several rows: what each adds to a clipped sum, against one user and one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.users.run import UnitTable

SHAPE, OUTPUTS = (2, 3, 3), 3
ROWS: list[list[int]] = [[4, 0, 7], [1], [2, 6], [3, 5, 8], [9]]
"""Of five users; nobody has row 10."""
MOST = 3


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(18, OUTPUTS))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))


def conv() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, OUTPUTS)]
    return nn.Sequential(*layers)


class Scaled(nn.Module):
    """A layer that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.sin()


def other() -> nn.Module:
    return nn.Sequential(Scaled(), nn.Flatten(), nn.Linear(18, OUTPUTS))


MODELS = {build.__name__: build for build in (dense, mlp, conv, other)}


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(OUTPUTS, (11,), generator=generator)


def table(x: Tensor | None = None, listed: Sequence[Sequence[int]] = ROWS) -> UnitTable:
    own, y = rows()
    members = torch.tensor([[*user, *[-1] * (MOST - len(user))] for user in listed])
    return UnitTable.of(Table(own if x is None else x, y, False), members)


def pack_of(build: Any, seeds: Sequence[int] = (0, 1)) -> Pack:
    pack = Pack(build, seeds, Placement(torch.device("cpu"), torch.float64))
    pack.sums.zero_()
    return pack


def gradient(pack: Pack, trial: int, user: Sequence[int], x: Tensor) -> list[Tensor]:
    """The gradient by each parameter of the mean loss over a user's rows, by autograd on one model."""
    _, y = rows()
    values = {name: pack.values[trial, at : at + shape.numel()].view(shape) for name, (at, shape) in pack.spans.items()}
    asked = {name: value.clone().requires_grad_() for name, value in values.items()}
    outputs = torch.func.functional_call(MODEL_OF[id(pack)], asked, (x[list(user)],))
    loss = nn.functional.cross_entropy(outputs, y[list(user)])
    return list(torch.autograd.grad(loss, list(asked.values())))


MODEL_OF: dict[int, nn.Module] = {}


def truth(pack: Pack, trial: int, users: Sequence[Sequence[int]], bounds: Sequence[float], x: Tensor) -> Tensor:
    """User by user: the mean gradient, clipped once (or layer by layer), and added up."""
    total = torch.zeros(pack.size, dtype=torch.float64)
    names = list(pack.spans)
    for user in users:
        parts = gradient(pack, trial, user, x)
        if len(bounds) == 1:
            norm = torch.cat([part.flatten() for part in parts]).norm()
            parts = [part * min(1.0, bounds[0] / float(norm)) for part in parts]
        else:
            layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
            for layer, bound in zip(layers, bounds, strict=True):
                own = [i for i, name in enumerate(names) if name.rpartition(".")[0] == layer]
                norm = torch.cat([parts[i].flatten() for i in own]).norm()
                for i in own:
                    parts[i] = parts[i] * min(1.0, bound / float(norm))
        total += torch.cat([part.flatten() for part in parts])
    return total


def summed(pack: Pack, units: UnitTable, batch: Batch, most: int, norms: Sequence[float]) -> Tensor:
    bounds = torch.tensor([[norm] * pack.trials for norm in norms], dtype=torch.float64)
    seen = Diagnostics(pack.trials, torch.device("cpu"))
    for examples in units.chunks(batch, most):
        add_clipped_sums(pack, examples, cross_entropy, Clipping(bounds, len(norms) == 1), seen)
    found = pack.sums.clone()
    pack.sums.zero_()
    return found


@pytest.mark.parametrize("most", [5, 2])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "by layer"])
@pytest.mark.parametrize("name", MODELS)
def test_a_user_adds_the_clipped_mean_gradient_of_their_rows(name: str, flat: bool, most: int) -> None:
    pack = pack_of(MODELS[name])
    MODEL_OF[id(pack)] = MODELS[name]()
    x, _ = rows()
    norms = [0.6] if flat else [0.3] * len(pack.layers)
    found = summed(pack, table(), Batch(rows=None), most, norms)
    for trial in range(2):
        expected = truth(pack, trial, ROWS, norms, x)
        assert torch.allclose(found[trial], expected, atol=1e-10)
    # neither of the two was left as it is by chance
    assert not torch.allclose(found[0], truth(pack, 0, ROWS, [9.0] * len(norms), x), atol=1e-3)


def test_batches_and_folds_are_of_users() -> None:
    pack = pack_of(mlp)
    MODEL_OF[id(pack)] = mlp()
    x, _ = rows()
    batch = Batch(torch.tensor([[3, 0], [2, 4]]), torch.tensor([[True, True], [True, False]]))
    found = summed(pack, table(), batch, 8, [0.5])
    assert torch.allclose(found[0], truth(pack, 0, [ROWS[3], ROWS[0]], [0.5], x), atol=1e-10)
    assert torch.allclose(found[1], truth(pack, 1, [ROWS[2]], [0.5], x), atol=1e-10)
    held = torch.tensor([[True, False], [False, False], [False, True], [True, False], [False, True]])
    folds = table().with_folds(held, 4)
    assert isinstance(folds, UnitTable) and len(folds) == 4 and folds.counts.tolist() == [3.0, 3.0]
    for batch in (Batch(rows=None), Batch(torch.arange(4).expand(2, 4))):
        found = summed(pack, folds, batch, 8, [0.5])
        for trial in range(2):
            trained = [ROWS[u] for u in range(5) if not held[u, trial]]
            assert torch.allclose(found[trial], truth(pack, trial, trained, [0.5], x), atol=1e-10)
    single = folds.row_by_row()
    assert held is not None and single.held_out is not None
    assert [int(n) for n in (~single.held_out).sum(dim=0)] == [4, 7]


@pytest.mark.parametrize("name", MODELS)
def test_the_place_of_a_row_that_a_user_lacks_holds_nothing_of_anybody(name: str) -> None:
    """Row 0 stands first in the table: were it what fills places left over, a row of its owner that is no number
    would erase others, and their sums would move by many clip bounds."""
    pack = pack_of(MODELS[name], (0,))
    x, _ = rows()
    users = [[1], [2, 6], [9]]
    clean = summed(pack, table(x, users), Batch(rows=None), 5, [0.6])
    for value in (torch.inf, torch.nan, 1e200):
        spoiled = x.clone()
        spoiled[0] = value
        assert torch.equal(summed(pack, table(spoiled, users), Batch(rows=None), 5, [0.6]), clean)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e200])
def test_a_user_moves_the_sum_by_the_bound_at_most_whatever_their_rows(value: float) -> None:
    pack = pack_of(mlp, (0,))
    x, _ = rows()
    without = summed(pack, table(x, [*ROWS[1:]]), Batch(rows=None), 5, [0.6])
    for number in (1, 2, 3):
        changed = x.clone()
        changed[ROWS[0][:number]] = value
        found = summed(pack, table(changed), Batch(rows=None), 5, [0.6])
        assert float((found - without).norm()) <= 0.6 * (1 + 1e-9)


def test_targets_of_a_user_are_numbers_or_nobodys() -> None:
    x, _ = rows()
    y = torch.linspace(-1, 1, 11, dtype=torch.float64)
    units = UnitTable.of(Table(x, y, False), torch.tensor([[2, 6, -1], [9, -1, -1]]))
    labels = units.every(0, 2)[1]
    assert labels.shape == (1, 2, 3) and labels.isnan().tolist() == [[[False, False, True], [False, True, True]]]
