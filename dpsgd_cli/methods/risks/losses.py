"""Losses of one number t: the signed margin y w.x of a classifier, or the residual w.x - y of a regression.

Labels become signs -1 and +1, so every classification loss is a decreasing function of t. Each loss is non-negative
and convex. Bounds on their derivatives are in `engine/loss_bounds.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.common.plugins import named
from dpsgd_cli.engine.loss_bounds import LOSSES, Loss


class MarginLoss(ABC):
    """Loss phi(t) with its derivatives. `width` is `model.huber_width`, `level` `model.quantile`; most ignore them."""

    def __init__(self, width: float = 0.5, level: float = 0.5) -> None:
        self.width, self.level = width, level

    @abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """Return phi(t), elementwise."""

    @abstractmethod
    def slope(self, t: Tensor) -> Tensor:
        """Return phi'(t), elementwise; a subgradient where phi has a kink."""

    def curvature(self, t: Tensor) -> Tensor:
        """Return phi''(t), elementwise; raise ValueError for losses without a second derivative."""
        raise ValueError(f"loss {type(self).__name__} has no second derivative")


class Logistic(MarginLoss):
    """Logistic loss log(1 + e^-t)."""

    def value(self, t: Tensor) -> Tensor:
        return F.softplus(-t)

    def slope(self, t: Tensor) -> Tensor:
        return torch.sigmoid(-t).neg_()

    def curvature(self, t: Tensor) -> Tensor:
        half = torch.sigmoid(t)
        return half * (1 - half)


class Hinge(MarginLoss):
    """Hinge loss max(0, 1 - t); not smooth. The subgradient at t = 1 is 0."""

    def value(self, t: Tensor) -> Tensor:
        return (1 - t).clamp_min_(0)

    def slope(self, t: Tensor) -> Tensor:
        return (t < 1).to(t.dtype).neg_()


class HuberHinge(MarginLoss):
    """Hinge loss with its kink replaced by a parabola of half-width h = `width`.

    phi(t) = 0 for t > 1 + h, (1 + h - t)^2 / (4 h) for |1 - t| <= h, 1 - t for t < 1 - h.
    Source: Chaudhuri, Monteleoni and Sarwate 2011, equation 7.
    """

    def value(self, t: Tensor) -> Tensor:
        inside = (1 + self.width - t).clamp_(0, 2 * self.width)
        return inside.square() / (4 * self.width) + (1 - self.width - t).clamp_min_(0)

    def slope(self, t: Tensor) -> Tensor:
        return ((t - 1 - self.width) / (2 * self.width)).clamp_(-1, 0)

    def curvature(self, t: Tensor) -> Tensor:
        return ((1 - t).abs() <= self.width).to(t.dtype) / (2 * self.width)


class Squared(MarginLoss):
    """Squared loss t^2 / 2 of a residual."""

    def value(self, t: Tensor) -> Tensor:
        return t.square() / 2

    def slope(self, t: Tensor) -> Tensor:
        return t.clone()

    def curvature(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)


class Huber(MarginLoss):
    """Squared loss of a residual up to a size of h = `width`, and a line of slope h beyond: h (|t| - h / 2).

    Source: Huber 1964, "Robust estimation of a location parameter".
    """

    def value(self, t: Tensor) -> Tensor:
        inside = t.clamp(-self.width, self.width)
        return inside * (t - inside / 2)

    def slope(self, t: Tensor) -> Tensor:
        return t.clamp(-self.width, self.width)

    def curvature(self, t: Tensor) -> Tensor:
        return (t.abs() <= self.width).to(t.dtype)


class Quantile(MarginLoss):
    """Check loss of a residual t = w.x - y: (1 - q) t above 0 and -q t below, for q = `level`; not smooth.

    Its mean is least where a share q of the targets lies below w.x: for q = 1/2 it is half the absolute error. The
    subgradient at t = 0 is 0. Source: Koenker and Bassett 1978, "Regression quantiles".
    """

    def value(self, t: Tensor) -> Tensor:
        return (1 - self.level) * t.clamp_min(0) - self.level * t.clamp_max(0)

    def slope(self, t: Tensor) -> Tensor:
        return (1 - self.level) * (t > 0).to(t.dtype) - self.level * (t < 0).to(t.dtype)


def margin_loss(name: Loss, huber_width: float = 0.5, quantile: float = 0.5) -> MarginLoss:
    """Return the loss called `name`."""
    loss: MarginLoss = named(LOSSES[name].runs)(huber_width, quantile)
    return loss
