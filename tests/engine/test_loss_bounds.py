"""The registry of convex losses: each stated bound against a dense grid of the loss itself, and what fails closed."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch

from dpsgd_cli.engine.loss_bounds import LOSSES, Loss, Region
from dpsgd_cli.engine.losses import MarginLoss, margin_loss

WIDTHS = (0.05, 0.5, 2.0)
REACHES = (0.25, 3.0, 40.0)
LEVEL = 0.8
FAR = 1e4
"""What stands for all numbers: beyond it every loss here is a line or a parabola, or flat."""
NEARLY = 0.98
EVERY = [(name, width) for name in LOSSES for width in WIDTHS]


def grid(reach: float) -> torch.Tensor:
    """Numbers of [-reach, reach]: even ones, and dense ones where losses bend."""
    even, near = torch.linspace(-reach, reach, 200_001, dtype=torch.float64), torch.linspace(-8, 8, 160_001).double()
    return torch.cat([even, near[near.abs() <= reach]]).sort().values


def steepest(loss: MarginLoss, t: torch.Tensor) -> tuple[float, float]:
    """The largest |phi'| and phi'' by differences of values, which know neither `slope` nor `curvature`."""
    step = 1e-4
    below, here, above = loss.value(t - step), loss.value(t), loss.value(t + step)
    slope = ((above - below) / (2 * step)).abs().max()
    curvature = ((above - 2 * here + below) / step**2).max()
    return float(slope), float(curvature)


def test_every_name_has_a_record_and_every_record_a_name() -> None:
    assert set(get_args(Loss)) == set(LOSSES)
    for name in LOSSES:
        assert isinstance(margin_loss(name), MarginLoss)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize(("name", "width"), EVERY)
def test_no_slope_or_curvature_passes_its_bound_in_a_ball(name: Loss, width: float, reach: float) -> None:
    loss, t = margin_loss(name, width, LEVEL), grid(reach)
    slope, curvature = LOSSES[name].bounds(Region(reach, width, LEVEL))
    seen_slope, seen_curvature = steepest(loss, t)
    assert max(seen_slope, float(loss.slope(t).abs().max())) <= slope * (1 + 1e-6) + 1e-4
    if LOSSES[name].curvature is not None:
        assert seen_curvature <= curvature * (1 + 1e-3) + 1e-4
        assert float(loss.curvature(t).max()) <= curvature * (1 + 1e-9)


@pytest.mark.parametrize(("name", "width"), EVERY)
def test_each_bound_is_nearly_reached_so_no_statement_is_vague(name: Loss, width: float) -> None:
    reach = 40.0
    slope, curvature = LOSSES[name].bounds(Region(reach, width, LEVEL))
    seen_slope, seen_curvature = steepest(margin_loss(name, width, LEVEL), grid(reach))
    assert seen_slope >= NEARLY * slope
    assert LOSSES[name].curvature is None or seen_curvature >= NEARLY * curvature


@pytest.mark.parametrize(("name", "width"), EVERY)
def test_without_a_ball_a_bound_holds_everywhere_or_is_infinite(name: Loss, width: float) -> None:
    """Slopes of convex losses are largest at the ends, and keep growing where no bound holds."""
    slope, _ = LOSSES[name].bounds(Region(math.inf, width, LEVEL))
    ends = margin_loss(name, width, LEVEL).slope(torch.tensor([-FAR, FAR], dtype=torch.float64)).abs().max()
    assert float(ends) <= slope
    assert (slope == math.inf) == (float(ends) > FAR / 2)


@pytest.mark.parametrize(("name", "width"), EVERY)
def test_a_loss_is_smooth_just_where_its_record_says_so(name: Loss, width: float) -> None:
    """Across a kink a slope jumps by as much however short the step; elsewhere by no more than curvature times step."""
    loss, step = margin_loss(name, width, LEVEL), 1e-6
    t = torch.arange(-4.0, 4.0, step, dtype=torch.float64)
    jump = float(loss.slope(t).diff().abs().max())
    if LOSSES[name].curvature is None:
        assert jump > 0.1
        with pytest.raises(ValueError, match="second derivative"):
            loss.curvature(t)
    else:
        assert jump <= LOSSES[name].bounds(Region(5.0, width, LEVEL))[1] * step * (1 + 1e-3)


@pytest.mark.parametrize(("name", "width"), EVERY)
def test_a_loss_is_convex_never_negative_and_a_number_wherever_a_line_search_looks(name: Loss, width: float) -> None:
    """Noisy-min takes sums of losses that a record can only raise; candidates lie as far as 2e31 away."""
    loss, t = margin_loss(name, width, LEVEL), grid(40.0)
    assert bool((loss.slope(t).diff() >= -1e-12).all())
    everywhere = torch.cat([t.float(), torch.tensor([-2e31, -1e30, 1e30, 2e31])])
    values = loss.value(everywhere)
    assert not bool(values.isnan().any())
    assert bool((values >= 0).all())
    # a decreasing function of the margin: who is right by more never loses more
    assert LOSSES[name].residual or bool((loss.slope(t) <= 0).all())


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_loss_whose_minimiser_is_the_log_odds_states_probabilities(name: Loss) -> None:
    """The output that minimises the mean loss of a group with a share p of positives is log(p / (1 - p))."""
    for share in (0.2, 0.7):
        t = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
        loss = margin_loss(name)
        best = float(t[(share * loss.value(t) + (1 - share) * loss.value(-t)).argmin()])
        right = abs(best - math.log(share / (1 - share))) < 1e-3
        assert right == LOSSES[name].probabilities


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_a_bound_that_is_no_bound_is_refused(wrong: float) -> None:
    kind = dataclasses.replace(LOSSES["logistic"], slope=lambda region: wrong)
    with pytest.raises(ValueError, match="at least 0"):
        kind.bounds(Region(1.0, 0.5, LEVEL))
