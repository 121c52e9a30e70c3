from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

from dpsgd_cli.engine.loss_bounds import LOSSES, Loss
from dpsgd_cli.engine.losses import Hinge, Huber, HuberHinge, MarginLoss, Quantile, margin_loss
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.methods.risks.constants import constants_of

GRID = torch.linspace(-6, 6, 4001, dtype=torch.float64)
EVERY = [margin_loss(name) for name in LOSSES] + [HuberHinge(0.1)]


@pytest.mark.parametrize("loss", EVERY, ids=lambda loss: type(loss).__name__)
def test_the_slope_is_the_derivative_and_the_loss_is_convex_and_not_negative(loss: MarginLoss) -> None:
    t = GRID.clone().requires_grad_()
    values = loss.value(t)
    (derivative,) = torch.autograd.grad(values.sum(), t)
    smooth = ((t.detach() - 1).abs() > 1e-3) & (t.detach().abs() > 1e-3)
    assert torch.allclose(loss.slope(GRID)[smooth], derivative[smooth])
    assert bool((values >= 0).all())
    assert bool((loss.slope(GRID).diff() >= -1e-12).all())


@pytest.mark.parametrize(
    "loss", [x for x in EVERY if not isinstance(x, Hinge | Quantile)], ids=lambda loss: type(loss).__name__
)
def test_the_curvature_is_the_derivative_of_the_slope(loss: MarginLoss) -> None:
    step = 1e-5
    numeric = (loss.slope(GRID + step) - loss.slope(GRID - step)) / (2 * step)
    near_a_kink = torch.zeros_like(GRID, dtype=torch.bool)
    if isinstance(loss, HuberHinge):
        near_a_kink = ((1 - GRID).abs() - loss.width).abs() < 2 * step
    if isinstance(loss, Huber):
        near_a_kink = (GRID.abs() - loss.width).abs() < 2 * step
    assert torch.allclose(loss.curvature(GRID)[~near_a_kink], numeric[~near_a_kink], atol=1e-6)


def test_the_hinge_has_no_curvature_to_give() -> None:
    with pytest.raises(ValueError, match="Hinge"):
        margin_loss("hinge").curvature(GRID)


@pytest.mark.parametrize("name", LOSSES)
def test_constants_are_the_bounds_of_the_record_times_those_of_the_features(name: Loss) -> None:
    """By hand, for features of norm 2 and no ball: L = sup|phi'| B, beta = sup(phi'') B^2."""
    known_bounds = {
        "logistic": (1, 0.25),
        "hinge": (1, inf),
        "huber-svm": (1, 1 / 0.6),
        "squared": (inf, 1),
        "huber": (0.3, 1),
        "quantile": (0.9, inf),
    }
    slope, curvature = known_bounds[name]
    known = constants_of(ConvexModel(loss=name, huber_width=0.3, quantile=0.1), feature_bound=2.0)
    assert (known.lipschitz, known.smoothness) == pytest.approx((2 * slope, 4 * curvature))


def test_the_squared_loss_is_lipschitz_on_a_ball_only() -> None:
    free = constants_of(ConvexModel(loss="squared"), feature_bound=2.0)
    held = constants_of(ConvexModel(loss="squared", radius=3.0, target_bound=0.5), feature_bound=2.0)
    assert free.lipschitz == float("inf")
    assert held.lipschitz == pytest.approx((3 * 2 + 0.5) * 2)
    assert held.smoothness == 4.0


@pytest.mark.parametrize("level", [0.1, 0.5, 0.8])
def test_the_least_mean_of_a_quantile_loss_is_at_the_quantile(level: float) -> None:
    """Of 1,000 skewed numbers: the quantile of NumPy."""
    y = torch.from_numpy(np.random.default_rng(0).lognormal(size=1001))
    at = torch.linspace(0, 6, 6001, dtype=torch.float64)
    means = margin_loss("quantile", quantile=level).value(at[:, None] - y).mean(dim=1)
    assert float(at[means.argmin()]) == pytest.approx(np.quantile(y.numpy(), level), abs=2e-3)


def test_huber_is_squared_near_0_and_a_line_far_away() -> None:
    t = torch.tensor([-3.0, -0.1, 0.0, 0.2, 5.0], dtype=torch.float64)
    assert margin_loss("huber", 0.2).value(t).tolist() == pytest.approx([0.58, 0.005, 0.0, 0.02, 0.98])
