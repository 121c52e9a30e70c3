"""Renyi divergences of many Poisson-sampled Gaussians at once. Loads NumPy; same formulas as `accounting/renyi.py`.

Not for a few mechanisms: `renyi.py` is done before NumPy has loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.mechanism import GroupSum
from dpsgd_cli.accounting.renyi import TAIL, integration_points, log_binomial, trapezoid_step

Floats = NDArray[np.floating]

_MOST_TERMS = 4_000_000
"""Most terms of a group's integral; beyond them the unsampled sum of the group is its bound."""
_AT_ONCE = 4096
"""Rows or columns of an array that is in memory at once."""


def poisson_gaussian_divergences(sampling_rates: Floats, noise_multipliers: Floats, order: float) -> Floats:
    """Return `renyi.poisson_gaussian_divergence` for M mechanisms.

    Args: rates in (0, 1) and noise multipliers > 0, both of shape (M,); one order > 1. Returns shape (M,).
    Source: Mironov, Talwar and Zhang 2019, section 3.3.
    """
    if len(noise_multipliers) > _AT_ONCE:
        parts = range(0, len(noise_multipliers), _AT_ONCE)
        cut = [slice(low, low + _AT_ONCE) for low in parts]
        each = [poisson_gaussian_divergences(sampling_rates[c], noise_multipliers[c], order) for c in cut]
        return np.concatenate(each)
    orders = np.full(len(noise_multipliers), order)
    _, points = _integration(noise_multipliers, orders)
    if order == int(order) and order <= points:
        return _integer_log_moments(sampling_rates, noise_multipliers, int(order)) / (order - 1)
    return integrated_divergences(sampling_rates, noise_multipliers, orders)


def integrated_divergences(sampling_rates: Floats, noise_multipliers: Floats, orders: Floats) -> Floats:
    """Return the divergences of M mechanisms, each at an order of its own, by quadrature; all arrays of shape (M,)."""
    steps, points = _integration(noise_multipliers, orders)
    x = np.arange(points + 1)[None, :] * steps[:, None] - TAIL  # (M, points)
    log_ratios = x / noise_multipliers[:, None] - (1 / (2 * noise_multipliers**2))[:, None]
    logs = _log_convex_excess(sampling_rates[:, None], log_ratios, orders[:, None]) - x * x / 2
    return _log1p_of_sums(logs + np.log(steps / np.sqrt(2 * np.pi))[:, None]) / (orders - 1)


def _integer_log_moments(rates: Floats, noises: Floats, alpha: int) -> Floats:
    k = np.arange(2, alpha + 1, dtype=np.float64)
    binomials = np.array([log_binomial(alpha, i) for i in range(2, alpha + 1)])
    exponents = (k * (k - 1))[None, :] / (2 * noises**2)[:, None]  # (M, alpha-1)
    gains = np.where(exponents < 30, np.log(np.expm1(np.minimum(exponents, 30))), exponents)
    weights = k[None, :] * np.log(rates)[:, None] + (alpha - k)[None, :] * np.log1p(-rates)[:, None]
    return _log1p_of_sums(binomials[None, :] + weights + gains)


def _integration(noises: Floats, orders: Floats) -> tuple[Floats, int]:
    heights = np.minimum(np.pi * noises, np.sqrt(120))
    steps = np.minimum(0.5, 2 * np.pi * heights / (60 + heights**2 / 2))
    return steps, int(np.max((2 * TAIL + orders / noises) / steps)) + 1


