"""Losses: of a network's outputs, by name (`model.loss`), and of one number t, for convex models.

A loss of outputs maps outputs (R, B, ..., K) and labels to one number per example, (R, B). Regularisation reads no data
and is part of the update.

Guarantee: the number of an example depends on that example's outputs and labels alone. In particular, the mean over a
sequence is divided by the number of places of that sequence that count, never by a number of the batch. Then one
record moves a clipped sum by at most the clip norm, whatever the loss is: no bound on its slope is needed. The price of
a training is the same for every loss. A loss of the user's own is called with one example at a time
(`torch.func.vmap`), so it has no other example to look at. Before training it is called several times on the same
examples, and a tensor that it keeps between calls is found (`Kept`).

A loss of one number is of the signed margin t = y w.x of a classifier, or of the residual t = w.x - y of a regression.
Labels become signs -1 and +1, so every classification loss is a decreasing function of t. Each is non-negative and
convex. Bounds on their derivatives are in `engine/loss_bounds.py`, which prices read without torch.

To add a loss of outputs: its name and tasks in `engine/settings.py`, and its record in `OUTPUT_LOSSES`. `tests/engine/
test_output_losses.py` tries each for what the guarantee says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.common.plugins import load_attribute, named
from dpsgd_cli.engine import loss_bounds
from dpsgd_cli.engine.apart import Kept
from dpsgd_cli.engine.settings import LossName, LossSettings, PythonLoss
from dpsgd_cli.errors import ModelError

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood (R, B) of class labels, int64 (R, B), under outputs (logits) (R, B, K)."""
    flat = F.cross_entropy(outputs.flatten(0, 1), labels.reshape(-1), reduction="none")
    return flat.view(outputs.shape[:2])


def squared_error(outputs: Tensor, targets: Tensor, options: LossOptions | None = None) -> Tensor:
    """Return half the squared error (R, B) of outputs (R, B, 1) and targets (R, B)."""
    del options
    return (outputs.squeeze(-1) - targets).square() / 2


def weighted(loss: Loss, weights: Sequence[float]) -> Loss:
    """Return a loss of class labels, each record's times the weight of its class.

    Weights are public numbers, and clipping follows: a record's gradient, whatever its weight, is clipped to the same
    norm. So sensitivities and prices stay the same.
    """

    def of_outputs(outputs: Tensor, labels: Tensor) -> Tensor:
        own = outputs.new_tensor(weights)
        return loss(outputs, labels) * own[labels.long() if len(weights) > 2 else (labels > 0).long()]

    return of_outputs


def of_arrays(loss: Loss) -> bool:
    """Return True if the label of one example is an array (`LossOf`)."""
    return bool(getattr(loss, "of_arrays", False))


LOSSES: dict[str, Loss] = {"classification": cross_entropy, "regression": squared_error}


@dataclass(frozen=True)
class LossOptions:
    """Settings of a loss.

    `weights`: public weights of the classes. `low`, `high`: bounds of the target; they become -1 and 1.
    `smoothing`, `ignored` and `width` are `smoothing`, `ignore_index` and `width` of the recipe.
    """

    smoothing: float = 0.0
    ignored: int | None = None
    width: float = 0.5
    weights: Sequence[float] | None = None
    low: float = -1.0
    high: float = 1.0


@dataclass(frozen=True, kw_only=True)
class OutputLoss:
    """One loss. No field has a default. `of`: the function. `apart`: why a number depends on its own example alone."""

    of: Callable[[Tensor, Tensor, LossOptions], Tensor]
    apart: str


def counted(labels: Tensor, ignored: int | None = None) -> Tensor:
    """Return the mask of places whose label counts: at least 0, and not the one that the recipe ignores."""
    return labels >= 0 if ignored is None else (labels >= 0) & (labels != ignored)


