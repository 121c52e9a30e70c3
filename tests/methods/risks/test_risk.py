"""Any model by forward passes: the same sums as the closed form where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine import models
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import ConvexModel, MlpModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.risks.problem import loss_of, output_loss, rows_of
from dpsgd_cli.methods.risks.risk import LinearRisk, PackRisk

PLACE = Placement(torch.device("cpu"), torch.float64)


def table(folds: bool) -> Table:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(21, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(21, generator=generator) > 0.4).long()
    made = Table.load(x.numpy(), y.numpy(), False, PLACE.device, PLACE.dtype)
    return made.with_folds(torch.from_numpy(Keys.of_places([21]).folds(2, 1, seed=0))) if folds else made


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("loss", ["logistic", "hinge", "huber-svm"])
def test_it_agrees_with_the_closed_form_of_a_linear_model(folds: bool, loss: str) -> None:
    model = ConvexModel.model_validate({"loss": loss})
    pack = Pack(models.builder(model, (3,), 1, Path()), [0, 1], PLACE, trusted=True)
    pack.values.normal_(generator=torch.Generator().manual_seed(1))
    rows = table(folds)
    slow, fast = PackRisk(pack, rows, output_loss(model), 8), LinearRisk(rows_of(model, rows), loss_of(model))
    slow.start(pack.values)
    fast.start(pack.values.clone())
    norms = torch.tensor([0.4, 5.0], dtype=torch.float64)
    spacing = torch.tensor([0.3, 0.9], dtype=torch.float64)
    assert torch.allclose(slow.gradient_sums(norms), fast.gradient_sums(norms))
    direction = torch.randn(2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for risk in (slow, fast):
        risk.aim(direction)
    one = torch.tensor([1])
    for active in (None, one):
        assert torch.allclose(slow.line_losses(spacing, 4, norms, active), fast.line_losses(spacing, 4, norms, active))
    before = pack.values.clone()
    slow.advance(spacing)
    fast.advance(spacing)
    assert torch.allclose(slow.values, fast.values)
    assert not torch.equal(before, pack.values)


def test_it_follows_a_network_along_a_line() -> None:
    model = MlpModel(hidden=[4], activation="tanh")
    pack = Pack(models.builder(model, (3,), 2, Path()), [0, 1], PLACE, trusted=True)
    rows, start = table(False), pack.values.clone()
    risk = PackRisk(pack, rows, cross_entropy, 100)
    risk.start(pack.values)
    direction = risk.gradient_sums(torch.full((2,), 1.0, dtype=torch.float64))
    risk.aim(direction)
    losses = risk.line_losses(torch.full((2,), 0.01), 3, torch.full((2,), 50.0, dtype=torch.float64))
    assert torch.equal(pack.values, start)
    for i in range(3):
        pack.values.copy_(start - 0.01 * i * direction)
        every = cross_entropy(pack(rows.x[None]), rows.y.expand(2, -1)).sum(dim=1)
        assert torch.allclose(losses[:, i], every)
    assert bool((losses.diff(dim=1) < 0).all())
