"""A convex loss that the package does not know: squared hinge, in the place of a name that it has.

Its slope is bounded in a ball only, by 1 + R B, and its curvature by 1. What it is priced as is compared with the
distance of plain descents on neighbouring tables, which know no bound at all.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.engine.loss_bounds import LOSSES, LossKind
from dpsgd_cli.engine.losses import MarginLoss
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.perturbation import moved_by_one, rate_of_descent
from dpsgd_cli.methods.risks.constants import constants_of
from tests.methods.small_problem import Silent, context, points, recipe, run, signed

RADIUS, BOUND, STEPS, RECORDS = 4.0, math.sqrt(5), 25, 60
MODEL = {"kind": "convex", "loss": "hinge", "radius": RADIUS, "l2": 0}
ONE = recipe({"kind": "output-perturbation", "steps": STEPS}, model=MODEL)


class SquaredHinge(MarginLoss):
    """max(0, 1 - t)^2 / 2."""

    def value(self, t: torch.Tensor) -> torch.Tensor:
        return (1 - t).clamp_min(0).square() / 2

    def slope(self, t: torch.Tensor) -> torch.Tensor:
        return -(1 - t).clamp_min(0)

    def curvature(self, t: torch.Tensor) -> torch.Tensor:
        return (t < 1).to(t.dtype)


KIND = LossKind(
    runs=f"{__name__}:SquaredHinge",
    residual=False,
    slope=lambda region: 1 + region.reach,
    curvature=lambda region: 1.0,
    probabilities=False,
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "hinge", KIND)


def descent(z: np.ndarray, rate: float) -> np.ndarray:
    """Plain projected descent on sum / RECORDS, without a bound on any gradient."""
    w = np.zeros(z.shape[1])
    for _ in range(STEPS):
        w = w + rate * (np.maximum(0, 1 - z @ w)[:, None] * z).sum(axis=0) / RECORDS
        w = w * min(1.0, RADIUS / max(float(np.linalg.norm(w)), 1e-300))
    return w


def farthest(rate: float) -> float:
    """How far one record moves plain descent: the most over random tables, and short rows of one direction that drive
    weights to where a long row against them has a steep loss."""
    longest, worst = np.ones(5), 0.0
    for seed in range(20):
        x, y = points(RECORDS + 1, 4, seed)
        rows = np.hstack([x, np.ones((len(x), 1))]) * (2 * y - 1)[:, None]
        short = np.tile((seed + 1) / 20 * longest, (RECORDS, 1))
        for table, extra in ((rows[1:], rows[0]), (rows[1:], longest), (short, -longest)):
            worst = max(worst, float(np.linalg.norm(descent(np.vstack([table, extra]), rate) - descent(table, rate))))
    return worst


def test_it_cannot_be_added_without_its_bounds() -> None:
    with pytest.raises(TypeError, match=r"slope.*curvature"):
        LossKind(runs=KIND.runs, residual=False, probabilities=False)  # type: ignore[call-arg]


def test_it_is_priced_by_its_own_bounds_and_trains_unclipped(added: None) -> None:
    known = constants_of(ConvexModel(**MODEL), BOUND)
    assert known.lipschitz == pytest.approx((1 + RADIUS * BOUND) * BOUND)
    assert known.smoothness == pytest.approx(BOUND**2)
    method = create(context(ONE, streams=[Silent(0)]))
    run(method)
    plain = descent(signed(ONE), rate_of_descent(known, RECORDS))
    assert np.allclose(method.output[0].numpy(), plain, atol=1e-12)
    (entry,) = method.context.ledgers[0].entries
    assert isinstance(entry.release.mechanism, GaussianSum)
    stated = entry.release.mechanism.sensitivity
    assert stated == pytest.approx(moved_by_one(known, RECORDS, STEPS))
    assert 0.1 * stated < farthest(rate_of_descent(known, RECORDS)) <= stated


def test_the_same_loss_at_the_slope_of_others_would_be_priced_too_low(
    monkeypatch: pytest.MonkeyPatch, added: None
) -> None:
    """The control: what every name but `squared` was once taken for. One record moves plain descent further."""
    right = constants_of(ConvexModel(**MODEL), BOUND)
    monkeypatch.setitem(LOSSES, "hinge", dataclasses.replace(KIND, slope=lambda region: 1.0))
    wrong = constants_of(ConvexModel(**MODEL), BOUND)
    assert right.lipschitz > 9 * wrong.lipschitz
    assert farthest(rate_of_descent(right, RECORDS)) > moved_by_one(wrong, RECORDS, STEPS)


def test_no_ball_or_no_smoothness_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, added: None) -> None:
    free = recipe({"kind": "output-perturbation"}, model={**MODEL, "radius": None})
    with pytest.raises(PrivacyError, match=r"bounded gradients; give model\.radius"):
        context(free)
    monkeypatch.setitem(LOSSES, "hinge", dataclasses.replace(KIND, curvature=None))
    with pytest.raises(PrivacyError, match="needs a smooth loss"):
        context(ONE)


def test_objective_perturbation_refuses_a_slope_that_only_a_ball_bounds(added: None) -> None:
    with pytest.raises(PrivacyError, match="bounded gradients"):
        context(recipe({"kind": "objective-perturbation"}, model={**MODEL, "radius": None}))
