"""Metrics with intervals from noisy counts of cells, as post-processing of one release (`price.py`).

Notation: x (cells,) are the counts of the held-out records; y = A x + noise was released; s is the standard deviation
of the noise. The linear estimate x^ = A^-1 y is unbiased, with noise covariance s^2 C, C = (A^T A)^-1. The projection
x+ minimises |A x - y| over x >= 0.

Sampling: held-out records come to their part by independent coins, so the counts are treated as independent Poisson
variables. For a ratio of sums this gives the same variance as records drawn from a population.

Intervals: a metric is a ratio t = N(x) / D(x). For the true t, N(x^) - t D(x^) has mean 0 and a variance that is a
quadratic function of t, so {t : (N - t D)^2 <= 1.96^2 V(t)} is a 95% interval (Fieller 1954). If the denominator cannot
be distinguished from 0, the interval is the metric's whole range: nothing can be said. Variances are estimated at x+.
Points are the metric of x+. An interval is centred on linear estimates, not on the point: x+ is biased if noise is
large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpsgd_cli.evaluation.strategy import BINS, ERRORS, LOSSES, RIGHT, SIDE, SLACK, SQUARES, Strategy

Z = 1.959963984540054
"""Two-sided 95% quantile of a normal law."""
LEAST_INFORMATION = 12.0
"""Below this many records over the variance of the noise only intervals are shown: noise exceeds the sampling error."""
_OF_PROBABILITIES = ("log_loss", "brier", "calibration")
GROUPS = (0.2, 0.4, 0.6, 0.8)
"""Probabilities between the five groups of the calibration gaps."""


@dataclass(frozen=True)
class Estimate:
    """A metric with a 95% interval; `value` is None if noise leaves no useful point."""

    value: float | None
    low: float
    high: float


@dataclass(frozen=True)
class Noised:
    """The noisy counts of the held-out records.

    `linear` and `projected` (cells,): x^ and x+. `covariance` (cells, cells): s^2 C. `deviation`: s.
    """

    linear: np.ndarray
    projected: np.ndarray
    covariance: np.ndarray
    deviation: float

    @classmethod
    def of(cls, released: np.ndarray, strategy: Strategy, deviation: float) -> Noised:
        """Return the counts behind a release (cells,), whose noise has standard deviation `deviation`."""
        from scipy.optimize import nnls  # takes .3 s to import

        projected, _ = nnls(strategy.matrix, released, maxiter=20 * len(released))
        return cls(strategy.inverse @ released, projected, strategy.covariance * deviation**2, deviation)

    @classmethod
    def restored(cls, linear: np.ndarray, strategy: Strategy, deviation: float) -> Noised:
        """Return the counts with estimates `linear` (cells,), for `sets.py`; they are not projected."""
        return cls(linear, linear, strategy.covariance * deviation**2, deviation)

    @property
    def records(self) -> float:
        """The estimated number of held-out records."""
        return float(self.linear.sum())

    @property
    def information(self) -> float:
        """Records over the variance of the noise; below `LEAST_INFORMATION` no points are shown."""
        return max(self.records, 0.0) / self.deviation**2

    def deviation_of(self, weights: np.ndarray) -> float:
        """Return the standard deviation of the noise in `weights` @ x^."""
        return math.sqrt(max(float(weights @ self.covariance @ weights), 0.0))

    def ratio(self, over: np.ndarray, under: np.ndarray, least: float, most: float) -> Estimate:
        """Return the estimate of `over` @ x / `under` @ x, with weights (cells,), a metric in [least, most]."""
        over, under = over.ravel(), under.ravel()
        noise = self.covariance

        def shared(a: np.ndarray, b: np.ndarray) -> float:
            return float((self.projected * a * b).sum() + a @ noise @ b)

        squares = shared(over, over), shared(over, under), shared(under, under)
        low, high = fieller(float(over @ self.linear), float(under @ self.linear), *squares, least, most)
        total = float(under @ self.projected)
        return Estimate(float(over @ self.projected) / total if total > 0 else None, low, high)


@dataclass(frozen=True)
class Measured:
    """Release of the held-out records, and the estimates that follow from it.

    `kind`: two-classes, classes or numbers. `noised`: the counts of cells, from which sets of any coverage follow
    (`sets.py`). `metrics`: estimates by name. `clamp`: the absolute error, in units of the target, at which MAE, RMSE
    and R2 clamp errors; None for classes.
    """

    kind: str
    noised: Noised
    metrics: dict[str, Estimate]
    clamp: float | None = None

    def without_probabilities(self) -> Measured:
        """Return the measurement without metrics of probabilities, for a model that has none."""
        kept = {name: one for name, one in self.metrics.items() if not name.startswith(_OF_PROBABILITIES)}
        return replace(self, metrics=kept)

    def record(self) -> dict[str, Any]:
        """Return plain data for `result.json`."""
        return {
            "kind": self.kind,
            "records": self.noised.records,
            "noise": self.noised.deviation,
            "clamp": self.clamp,
            "metrics": {name: [one.value, one.low, one.high] for name, one in self.metrics.items()},
            "cells": self.noised.linear.tolist(),
        }


def fieller(
    over: float, under: float, over_variance: float, shared: float, under_variance: float, least: float, most: float
) -> tuple[float, float]:
    """Return the 95% interval of a ratio, cut to [least, most]; all of it if `under` may be 0.

    `over`, `under`: unbiased estimates with the given variances and covariance.

    >>> [round(end, 4) for end in fieller(50.0, 100.0, 25.0, 25.0, 50.0, 0.0, 1.0)]
    [0.43, 0.57]
    """
    a = under**2 - Z**2 * under_variance
    b = over * under - Z**2 * shared
    c = over**2 - Z**2 * over_variance
    inside = b**2 - a * c
    if a <= 0 or under <= 0 or inside < 0:
        return least, most
    low, high = (b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a
    return min(max(low, least), most), max(min(high, most), least)


def of_two_classes(noised: Noised) -> dict[str, Estimate]:
    """Return metrics from noisy cells of `strategy.for_two_classes`.

    Accuracy, balanced accuracy, sensitivity and specificity (recall of each class), AUC, log loss (probabilities
    clipped to [.01, .99]), Brier score and signed calibration gaps (mean label minus mean probability) in five groups
    of probability.
    """
    every = np.ones((2, BINS))
    of_class = [every * [[1.0], [0.0]], every * [[0.0], [1.0]]]
    recalls = [noised.ratio(RIGHT * own, own, 0.0, 1.0) for own in of_class]
    found = {
        "accuracy": noised.ratio(RIGHT, every, 0.0, 1.0),
        "balanced_accuracy": _mean(recalls),
        "sensitivity": recalls[1],
        "specificity": recalls[0],
        "auc": _auc(noised),
        "log_loss": noised.ratio(LOSSES, every, 0.0, float(LOSSES.max())),
        "brier": noised.ratio(SQUARES, every, 0.0, 1.0),
    }
    probability = np.sqrt(SQUARES[0])
    group = np.digitize(probability, GROUPS)
    for number in range(len(GROUPS) + 1):
        inside = every * (group == number)
        gap = np.array([-probability, 1 - probability]) * inside
        found[f"calibration_gap_{number + 1}"] = noised.ratio(gap, inside, -1.0, 1.0)
    return _shown(found, noised)


def of_many_classes(noised: Noised) -> dict[str, Estimate]:
    """Return accuracy and log loss from noisy cells of `strategy.for_many_classes`."""
    every = np.ones((2, BINS))
    found = {
        "accuracy": noised.ratio(every * [[0.0], [1.0]], every, 0.0, 1.0),
        "log_loss": noised.ratio(np.repeat(LOSSES[1:], 2, axis=0), every, 0.0, float(LOSSES.max())),
    }
    return _shown(found, noised)


def _shown(found: dict[str, Estimate], noised: Noised) -> dict[str, Estimate]:
    """Remove points from estimates where the noise is larger than the sampling error."""
    if noised.information >= LEAST_INFORMATION:
        return found
    return {name: Estimate(None, one.low, one.high) for name, one in found.items()}


def _mean(parts: list[Estimate]) -> Estimate:
    """Return the mean of metrics on disjoint records: their intervals' sides are added in squares (Zou 2008)."""
    values = [one.value for one in parts if one.value is not None]
    if len(values) < len(parts):
        return Estimate(None, 0.0, 1.0)
    centres = [min(max(value, one.low), one.high) for value, one in zip(values, parts, strict=True)]
    centre = sum(centres) / len(parts)
    down = math.hypot(*(c - one.low for c, one in zip(centres, parts, strict=True))) / len(parts)
    up = math.hypot(*(one.high - c for c, one in zip(centres, parts, strict=True))) / len(parts)
    return Estimate(sum(values) / len(parts), max(centre - down, 0.0), min(centre + up, 1.0))


