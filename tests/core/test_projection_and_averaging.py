from __future__ import annotations

import math

import torch

from dpsgd_cli.core.averaging import Ema, StartAverage, TailAverage, first_of_tail, make_average
from dpsgd_cli.core.projection import project_to_ball
from dpsgd_cli.recipe.schema.method import AllIterates, EmaSettings, TailIterates


def test_projection_gives_the_nearest_point_of_the_ball() -> None:
    values = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    radii = torch.tensor([[1.0], [1.0], [1.0], [math.inf]])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [30.0, 40.0]])
    assert torch.allclose(project_to_ball(values.clone(), radii), expected)


def test_a_tail_average_is_the_mean_of_the_last_iterates_of_each_trial() -> None:
    iterates = torch.arange(20, dtype=torch.float64).reshape(10, 2, 1) ** 2
    average = TailAverage(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[0.0], [6.0]], dtype=torch.float64))
    for step, values in enumerate(iterates):
        average.add(values, step)
        if step == 3:
            assert float(average.average[1]) == float(values[1])
    assert torch.allclose(average.average[0], iterates[:, 0].mean(dim=0))
    assert torch.allclose(average.average[1], iterates[6:, 1].mean(dim=0))


def test_the_lectures_average_what_steps_started_from() -> None:
    iterates = torch.arange(5.0).reshape(5, 1, 1) + 1
    average = StartAverage(torch.zeros(1, 1))
    for step, values in enumerate(iterates):
        average.add(values, step)
    assert average.average.item() == (0 + 1 + 2 + 3 + 4) / 5


def test_a_moving_average_weighs_iterates_as_defined() -> None:
    """Iterate s counts (1 - d_s) times the product of all later decays; the start, the product of all of them."""
    start, iterates = torch.full((2, 3), 5.0), torch.arange(240.0).sin().view(40, 2, 3)
    average = make_average(EmaSettings(decay=0.7), start, [40, 40])
    assert average is not None
    for step, values in enumerate(iterates):
        average.add(values, step)
    decays = [min(0.7, (1 + step) / (10 + step)) for step in range(40)]
    expected = start * math.prod(decays)
    for step, values in enumerate(iterates):
        expected = expected + (1 - decays[step]) * math.prod(decays[step + 1 :]) * values
    torch.testing.assert_close(average.average, expected)
    assert decays[0] == 0.1 and decays[-1] == 0.7


def test_averages_by_name() -> None:
    values = torch.zeros(2, 3)
    assert make_average(None, values, [4, 4]) is None
    assert isinstance(make_average(EmaSettings(), values, [4, 4]), Ema)
    every, tail = (
        make_average(AllIterates(), values, [4, 8]),
        make_average(TailIterates(), values, [4, 8]),
    )
    assert isinstance(every, StartAverage)
    assert isinstance(tail, TailAverage)
    assert tail.first.tolist() == [[2.0], [4.0]]
    assert first_of_tail(0.5, 1) == 0