def mean_of_example(losses: Tensor, counts: Tensor) -> Tensor:
    """Return the mean (R, B) of an example's losses (R, B, ...) over its own places that count; 0 if none does."""
    own = torch.where(counts, losses, 0.0).flatten(2).sum(dim=2)
    return own / counts.flatten(2).sum(dim=2).clamp_min(1)


def cross_entropies(outputs: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Return the mean cross-entropy (R, B) over places that count, of labels (R, B, ...) and logits (R, B, ..., K)."""
    if labels.dim() == 2 and not options.smoothing and options.weights is None and options.ignored is None:
        return cross_entropy(outputs, labels)
    counts = counted(labels, options.ignored)
    logs = outputs.log_softmax(dim=-1)
    known = labels.clamp_min(0)
    own = -logs.gather(-1, known.unsqueeze(-1)).squeeze(-1)
    if options.smoothing:
        own = (1 - options.smoothing) * own - options.smoothing * logs.mean(dim=-1)
    if options.weights is not None:
        own = own * outputs.new_tensor(options.weights)[known]
    if labels.dim() == 2:
        return torch.where(counts, own, 0.0)
    return mean_of_example(own, counts)


def binary(outputs: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """Return the mean over K labels of 0 or 1 (R, B, K) of the cross-entropy under log odds (R, B, K)."""
    truth = labels.clamp_min(0).to(outputs.dtype)
    truth = truth * (1 - options.smoothing) + options.smoothing / 2
    own = F.binary_cross_entropy_with_logits(outputs, truth, reduction="none")
    return mean_of_example(own, counted(labels))


def huber(outputs: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Return the Huber loss (R, B): a parabola of half-width `options.width` with straight sides."""
    size = (outputs.squeeze(-1) - targets).abs()
    near = size.clamp(max=options.width)
    return near * (size - near / 2)


def poisson(outputs: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Return the Poisson deviance's part that depends on the outputs: mu - y log mu (R, B), in the target's own unit.

    Outputs and targets are counts scaled from [low, high] to [-1, 1], as all targets are; mu is the output's count, at
    least a millionth of the range. The gradient of a smaller one is that at the edge.
    """
    least, most = outputs.new_tensor(options.low), outputs.new_tensor(options.high)
    half = (most - least) / 2
    low = 2e-6 * half
    told = (outputs.squeeze(-1) + 1) * half + least
    truth = targets * half + half + least
    mu = torch.maximum(told, low)
    beyond = (1 - truth / low) * (told - mu)  # straight below the edge, so that the loss stays convex
    return mu - truth * mu.log() + beyond


_OWN = "every operation is along axes of one example"
OUTPUT_LOSSES: dict[LossName, OutputLoss] = {
    "cross-entropy": OutputLoss(
        of=cross_entropies,
        apart=f"{_OWN}, and the mean over places is divided by the example's own number of them",
    ),
    "next-token": OutputLoss(
        of=cross_entropies,
        apart=f"{_OWN}, and the mean over places is divided by the example's own number of them",
    ),
    "bce": OutputLoss(
        of=binary,
        apart=f"{_OWN}, and the mean over labels is divided by the example's own number of them",
    ),
    "squared": OutputLoss(of=squared_error, apart=_OWN),
    "huber": OutputLoss(of=huber, apart=_OWN),
    "poisson": OutputLoss(of=poisson, apart=_OWN),
}
USUAL: dict[str, LossName] = {
    "classification": "cross-entropy",
    "regression": "squared",
    "token-classification": "cross-entropy",
    "multi-label": "bce",
    "next-token": "next-token",
}
"""The loss of each task where a recipe names none."""


@dataclass(frozen=True)
class LossOf:
    """A loss as a training calls it: outputs (R, B, ..., K) and labels (R, B, ...) to (R, B).

    `of_arrays`: the label of one example is an array. `clamps`: targets are clamped to [-1, 1], their public bounds.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    of_arrays: bool
    clamps: bool = False

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.function(outputs, labels.clamp(-1, 1) if self.clamps else labels)


def made(
    settings: LossSettings | None, task: str, options: LossOptions, of_arrays: bool, clamps: bool, base: Path
) -> LossOf:
    """Return the loss that a recipe names, or the usual one of its task.

    Args:
        of_arrays: the label of one example is an array.
        base: folder that a Python file's name is relative to.

    Raises:
        ModelError: a function of the user's own mixes examples, or keeps something between calls.
    """
    if isinstance(settings, PythonLoss):
        own = load_attribute(base / settings.python, settings.function)
        return LossOf(one_by_one(own, settings.python), of_arrays, clamps)
    kind: LossName = USUAL[task] if settings is None else settings if isinstance(settings, str) else settings.kind
    of = OUTPUT_LOSSES[kind].of
    return LossOf(lambda outputs, labels: of(outputs, labels, options), of_arrays, clamps)


def one_by_one(function: Any, file: str) -> Loss:
    """Return a loss that calls `function(outputs, label)` for each example alone, and expects one number of it.

    `outputs` is (..., K) and `label` is a tensor (...) of one example. Raises ModelError for any other result, and for
    a function that asks for numbers of its input in Python.
    """
    if not callable(function):
        raise ModelError(f"model.loss.python: {file} holds no function of that name")

    def one(outputs: Tensor, label: Tensor) -> Tensor:
        found = function(outputs, label)
        if not isinstance(found, Tensor) or found.dim() != 0:
            told = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
            raise ModelError(
                f"model.loss.python: {file} gives {told} for one example; return one number, say errors.mean()"
            )
        return found

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        try:
            flat = torch.func.vmap(one, randomness="error")(outputs.flatten(0, 1), labels.flatten(0, 1))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ModelError(
                f"model.loss.python: {file} cannot be computed for one example alone, given outputs"
                f" {tuple(outputs.shape[2:])} and a label {tuple(labels.shape[2:])}: {str(error).splitlines()[0]}"
            ) from error
        found: Tensor = flat.view(outputs.shape[:2])
        return found

    return loss


def check_apart(loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Try a loss for mixing, as a model is tried: on synthetic outputs (R, B, ..., K) and labels (R, B, ...), B > 1.

    Each example's number must be the same alone and with others, its gradient zero in all other rows, and two equal
    calls must agree, and the function keeps nothing. Raises ModelError otherwise.
    """
    with torch.enable_grad():
        given = outputs.detach().clone().requires_grad_()
        kept = Kept()
        with kept:
            first = loss(given, labels)
        kept.refuse_kept()
        if first.shape != outputs.shape[:2]:
            raise ModelError(f"model.loss gives numbers of shape {tuple(first.shape)}; one an example is needed")
        again = loss(outputs.flip(1), labels.flip(1)).flip(1)
        alone = torch.cat([loss(outputs[:, [row]], labels[:, [row]]) for row in range(outputs.shape[1])], dim=1)
        twice = loss(outputs, labels)
        if not first.requires_grad:
            raise ModelError("model.loss does not depend on the model's outputs")
        for row in range(outputs.shape[1]):
            (slopes,) = torch.autograd.grad(first[:, row].sum(), given, retain_graph=True)
            slopes[:, row] = 0
            if bool((slopes != 0).any()):
                raise _mixed("the loss of one example has a gradient in the outputs of another")
    for other, how in ((again, "in another order"), (alone, "alone"), (twice, "in a second call")):
        if not torch.allclose(first, other, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise _mixed(f"the loss of an example is another one {how}")


def _mixed(how: str) -> ModelError:
    return ModelError(
        f"model.loss: {how}, so no record's influence can be bounded; compute it from one example, and keep nothing"
    )


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


def margin_loss(name: loss_bounds.Loss, huber_width: float = 0.5, quantile: float = 0.5) -> MarginLoss:
    """Return the loss called `name`."""
    loss: MarginLoss = named(loss_bounds.LOSSES[name].runs)(huber_width, quantile)
    return loss