def _auc(noised: Noised) -> Estimate:
    """Return the area under the ROC curve; margins in the same bin count half.

    N = x1 K x0 and D = x1 J x0 are bilinear in the counts of the two classes, with K_ij = 1 for i > j and 1/2 for i =
    j, and J of ones. With B = K - t J and errors e = x^ - x, x^1 B x^0 - x1 B x0 = e1 B x0 + x1 B e0 + e1 B e0. The
    noise's mean tr(B C01) is subtracted; the variance is that of the three terms, whose covariances with the last are 0
    for symmetric errors.
    """
    ones = np.ones((BINS, BINS))
    order = np.tril(ones) - np.eye(BINS) / 2
    x0, x1 = noised.projected.reshape(2, BINS)
    noise = noised.covariance.reshape(2, BINS, 2, BINS)
    all00, all11, all10 = noise[0, :, 0] + np.diag(x0), noise[1, :, 1] + np.diag(x1), noise[1, :, 0]

    def statistic(form: np.ndarray) -> float:
        l0, l1 = noised.linear.reshape(2, BINS)
        return float(l1 @ form @ l0 - (form * all10).sum())

    def shared(a: np.ndarray, b: np.ndarray) -> float:
        first = (a @ x0) @ all11 @ (b @ x0) + (x1 @ a) @ all00 @ (x1 @ b)
        mixed = (a @ x0) @ all10 @ (x1 @ b) + (b @ x0) @ all10 @ (x1 @ a)
        second = ((a @ all00 @ b.T) * all11).sum() + ((a @ all10.T) * (b @ all10.T).T).sum()
        return float(first + mixed + second)

    squares = shared(order, order), shared(order, ones), shared(ones, ones)
    low, high = fieller(statistic(order), statistic(ones), *squares, 0.0, 1.0)
    pairs = float(x1.sum() * x0.sum())
    return Estimate(float(x1 @ order @ x0) / pairs if pairs > 0 else None, low, high)


