"""Renyi divergences of many Poisson-sampled Gaussians at once. Loads NumPy; same formulas as `accounting/renyi.py`.

Not for a few mechanisms: `renyi.py` is done before NumPy has loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.renyi import TAIL, log_binomial

Floats = NDArray[np.floating]


def poisson_gaussian_divergences(sampling_rates: Floats, noise_multipliers: Floats, order: float) -> Floats:
    """Return `renyi.poisson_gaussian_divergence` for M mechanisms.

    Args: rates in (0, 1) and noise multipliers > 0, both of shape (M,); one order > 1. Returns shape (M,).
    Source: Mironov, Talwar and Zhang 2019, section 3.3.
    """
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


def _log_convex_excess(rates: Floats, log_ratios: Floats, order: Floats) -> Floats:
    u = rates * np.expm1(np.minimum(log_ratios, 300))
    far = log_ratios + np.log(rates + (1 - rates) * np.exp(-np.maximum(log_ratios, 0)))
    log_one_plus_u = np.where(log_ratios > 300, far, np.log1p(u))
    powers = order * log_one_plus_u
    with np.errstate(over="ignore", invalid="ignore"):  # only used where u is small
        series = 1 + u * (order - 2) / 3 * (1 + u * (order - 3) / 4 * (1 + u * (order - 4) / 5))
        small = order * (order - 1) / 2 * u * u * series
    near = np.where(np.abs(u) * (order + 1) < 1e-3, small, np.expm1(np.minimum(powers, 40)) - order * u)
    large = powers > 40
    with np.errstate(divide="ignore", invalid="ignore"):
        log_near = np.log(np.where(large, 1.0, near))
        log_large = powers + np.log1p(-np.exp(np.minimum(np.log(order * rates) + log_ratios - powers, -1e-300)))
    return np.where(large, log_large, log_near)


def _log1p_of_sums(logs: Floats) -> Floats:
    """Return log(1 + sum of exp) along the last axis, without overflow."""
    tops = np.maximum(logs.max(axis=-1), 0.0)
    sums = np.exp(logs - tops[:, None]).sum(axis=-1)
    return np.where(tops > 0, tops + np.log(np.exp(-tops) + sums), np.log1p(sums))
