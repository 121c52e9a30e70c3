"""Estimates with intervals from noisy counts of cells, as post-processing of one release (`price.py`).

Notation: x (cells,) are the counts of the held-out records; the linear estimate x^ is unbiased, with noise covariance
s^2 C, C = (A^T A)^-1, for the strategy A. The projection x+ minimises |A (x - x^)| over x >= 0.

Sampling: held-out records come to their part by independent coins, so the counts are treated as independent Poisson
variables. For a ratio of sums this gives the same variance as records drawn from a population. A user counts as the
mean of their rows' cells, so x adds up such means. Their variance is at most that of records in these cells: if shares
v add up to at most 1, then diag(v) - v v^T is positive semidefinite. So the intervals of users are at least as wide as
they have to be.

Intervals: a metric is a ratio t = N(x) / D(x). For the true t, N(x^) - t D(x^) has mean 0 and a variance that is a
quadratic function of t, so {t : (N - t D)^2 <= 1.96^2 V(t)} is a 95% interval (Fieller 1954). If the denominator cannot
be distinguished from 0, the interval is the metric's whole range: nothing can be said. Variances are estimated at x+.
Points are the metric of x+. An interval is centred on linear estimates, not on the point: x+ is biased if noise is
large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpsgd_cli.evaluation.strategy import Strategy

Z = 1.959963984540054
"""Two-sided 95% quantile of a normal law."""
LEAST_INFORMATION = 12.0
"""Below this many records over the variance of the noise only intervals are shown: noise exceeds the sampling error."""
WHOLE = ((0.0, 1.0), (-1.0, 1.0))
"""All that a share, and a difference of shares, may be: an interval of these ends says nothing."""
_OF_PROBABILITIES = ("log_loss", "brier", "calibration")


@dataclass(frozen=True)
class Estimate:
    """A metric with a 95% interval; `value` is None if noise leaves no useful point."""

    value: float | None
    low: float
    high: float

    def times(self, unit: float) -> Estimate:
        """Return the estimate of the metric times `unit`, positive."""
        return Estimate(None if self.value is None else self.value * unit, self.low * unit, self.high * unit)


@dataclass(frozen=True)
class Noised:
    """The noisy counts of the held-out records, or of a group of them.

    `linear` (cells,): the unbiased x^. `strategy`: A, of the release; its noise in A x^ has the standard deviation
    `deviation`, s.
    """

    linear: np.ndarray
    strategy: Strategy
    deviation: float

    @cached_property
    def projected(self) -> np.ndarray:
        """The projection x+ (cells,)."""
        from scipy.optimize import nnls  # takes .3 s to import

        matrix = self.strategy.matrix
        return np.asarray(nnls(matrix, matrix @ self.linear, maxiter=20 * len(matrix))[0])

    @cached_property
    def root(self) -> np.ndarray:
        """s A^-1 (cells, cells)."""
        return self.strategy.inverse * self.deviation

    @cached_property
    def covariance(self) -> np.ndarray:
        """s^2 C = root root^T (cells, cells), of the noise in x^."""
        return self.strategy.covariance * self.deviation**2

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
        return float(np.linalg.norm(weights @ self.root))

    def ratio(self, over: np.ndarray, under: np.ndarray, least: float, most: float) -> Estimate:
        """Return the estimate of `over` @ x / `under` @ x, with weights (cells,), a metric in [least, most]."""
        return self.shown(ratio_of([self], over.reshape(1, -1), under.reshape(1, -1), least, most))

    def shown(self, found: Estimate) -> Estimate:
        """Return an estimate without its point if noise hides it, else with the point inside.

        It does if it is larger than the sampling error, or if the interval is all that the metric may be.
        Points come from projected counts and intervals from linear ones, so a point may lie outside; it is then moved
        to the nearest end.
        """
        if found.value is None or self.information < LEAST_INFORMATION or (found.low, found.high) in WHOLE:
            return Estimate(None, found.low, found.high)
        return Estimate(min(max(found.value, found.low), found.high), found.low, found.high)


@dataclass(frozen=True)
class Group:
    """The estimated number of records with one value of a public column, and their metrics."""

    records: float
    metrics: dict[str, Estimate]


@dataclass(frozen=True)
class Measured:
    """Release of the held-out records, and the estimates that follow from it.

    `kind`: two-classes, classes or numbers. `noised`: the counts of cells. `metrics`: estimates by name. `clamp`:
    the absolute error, in units of the target, at which MAE, RMSE and R2 clamp errors; None for classes. `users`: a
    metric is a mean over users of the means of their rows. `groups`: by column and value. `confusion`: by true
    class, the share that each class is predicted for; `classes` are their public names, `f1` their F1 scores.
    `curve`: sensitivity and specificity of predicting the second class from each probability. `constants`: by metric,
    that of the best constant answer, the baseline. `gain`: the accuracy minus the baseline's, or R2, where both are
    known. `released`: the noisy vectors that all else is computed from.
    """

    kind: str
    noised: Noised
    metrics: dict[str, Estimate]
    clamp: float | None = None
    users: bool = False
    groups: dict[str, dict[str, Group]] = field(default_factory=dict)
    confusion: list[list[Estimate]] = field(default_factory=list)
    f1: list[Estimate] = field(default_factory=list)
    curve: list[tuple[float, Estimate, Estimate]] = field(default_factory=list)
    constants: dict[str, Estimate] = field(default_factory=dict)
    gain: Estimate | None = None
    classes: tuple[str, ...] = ()
    released: tuple[np.ndarray, ...] = ()

    @property
    def f1_by_name(self) -> dict[str, Estimate]:
        """The F1 score of each class, by the name of its metric."""
        return {f"f1_{name}": one for name, one in zip(self.classes, self.f1, strict=False)}

    def without_probabilities(self) -> Measured:
        """Return the measurement without metrics of probabilities, for a model that has none."""

        def kept(metrics: dict[str, Estimate]) -> dict[str, Estimate]:
            return {name: one for name, one in metrics.items() if not name.startswith(_OF_PROBABILITIES)}

        groups = {
            column: {value: Group(one.records, kept(one.metrics)) for value, one in values.items()}
            for column, values in self.groups.items()
        }
        return replace(self, metrics=kept(self.metrics), groups=groups, curve=[], constants=kept(self.constants))

    def record(self) -> dict[str, Any]:
        """Return plain data for `result.json`."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "unit": "users" if self.users else "records",
            "records": self.noised.records,
            "noise": self.noised.deviation,
            "clamp": self.clamp,
            "metrics": self.metrics,
            "constants": self.constants,
            "gain": self.gain,
            "cells": self.noised.linear.tolist(),
        }
        if self.confusion:
            found |= {"classes": self.classes, "confusion": self.confusion, "f1_by_class": self.f1}
        found |= {"curve": self.curve} if self.curve else {}
        found |= {"groups": self.groups} if self.groups else {}
        plain: dict[str, Any] = _plain(found)
        return plain