def of_errors(noised: Noised, scale: float) -> dict[str, Estimate]:
    """Return quantiles of the absolute error, in units of the target: `scale` is its declared range.

    A quantile is the smallest edge below which at least that share of errors lies. Its interval is that of the edges
    whose share may be equal to it.
    """
    found = {}
    every = np.ones(2 * SIDE)
    number = np.abs(np.arange(2 * SIDE) - SIDE + 0.5)
    shares = [noised.ratio((number < edge).astype(float), every, 0.0, 1.0) for edge in range(1, SIDE + 1)]
    for quantile in (0.5, 0.9):
        reached = [edge for edge, one in enumerate(shares) if one.value is not None and one.value >= quantile]
        lowest = [edge for edge, one in enumerate(shares) if one.high >= quantile]
        highest = [edge for edge, one in enumerate(shares) if one.low >= quantile]
        low = ERRORS[lowest[0]] if lowest else ERRORS[-1]
        high = ERRORS[highest[0] + 1] if highest else ERRORS[-1]
        value = float(ERRORS[reached[0] + 1] * scale) if reached else None
        found[f"error_quantile_{round(100 * quantile)}"] = Estimate(value, float(low * scale), float(high * scale))
    return _shown(found, noised)


MOMENTS = 5
"""Length of a record's vector of moments."""


