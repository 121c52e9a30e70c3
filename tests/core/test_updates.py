"""Updates against torch's optimizers, and weight averages against their definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpsgd_cli.core.updates import Ema, make_update
from dpsgd_cli.recipe.schema.method import AdamSettings, Optimizer, SgdSettings

RATES = torch.tensor([[0.1], [0.7]], dtype=torch.float64)


def gradients() -> Tensor:
    """(steps, R, P)."""
    return torch.randn(12, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_torch(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Tensor:
    """What torch makes of the same gradients, one trial at a time."""
    found = []
    for trial in range(2):
        weights = torch.nn.Parameter(torch.arange(5).double())
        optimizer = kind([weights], lr=float(RATES[trial]), **options)
        for gradient in gradients()[:, trial]:
            weights.grad = gradient.clone()
            optimizer.step()
        found.append(weights.detach())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (SgdSettings(), by_torch(torch.optim.SGD)),
        (SgdSettings(momentum=0.9), by_torch(torch.optim.SGD, momentum=0.9)),
        (AdamSettings(), by_torch(torch.optim.Adam)),
        (AdamSettings(betas=(0.5, 0.8), stability=0.1), by_torch(torch.optim.Adam, betas=(0.5, 0.8), eps=0.1)),
    ],
    ids=["sgd", "momentum", "adam", "adam with other settings"],
)
def test_updates_are_those_of_torch(settings: Optimizer, wanted: Tensor) -> None:
    values = torch.arange(5).double().repeat(2, 1)
    update = make_update(settings, values)
    for step, gradient in enumerate(gradients()):
        before = gradient.clone()
        update.apply(values, gradient, RATES, step)
        assert torch.equal(gradient, before), "the gradient is left alone"
    torch.testing.assert_close(values, wanted)


@pytest.mark.parametrize("settings", [SgdSettings(momentum=0.9), AdamSettings()])
def test_the_state_is_all_that_continuing_needs(settings: Optimizer) -> None:
    values = torch.arange(5).double().repeat(2, 1)
    update = make_update(settings, values)
    for step, gradient in enumerate(gradients()):
        if step == 6:
            continued = make_update(settings, values)
            for name, tensor in update.state.items():
                continued.state[name].copy_(tensor)
            update = continued
        update.apply(values, gradient, RATES, step)
    wanted = (
        by_torch(torch.optim.Adam) if isinstance(settings, AdamSettings) else by_torch(torch.optim.SGD, momentum=0.9)
    )
    torch.testing.assert_close(values, wanted)


def test_the_moving_average_is_its_definition() -> None:
    """a = d a + (1 - d) w with d = min(decay, (1 + t) / (10 + t)), from the initial weights on."""
    start, iterates = torch.ones(2, 5).double(), gradients()
    average = Ema(0.3, start)
    slow = [float(value) for value in start.flatten()]
    for step, values in enumerate(iterates):
        average.add(values, step)
        decay = min(0.3, (1 + step) / (10 + step))
        slow = [decay * a + (1 - decay) * float(w) for a, w in zip(slow, values.flatten(), strict=True)]
    assert average.average.flatten().tolist() == pytest.approx(slow)
    assert torch.equal(start, torch.ones(2, 5).double()), "the weights themselves are left alone"
