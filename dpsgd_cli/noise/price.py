"""Noise that is correlated across steps: its weights, and the error it is predicted to leave. Numbers only.

Notation: n steps; y_t independent normals of standard deviation s_t; C a lower triangular matrix whose columns have
L2 norm at most 1; noise x = C^-1 y is added to the sums g_1, ..., g_n. Then C (g + x) = C g + y: what is released is a
function of C g with independent noise, and one record in step t moves that by (column t of C) times its gradient, so
by no more than it moves the sum. What that costs is argued in `mechanism.CorrelatedSums`; what is drawn, in
`noise/correlation.py`.

Why: descent adds gradients up, and the noise of a sum of the first t steps, sum x_1..x_t, is what its weights have
after t steps of one length. The predicted error is the root mean square of its standard deviation over all t, in units
of one sum's sensitivity. It does not know of momentum, averages or learning rates that change, and accuracy need not
follow it.

Sources: Choquette-Choo et al. 2023 (arXiv 2306.08153; banded matrices), Fichtenberger, Henzinger and Upadhyay 2023
(coefficients of (1 - x)^(-1/2)), McKenna 2024 (arXiv 2405.15913; banded Toeplitz, optimised), Kairouz et al. 2021 and
Dwork et al. 2010 (tree).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter

from dpsgd_cli.noise.settings import BandedNoise, ToeplitzNoise, TreeNoise

Floats = NDArray[np.float64]
_STEEPNESS = 100.0
"""The first step of the descent is 1 / this long: longer ones leave the weights whose noise stays bounded."""


@dataclass(frozen=True)
class Correlation(ABC):
    """How noise of several steps goes together. `period`: steps after which it starts anew; None for never."""

    drawn: ClassVar[str]
    """`module:name` of what draws it."""
    period: int | None

    @property
    @abstractmethod
    def bands(self) -> int:
        """Over how many steps noise is correlated."""

    @property
    @abstractmethod
    def moved_by_rounding(self) -> float:
        """Grid steps that rounding to integers moves a coordinate of C g by, in one step (`noise/correlation.py`)."""

    @abstractmethod
    def variances(self, steps: int) -> Floats:
        """Of the sum of the noise of the first 1, ..., `steps` steps, where y has variance 1 (one period at most)."""

    def error(self, multipliers: Sequence[float], steps: int) -> float:
        """Root mean square, over all steps, of the standard deviation of the noise of all steps so far.

        `multipliers` by epoch of `steps` steps; in units of the sensitivity of one sum.
        """
        squares = np.square(np.asarray(multipliers, dtype=np.float64))
        total = len(squares) * steps
        if self.period is None:
            left = self.variances(total)[::-1]
            return math.sqrt(float(np.repeat(squares, steps) @ left) / total)
        own = self.variances(steps)
        after = total - steps * np.arange(1, len(squares) + 1)
        return math.sqrt(float(squares @ (own.sum() + after * own[-1])) / total)


@dataclass(frozen=True)
class Toeplitz(Correlation):
    """x_t = (y_t - sum_{j >= 1} w_j x_{t-j}) / w_0, with `weights` w of L2 norm 1: the first column of C."""

    drawn = "dpsgd_cli.noise.correlation:ToeplitzStepNoise"
    weights: tuple[float, ...]

    @property
    def bands(self) -> int:
        return len(self.weights)

    @property
    def moved_by_rounding(self) -> float:
        total = sum(map(abs, self.weights)) / self.weights[0]
        return 1 + total * (1 + self.bands / 8)

    def variances(self, steps: int) -> Floats:
        found: Floats = np.cumsum(np.square(_prefix_response(np.asarray(self.weights), steps)))
        return found


@dataclass(frozen=True)
class Tree(Correlation):
    """Every node of a binary tree over the steps has noise sqrt(h) y; that of the first t steps is the sum over the
    nodes whose leaves are those t, one for each binary digit 1 of t.

    h, the levels, is the most nodes above one leaf that any such sum uses: floor(log2 steps) + 1. So C (the sums of
    all nodes, over sqrt(h)) has columns of norm at most 1.
    """

    drawn = "dpsgd_cli.noise.correlation:TreeStepNoise"
    period: int

    @property
    def bands(self) -> int:
        return self.period

    @property
    def moved_by_rounding(self) -> float:
        return 1.0

    @property
    def levels(self) -> int:
        return self.period.bit_length()

    def variances(self, steps: int) -> Floats:
        return self.levels * np.array([float(step.bit_count()) for step in range(1, steps + 1)])


INDEPENDENT = Toeplitz(None, (1.0,))


def banded(settings: BandedNoise, epochs: int, steps: int) -> Correlation:
    """Correlation over `settings.bands` steps (no more than the `steps` of an epoch) of the whole training."""
    best = settings.weights == "optimised"
    return Toeplitz(None, optimised(settings.groups, epochs * steps) if best else square_root(settings.groups))


def toeplitz(settings: ToeplitzNoise, epochs: int, steps: int) -> Correlation:
    """Correlation over each epoch."""
    del settings, epochs
    return Toeplitz(steps, square_root(steps))


def tree(settings: TreeNoise, epochs: int, steps: int) -> Correlation:
    """Correlation over each epoch."""
    del settings, epochs
    return Tree(steps)


def square_root(bands: int) -> tuple[float, ...]:
    """The first `bands` coefficients of (1 - x)^(-1/2): c_0 = 1, c_k = c_{k-1} (2 k - 1) / (2 k), over their norm.

    >>> [round(w / square_root(3)[0], 4) for w in square_root(3)]
    [1.0, 0.5, 0.375]
    """
    k = np.arange(1, bands)
    return _normal(np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)])))


@lru_cache(maxsize=64)
def optimised(bands: int, steps: int) -> tuple[float, ...]:
    """The `bands` (<= `steps`) weights of norm 1 that a descent from `square_root` finds to leave the least error."""
    share, start = (steps - np.arange(steps)) / steps, np.asarray(square_root(bands))

    def of(moved_by: Floats) -> tuple[float, Floats]:
        """log of |w|^2 times the mean square error, and its gradient: -d D / d w_k is D / w(x), k steps later."""
        weights = start + moved_by / _STEEPNESS
        with np.errstate(all="ignore"):
            response = _prefix_response(weights, steps)
            again = lfilter([1.0], weights, response)
            square, error = float(weights @ weights), float(share @ response**2)
            slopes = np.array([(share * response)[k:] @ again[: steps - k] for k in range(bands)])
        if not math.isfinite(error) or not np.isfinite(slopes).all():
            return 1e300, np.zeros(bands)
        return math.log(square * error), 2 * (weights / square - slopes / error) / _STEEPNESS

    options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-9}
    found: Any = minimize(of, np.zeros(bands), jac=True, method="L-BFGS-B", options=options)
    return _normal(start + found.x / _STEEPNESS)


def _prefix_response(weights: Floats, steps: int) -> Floats:
    """Coefficients 0, ..., steps - 1 of 1 / ((1 - x) w(x)): what y_0 adds to the sums of noise."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    found: Floats = lfilter([1.0], np.convolve(weights, [1.0, -1.0]), impulse)
    return found


def _normal(weights: Floats) -> tuple[float, ...]:
    """Over their norm."""
    return tuple((weights / math.sqrt(math.fsum(weights**2))).tolist())
