"""Noise that is correlated across steps: its weights, and its predicted error. Numbers only.

Notation: n steps; y_t independent normals of standard deviation s_t; C a lower triangular matrix whose columns have
L2 norm at most 1; noise x = C^-1 y is added to the sums g_1, ..., g_n. Then C (g + x) = C g + y: the release is a
function of C g with independent noise. One record in step t moves C g by (column t of C) times its gradient, so by no
more than it moves the sum. `mechanism.CorrelatedSums` proves the price; `noise/correlation.py` draws the noise.

Purpose: descent adds gradients up. The noise of a sum of the first t steps, sum x_1..x_t, is the noise of its weights
after t steps of one length. The predicted error is the root mean square of its standard deviation over all t, in units
of one sum's sensitivity. It ignores momentum, averages and changing learning rates, and accuracy need not follow it.

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

from dpsgd_cli.noise.settings import BandedNoise, ToeplitzNoise, TreeNoise

Floats = NDArray[np.float64]
_STEEPNESS = 100.0
"""The first step of the descent is 1 / this long: longer ones leave the weights whose noise stays bounded."""


@dataclass(frozen=True)
class Correlation(ABC):
    """Correlation of noise between steps. `period`: number of steps after which it starts anew; None for never."""

    drawn: ClassVar[str]
    """The class that draws the noise, as `module:name`."""
    period: int | None

    @property
    @abstractmethod
    def bands(self) -> int:
        """Number of steps over which noise is correlated."""

    @property
    @abstractmethod
    def moved_by_rounding(self) -> float:
        """Grid steps by which rounding to integers moves a coordinate of C g, in one step (`noise/correlation.py`)."""

    @abstractmethod
    def variances(self, steps: int) -> Floats:
        """Return the variances of the summed noise of the first 1, ..., `steps` steps, if y has variance 1.

        The shape is (steps,); `steps` is at most one period.
        """

    def error(self, multipliers: Sequence[float], steps: int) -> float:
        """Return the root mean square, over all steps, of the standard deviation of the noise of all steps so far.

        `multipliers` has one entry for each epoch of `steps` steps. The unit is the sensitivity of one sum.
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
    """Noise x_t = (y_t - sum_{j >= 1} w_j x_{t-j}) / w_0, with `weights` w of L2 norm 1: the first column of C."""

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
    """Noise of a binary tree over the steps: every node has noise sqrt(h) y.

    The noise of the first t steps is the sum over the nodes whose leaves are those t, one for each binary digit 1 of t.
    The number of levels, h, is the most nodes above one leaf that any such sum uses: floor(log2 steps) + 1. So C (the
    sums of all nodes, over sqrt(h)) has columns of norm at most 1.
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
    """Return a correlation over `settings.bands` steps, at most the `steps` of an epoch, of the whole training."""
    best = settings.weights == "optimised"
    return Toeplitz(None, optimised(settings.groups, epochs * steps) if best else square_root(settings.groups))


def toeplitz(settings: ToeplitzNoise, epochs: int, steps: int) -> Correlation:
    """Return the Toeplitz correlation of each epoch."""
    del settings, epochs
    return Toeplitz(steps, square_root(steps))


def tree(settings: TreeNoise, epochs: int, steps: int) -> Correlation:
    """Return the tree correlation of each epoch."""
    del settings, epochs
    return Tree(steps)


def square_root(bands: int) -> tuple[float, ...]:
    """Return the first `bands` coefficients of (1 - x)^(-1/2), over their norm.

    They are c_0 = 1, c_k = c_{k-1} (2 k - 1) / (2 k).

    >>> [round(w / square_root(3)[0], 4) for w in square_root(3)]
    [1.0, 0.5, 0.375]
    """
    k = np.arange(1, bands)
    return _normal(np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)])))


@lru_cache(maxsize=64)
def optimised(bands: int, steps: int) -> tuple[float, ...]:
    """Return the `bands` (<= `steps`) weights of norm 1 of least error that a descent from `square_root` finds."""
    from scipy.optimize import minimize  # takes .3 s to import with scipy.signal; most noise is not correlated
    from scipy.signal import lfilter

    share, start = (steps - np.arange(steps)) / steps, np.asarray(square_root(bands))

    def of(moved_by: Floats) -> tuple[float, Floats]:
        """Return log(|w|^2 times the mean square error) and its gradient: -d D / d w_k is D / w(x), k steps later."""
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
    """Return coefficients 0, ..., steps - 1 of 1 / ((1 - x) w(x)): the contribution of y_0 to the sums of noise."""
    from scipy.signal import lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    found: Floats = lfilter([1.0], np.convolve(weights, [1.0, -1.0]), impulse)
    return found


def _normal(weights: Floats) -> tuple[float, ...]:
    """Return the weights divided by their norm."""
    return tuple((weights / math.sqrt(math.fsum(weights**2))).tolist())