def _plain(value: Any) -> Any:
    """Return a value as plain data: an estimate as [point, low, high]."""
    if isinstance(value, Estimate):
        return [value.value, value.low, value.high]
    if isinstance(value, Group):
        return {"records": value.records, "metrics": _plain(value.metrics)}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def ratio_of(parts: Sequence[Noised], over: np.ndarray, under: np.ndarray, least: float, most: float) -> Estimate:
    """Return the estimate of sum_k `over`_k @ x_k / sum_k `under`_k @ x_k, a metric in [least, most].

    `parts` hold disjoint cells with independent noise, so variances add up; weights are (parts, cells).
    """
    point, linear = np.zeros(2), np.zeros(2)
    squares = np.zeros((2, 2))
    for one, weights in zip(parts, np.stack([over, under], axis=1), strict=True):
        noise, x = weights @ one.root, one.projected
        squares += (weights * x) @ weights.T + noise @ noise.T
        linear += weights @ one.linear
        point += weights @ x
    (of_over, shared), (_, of_under) = squares.tolist()
    low, high = fieller(float(linear[0]), float(linear[1]), of_over, shared, of_under, least, most)
    value = min(max(float(point[0] / point[1]), least), most) if point[1] > 0 else None
    return Estimate(value, low, high)


def fieller(
    over: float, under: float, over_variance: float, shared: float, under_variance: float, least: float, most: float
) -> tuple[float, float]:
    """Return the 95% interval of a ratio in [least, most] (`in_range`); all of it if `under` may be 0.

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
    return in_range((b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a, least, most)


def in_range(low: float, high: float, least: float, most: float) -> tuple[float, float]:
    """Return the part of [low, high] in [least, most], widened where the middle is outside of the range.

    Noise may place an interval partly or wholly outside, where its part inside would be too short to be believed. It
    then reaches as far in as one whose middle is at the end of the range, so that it holds what it held and more.

    >>> in_range(0.4, 0.6, 0.0, 1.0), in_range(0.9, 1.3, 0.0, 1.0), in_range(1.5, 1.7, 0.0, 1.0)
    ((0.4, 0.6), (0.8, 1.0), (0.9, 1.0))
    """
    half = (high - low) / 2
    return max(min(low, most - half), least), min(max(high, least + half), most)


def mean_of(parts: list[Estimate]) -> Estimate:
    """Return the mean of metrics on disjoint records: their intervals' sides are added in squares (Zou 2008).

    Sides are those of the points. Where a point is not shown, noise decides, and the ends themselves are averaged: the
    mean lies between them wherever each metric lies in its interval.
    """
    values = [one.value for one in parts if one.value is not None]
    if len(values) < len(parts):
        return Estimate(None, sum(one.low for one in parts) / len(parts), sum(one.high for one in parts) / len(parts))
    point = sum(values) / len(parts)
    down = math.hypot(*(value - one.low for value, one in zip(values, parts, strict=True))) / len(parts)
    up = math.hypot(*(one.high - value for value, one in zip(values, parts, strict=True))) / len(parts)
    return Estimate(point, *in_range(point - down, point + up, 0.0, 1.0))
