"""Choice of a strategy's numbers: coefficients of (1 - x)^(-1/2), or those of least predicted error. Numbers only.

No number here can spoil a guarantee: `noise/price.py` computes the sensitivity of whatever is chosen, and all of them
are chosen from public facts.

Sources: Fichtenberger, Henzinger and Upadhyay 2023 (coefficients of (1 - x)^(-1/2)); McKenna 2024 (arXiv 2405.15913;
banded Toeplitz, optimised); Kalinin, Pillutla and Lampert 2025 (banded inverse square root, BISR); Dvijotham et al.
2024, McMahan et al. 2024 (buffered linear Toeplitz, BLT); Kalinin et al. 2026 (arXiv 2601.22334; one vector: two bands
of the inverse).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.noise.settings import Weights, Workload

Floats = NDArray[np.float64]
_STEEPNESS = 100.0
"""The first step of the descent is 1 / this long: longer ones leave the weights whose noise stays bounded."""


class Wanted(NamedTuple):
    """Facts that the weights are chosen by.

    `bands` b; `steps` of the whole training; `distance`: steps between two uses of a record, all of which move C g
    together, or `steps` if one use is charged by itself.
    """

    bands: int
    steps: int
    distance: int
    weights: Weights
    workload: Workload


class Numbers(NamedTuple):
    """Numbers of a `noise.price.NoiseStrategy`: what is taken back, and the decays of the buffers."""

    taken: tuple[float, ...]
    decays: tuple[float, ...] = ()


class _Point(NamedTuple):
    """Coefficients c of C and r of C^-1, and the gradient in the parameters of a function with gradients in c and r."""

    column: Floats
    inverse: Floats
    pull: Callable[[Floats, Floats], Floats]


def banded(wanted: Wanted) -> Numbers:
    """Return c_1, ..., c_(b-1), with c_0 = 1."""
    from scipy.signal import lfilter  # takes .3 s to import; most noise is not correlated

    steps, impulse = wanted.steps, _impulse(wanted.steps)

    def at(taken: Floats) -> _Point:
        own = np.concatenate([[1.0], taken])
        inverse = lfilter([1.0], own, impulse)
        twice = lfilter([1.0], own, inverse)
        column = _padded(own, steps)
        places = range(1, len(own))
        return _Point(column, inverse, lambda c, r: np.array([c[k] - twice[: steps - k] @ r[k:] for k in places]))

    return Numbers(_found(wanted, square_root(wanted.bands)[1:], at))


def inverse_banded(wanted: Wanted) -> Numbers:
    """Return -r_1, ..., -r_(b-1), with r_0 = 1."""
    from scipy.signal import lfilter

    steps, impulse = wanted.steps, _impulse(wanted.steps)

    def at(taken: Floats) -> _Point:
        own = np.concatenate([[1.0], -taken])
        column = lfilter([1.0], own, impulse)
        twice = lfilter([1.0], own, column)
        places = range(1, len(own))
        return _Point(
            column, _padded(own, steps), lambda c, r: np.array([twice[: steps - k] @ c[k:] - r[k] for k in places])
        )

    k = np.arange(1, wanted.bands)
    start = np.cumprod(np.concatenate([[0.5], (2 * k[:-1] - 1) / (2 * k[:-1] + 2)]))[: wanted.bands - 1]
    return Numbers(_found(wanted, start, at))


def buffered(wanted: Wanted) -> Numbers:
    """Return scales a_i > 0 and decays l_i in (0, 1) of c_k = sum_i a_i l_i^(k-1), k >= 1.

    The start is the best fit to (1 - x)^(-1/2) of decays whose distances from 1 are in geometric progression.
    """
    from scipy.optimize import nnls
    from scipy.signal import fftconvolve, lfilter

    steps, count = wanted.steps, wanted.bands - 1
    if count == 0:
        return Numbers(())
    impulse, lags = _impulse(steps), np.arange(steps - 1)

    def at(logs: Floats) -> _Point:
        scales, decays = np.exp(logs[:count]), 1 / (1 + np.exp(-logs[count:]))
        powers = decays[:, None] ** lags
        column = np.concatenate([[1.0], scales @ powers])
        upper, lower = _rational(scales, decays)
        inverse = lfilter(lower, upper, impulse)
        twice = lfilter(lower, upper, inverse)

        def pull(c: Floats, r: Floats) -> Floats:
            slopes = (c - fftconvolve(r, twice[::-1])[steps - 1 :])[1:]
            by_decay = powers[:, :-1] @ (slopes[1:] * lags[1:]) if steps > 2 else np.zeros(count)
            return np.concatenate([scales * (powers @ slopes), scales * by_decay * decays * (1 - decays)])

        return _Point(column, inverse, pull)

    decays = 1 - float(max(steps, 4)) ** (-(np.arange(count) + 0.5) / count)
    fit, _ = nnls((decays[:, None] ** lags).T, square_root(steps)[1:]) if steps > 1 else (np.ones(count), 0.0)
    start = np.concatenate([np.log(np.maximum(fit, 1e-6)), np.log(decays / (1 - decays))])
    found = np.asarray(_found(wanted, start, at))
    return Numbers(tuple(np.exp(found[:count]).tolist()), tuple((1 / (1 + np.exp(-found[count:]))).tolist()))


def square_root(bands: int) -> Floats:
    """Return the first `bands` coefficients of (1 - x)^(-1/2): c_0 = 1, c_k = c_{k-1} (2 k - 1) / (2 k).

    >>> square_root(3).tolist()
    [1.0, 0.5, 0.375]
    """
    k = np.arange(1, bands)
    found: Floats = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    return found


def seen_by(workload: Workload, noise: Floats) -> Floats:
    """Return what `noise` (steps,) adds to the weights after each step, or to their average over half of the steps."""
    sums: Floats = np.cumsum(noise)
    if workload == "iterates":
        return sums
    window = max(1, len(noise) // 2)
    twice: Floats = np.cumsum(sums)
    twice[window:] = twice[window:] - twice[:-window]
    return twice / window


def moved_by(column: Floats, distance: int) -> Floats:
    """Return C g (steps,) for a record of norm 1 in step 0 and in every `distance`-th step after it."""
    found = np.zeros(len(column))
    for start in range(0, len(column), distance):
        found[start:] += column[: len(column) - start]
    return found


def _found(wanted: Wanted, start: Floats, at: Callable[[Floats], _Point]) -> tuple[float, ...]:
    """Return `start`, or the parameters of least error that a descent from it finds.

    The error is |C g|^2 of one record times the mean square of what the noise of C^-1 adds to the workload.
    """
    if wanted.weights == "sqrt" or len(start) == 0:
        return tuple(start.tolist())
    from scipy.optimize import minimize

    steps, distance = wanted.steps, wanted.distance
    share = (steps - np.arange(steps)) / steps

    def of(moved: Floats) -> tuple[float, Floats]:
        """Return the logarithm of the error and its gradient."""
        with np.errstate(all="ignore"):
            point = at(start + moved / _STEEPNESS)
            shift = moved_by(point.column, distance)
            seen = seen_by(wanted.workload, point.inverse)
            square, error = float(shift @ shift), float(share @ seen**2)
            back = seen_by(wanted.workload, (share * seen)[::-1])[::-1]
            slopes = point.pull(2 * moved_by(shift[::-1], distance)[::-1] / square, 2 * back / error) / _STEEPNESS
        if not (math.isfinite(error) and math.isfinite(square) and np.isfinite(slopes).all()):
            return 1e300, np.zeros(len(start))
        return math.log(square * error), slopes

    options = {"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-9}
    found: Any = minimize(of, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=options)
    return tuple((start + found.x / _STEEPNESS).tolist())


def _rational(scales: Floats, decays: Floats) -> tuple[Floats, Floats]:
    """Return numerator and denominator of 1 + sum_i a_i x / (1 - l_i x), lowest power first."""
    lower: Floats = np.asarray(np.poly(decays), dtype=np.float64)
    upper = lower.copy()
    for i, scale in enumerate(scales):
        upper[1:] += scale * np.poly(np.delete(decays, i))
    return upper, lower


def _impulse(steps: int) -> Floats:
    return _padded(np.ones(1), steps)


def _padded(values: Floats, steps: int) -> Floats:
    found = np.zeros(steps)
    found[: len(values)] = values[:steps]
    return found