def grouped_divergence(mechanism: GroupSum, order: float) -> float:
    """Return the larger Renyi divergence of the pair of `GroupSum`, by the trapezoidal rule.

    R(x) = sum_j w_j e^(jx/z - j^2/2z^2), x in units of z. At x + iy all terms lie in a sector of angle K |y| / z. Below
    pi, R has no zeros and |R(x + iy)| <= R(x), so the step is that of one record with noise z / K, by the same bound,
    for E_Q R^alpha. Below pi / 2 also |R(x + iy)| >= R(x) / sqrt(2), so for E_Q R^(1 - alpha) the error gains a factor
    of at most 2^((alpha - 1) / 2), which its step pays for. The other direction is at most -K log(1 - q), as R is at
    least (1 - q)^K. The unsampled sum of all K dominates, and serves where too many points would be needed.
    """
    size, noise = mechanism.size, mechanism.noise_multiplier
    unsampled = order / (2 * (noise / size) ** 2)
    step = trapezoid_step(noise / size)
    points = integration_points(noise / size, order)
    if points * size > _MOST_TERMS:
        return unsampled
    remove = _grouped_log_moment(mechanism, order, step, points) / (order - 1)
    most = -size * np.log1p(-mechanism.sampling_rate)
    if remove >= most:
        return min(unsampled, remove)
    height = min(np.pi * noise / size / 2, np.sqrt(120))
    step = min(0.5, 2 * np.pi * height / (60 + height**2 / 2 + (order - 1) * np.log(2) / 2))
    points = int((2 * TAIL + 1 / noise) / step) + 1
    add = most if points * size > _MOST_TERMS else _grouped_log_moment(mechanism, 1 - order, step, points) / (order - 1)
    return min(unsampled, max(remove, min(add, most)))


def _grouped_log_moment(mechanism: GroupSum, power: float, step: float, points: int) -> float:
    """Return log E_Q R^power for a power above 1 or below 0."""
    size, noise, rate = mechanism.size, mechanism.noise_multiplier, mechanism.sampling_rate
    j = np.arange(1, size + 1)
    logs = np.array([log_binomial(size, int(i)) for i in j]) + j * np.log(rate) + (size - j) * np.log1p(-rate)
    x = np.arange(points + 1) * step - TAIL
    found = np.empty(len(x))
    for low in range(0, len(x), _AT_ONCE):
        part = slice(low, low + _AT_ONCE)
        exponents = j[:, None] * x[None, part] / noise - (j * j / (2 * noise**2))[:, None]
        excess = np.exp(logs) @ np.expm1(np.minimum(exponents, 300))
        far = np.logaddexp.reduce(logs[:, None] + exponents, axis=0)
        far = np.logaddexp(far, size * np.log1p(-rate))
        log_ratio = np.where(exponents.max(axis=0) > 300, far, np.log1p(excess))
        found[part] = _log_excess(excess, log_ratio, np.array(power))
    weights = np.log(step / np.sqrt(2 * np.pi)) - x * x / 2
    return float(_log1p_of_sums((found + weights)[None, :])[0])


def _log_convex_excess(rates: Floats, log_ratios: Floats, order: Floats) -> Floats:
    u = rates * np.expm1(np.minimum(log_ratios, 300))
    far = log_ratios + np.log(rates + (1 - rates) * np.exp(-np.maximum(log_ratios, 0)))
    return _log_excess(u, np.where(log_ratios > 300, far, np.log1p(u)), order)


def _log_excess(u: Floats, log_one_plus_u: Floats, order: Floats) -> Floats:
    """Return log of (1+u)^alpha - 1 - alpha u, for alpha above 1 or below 0."""
    powers = order * log_one_plus_u
    with np.errstate(over="ignore", invalid="ignore"):  # only used where u is small
        series = 1 + u * (order - 2) / 3 * (1 + u * (order - 3) / 4 * (1 + u * (order - 4) / 5))
        small = order * (order - 1) / 2 * u * u * series
    near = np.where(np.abs(u) * (np.abs(order) + 1) < 1e-3, small, np.expm1(np.minimum(powers, 40)) - order * u)
    large = powers > 40
    with np.errstate(divide="ignore", invalid="ignore"):
        log_near = np.log(np.where(large, 1.0, near))
        # u and alpha have one sign where the power is large
        linear = np.log(np.abs(order)) + np.log(np.abs(np.expm1(-log_one_plus_u))) + log_one_plus_u
        log_large = powers + np.log1p(-np.exp(np.minimum(linear - powers, -1e-300)))
    return np.where(large, log_large, log_near)


def _log1p_of_sums(logs: Floats) -> Floats:
    """Return log(1 + sum of exp) along the last axis, without overflow."""
    tops = np.maximum(logs.max(axis=-1), 0.0)
    sums = np.exp(logs - tops[:, None]).sum(axis=-1)
    return np.where(tops > 0, tops + np.log(np.exp(-tops) + sums), np.log1p(sums))
