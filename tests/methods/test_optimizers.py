"""Updates against torch's optimizers; averages and projections against their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.dp_sgd.optimizers import factors_of, make_average, make_update, project_to_ball
from dpsgd_cli.methods.dp_sgd.settings import (
    AdamSettings,
    AdamWSettings,
    AllIterates,
    Averaging,
    EmaSettings,
    Optimizer,
    ParameterGroup,
    SgdSettings,
    TailIterates,
)
from dpsgd_cli.schedules.learning_rate import WarmupRate, rate_at

CPU = torch.device("cpu")
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
    ("settings", "kind", "options"),
    [
        (SgdSettings(), torch.optim.SGD, {}),
        (SgdSettings(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
        (AdamSettings(), torch.optim.Adam, {}),
        (AdamSettings(betas=(0.5, 0.8), stability=0.1), torch.optim.Adam, {"betas": (0.5, 0.8), "eps": 0.1}),
        (AdamWSettings(decay=0.3), torch.optim.AdamW, {"weight_decay": 0.3}),
    ],
    ids=["sgd", "momentum", "adam", "adam with other settings", "adamw"],
)
def test_updates_are_those_of_torch(settings: Optimizer, kind: Any, options: dict[str, Any]) -> None:
    values = torch.arange(5).double().repeat(2, 1)
    update = make_update(settings, values)
    for step, gradient in enumerate(gradients()):
        before = gradient.clone()
        update.apply(values, gradient, RATES, step)
        assert torch.equal(gradient, before), "the gradient is left alone"
    torch.testing.assert_close(values, by_torch(kind, **options))


def test_groups_have_rates_and_decays_of_their_own() -> None:
    pack = Pack(lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), [0], Placement(CPU))
    groups = [ParameterGroup(names="*.bias", rate=0.5, decay=0.0), ParameterGroup(names="1.*", rate=0.0)]
    rates, decays = factors_of(groups, pack) or (torch.empty(0), torch.empty(0))
    of = {name: (float(rates[at]), float(decays[at])) for name, (at, _) in pack.spans.items()}
    assert of == {"0.weight": (1.0, 1.0), "0.bias": (0.5, 0.0), "1.weight": (0.0, 1.0), "1.bias": (0.5, 0.0)}
    with pytest.raises(RecipeError, match=r"1\.wieght fits no trained parameter; did you mean 1\.weight"):
        factors_of([ParameterGroup(names="1.wieght")], pack)


def test_a_rate_warms_up_and_falls_by_a_cosine_from_step_to_step() -> None:
    rate = WarmupRate(peak=2.0, warmup=0.25)
    found = [rate_at(rate, epoch, 8) for epoch in (0, 1, 2, 5, 8)]
    assert found == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_projection_gives_the_nearest_point_of_the_ball() -> None:
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    radii = torch.tensor([[1.0], [1.0], [1.0], [math.inf]])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    assert torch.allclose(project_to_ball(values.clone(), radii), expected)


def averaged(settings: Averaging, iterates: Tensor, start: Tensor, steps: Sequence[int]) -> list[Tensor]:
    """What the average is after each iterate; the weights themselves are left alone."""
    average, found, before = make_average(settings, start, steps), [], start.clone()
    assert average is not None
    for step, values in enumerate(iterates):
        average.add(values, step)
        found.append(average.average.clone())
    assert torch.equal(start, before)
    return found


def test_a_tail_average_is_the_mean_of_the_last_iterates_of_each_trial() -> None:
    """Half of 10 and of 8 steps; until they begin, the latest. Of one step, that one."""
    iterates = torch.arange(20, dtype=torch.float64).reshape(10, 2, 1) ** 2
    found = averaged(TailIterates(fraction=0.5), iterates, torch.zeros(2, 1, dtype=torch.float64), [10, 8])
    assert torch.equal(found[3], iterates[3])
    assert torch.allclose(found[-1][0], iterates[5:, 0].mean(dim=0))
    assert torch.allclose(found[-1][1], iterates[4:, 1].mean(dim=0))
    assert torch.equal(
        averaged(TailIterates(fraction=0.5), iterates[:1], torch.zeros(2, 1).double(), [1, 1])[0], iterates[0]
    )


def test_the_lectures_average_what_steps_started_from() -> None:
    found = averaged(AllIterates(), torch.arange(5.0).reshape(5, 1, 1) + 1, torch.zeros(1, 1), [5])
    assert found[-1].item() == (0 + 1 + 2 + 3 + 4) / 5


def test_a_moving_average_weighs_iterates_as_defined() -> None:
    """Iterate s counts (1 - d_s) times the product of all later decays; the start, the product of all of them."""
    start, iterates = torch.full((2, 3), 5.0), torch.arange(240.0).sin().view(40, 2, 3)
    found = averaged(EmaSettings(decay=0.7), iterates, start, [40, 40])
    decays = [min(0.7, (1 + step) / (10 + step)) for step in range(40)]
    expected = start * math.prod(decays)
    for step, values in enumerate(iterates):
        expected = expected + (1 - decays[step]) * math.prod(decays[step + 1 :]) * values
    torch.testing.assert_close(found[-1], expected)
    assert decays[0] == 0.1 and decays[-1] == 0.7


def test_no_average_is_the_last_iterate() -> None:
    assert make_average(None, torch.zeros(2, 3), [4, 4]) is None