def moments_of(errors: np.ndarray, targets: np.ndarray, clamp: float) -> np.ndarray:
    """Return each record's vector of moments (n, 5), of norm at most 1: (1, a, a^2, t, t^2) / sqrt(5).

    Args: `errors` (n,) >= 0 and `clamp` > 0, as shares of the target's range; a = min(error / clamp, 1). `targets` (n,)
    are clipped to [-1, 1], the ends of the declared bounds.
    """
    a, t = np.minimum(errors / clamp, 1.0), targets.clip(-1.0, 1.0)
    return np.stack([np.ones_like(a), a, a**2, t, t**2], axis=1) * (SLACK / math.sqrt(MOMENTS))


def clamp_of(noised: Noised) -> float:
    """Return the clamp of errors: the lowest edge with at most 1% of the records beyond it, or one noise deviation."""
    number = np.abs(np.arange(2 * SIDE) - SIDE + 0.5)
    for edge in range(1, SIDE):
        beyond = (number > edge).astype(float)
        if beyond @ noised.linear <= max(0.01 * noised.records, noised.deviation_of(beyond)):
            return float(ERRORS[edge])
    return float(ERRORS[-1])


def of_moments(
    released: np.ndarray, deviation: float, noised: Noised, clamp: float, scale: float
) -> dict[str, Estimate]:
    """Return MAE and RMSE of errors clamped at `clamp`, and R2, from noised sums of moments.

    Args: `released` (5,): the sums of `moments_of` with noise of standard deviation `deviation`. `noised`: the cells of
    errors, from which the fourth moment of the errors is taken, for variances only. `scale`: the target's range.
    """
    total, mean, square, at, at_square = released * (math.sqrt(MOMENTS) / SLACK)
    noise = MOMENTS * deviation**2
    middle = np.minimum((ERRORS[1:] + ERRORS[:-1]) / 2, clamp) / clamp
    fourth = float(noised.projected @ np.concatenate([middle[::-1], middle]) ** 4)
    many, positive = max(total, 1.0), max(square, 0.0)
    fourth = min(max(fourth, positive**2 / many), positive)
    mae = _number(mean, total, max(square, 0.0), max(mean, 0.0), many, noise)
    mse = _number(square, total, fourth, positive, many, noise)
    spread = Estimate(None, 0.0, 1.0)
    variance = at_square / many - (at / many) ** 2
    # t^4 is at most t^2, so the variance of t^2 is at most E t^2; twice that covers the square of the mean
    error = Z * math.sqrt((2 * max(at_square, 0.0) + 5 * noise) / many**2)
    if variance > error:
        ratio = (2 * clamp) ** 2
        spread = Estimate(
            1 - mse.value * ratio / variance if mse.value is not None else None,
            max(1 - mse.high * ratio / (variance - error), -1.0),
            min(1 - mse.low * ratio / (variance + error), 1.0),
        )
    unit = clamp * scale
    root = None if mse.value is None else math.sqrt(mse.value) * unit
    found = {
        "mae": Estimate(None if mae.value is None else mae.value * unit, mae.low * unit, mae.high * unit),
        "rmse": Estimate(root, math.sqrt(mse.low) * unit, math.sqrt(mse.high) * unit),
        "r2": spread,
    }
    return _shown(found, noised)


def _number(over: float, under: float, squares: float, cross: float, many: float, noise: float) -> Estimate:
    """Return a mean in [0, 1] of records' numbers: their noised sum `over`, and the noised number `under`."""
    low, high = fieller(over, under, squares + noise, cross, many + noise, 0.0, 1.0)
    return Estimate(min(max(over / under, 0.0), 1.0) if under > 0 else None, low, high)
