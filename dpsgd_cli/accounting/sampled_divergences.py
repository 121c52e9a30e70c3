"""Bounds on the Renyi divergence of one use, by kind of batching: from a mechanism and an order (> 1). Plain floats.

Each is the formula of `renyi.py` whose theorem covers the mechanism's adjacency, in the worse of both directions.
"""

from __future__ import annotations

import math
import sys
from decimal import Decimal, localcontext
from functools import lru_cache

from dpsgd_cli.accounting import renyi
from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, TruncatedSum


def poisson(mechanism: GaussianSum, order: float) -> float:
    """Return the bound for Poisson batches.

    For a record that is added or removed: Mironov, Talwar and Zhang 2019. For a replaced one: see `_poisson`.
    """
    return _poisson(mechanism.adjacency, mechanism.sampling_rate, mechanism.noise_multiplier, order)


def fixed(mechanism: GaussianSum, order: float) -> float:
    """Return the bound for batches of fixed size: Wang, Balle and Kasiviswanathan 2019."""
    return renyi.fixed_size_gaussian_divergence(mechanism.sampling_rate, mechanism.noise_multiplier, order)


def truncated(mechanism: GaussianSum, order: float) -> float:
    """Return the bound of the pair that reveals whether the batch overflowed (`TruncatedSum`).

    Powers of ratios add up, weighted by probability.
    """
    assert isinstance(mechanism, TruncatedSum)
    rate, overflow = mechanism.sampling_rate, overflow_probability(mechanism)
    usual = _poisson(mechanism.adjacency, rate, mechanism.noise_multiplier, order)
    if overflow == 0 or rate == 0:
        return usual
    rare = renyi.fixed_size_gaussian_divergence(rate, mechanism.overflowing_noise, order)
    if math.isinf(usual + rare):
        return math.inf
    # log(1 + sum of w_i (e^x_i - 1)), which keeps small divergences
    low, high = (order - 1) * usual, (order - 1) * rare
    if high < 600:
        return math.log1p((1 - overflow) * math.expm1(low) + overflow * math.expm1(high)) / (order - 1)
    top = max(low, high)
    total = (1 - overflow) * math.exp(low - top) + overflow * math.exp(high - top)
    return (top + math.log(total)) / (order - 1)


def _poisson(adjacency: Adjacency, rate: float, noise: float, order: float) -> float:
    """Return the bound for Poisson batches of `rate` and `noise`.

    A replaced record of a Poisson batch is one of a fixed batch that replaces a null record.
    """
    if NEIGHBOURS[adjacency].replaced:
        return renyi.fixed_size_gaussian_divergence(rate, noise, order)
    return renyi.poisson_gaussian_divergence(rate, noise, order)


@lru_cache(maxsize=1024)
def overflow_probability(mechanism: TruncatedSum) -> float:
    """Return Pr[Binomial(N, q) >= B] from above, for N up to 2^53.

    It is at most 2e-8 more, relative, within 1e6 terms of the sum.
    Terms from B on fall by ratios that fall themselves, so a geometric series bounds the terms that are not summed. One
    step of the loop loses at most 8 units of 2^-53, all of them less than the last factor adds.

    >>> two_of_three = TruncatedSum(1.0, "add-remove", "truncated-poisson", 0.5, records=3, largest_batch=2)
    >>> round(overflow_probability(two_of_three), 5)
    0.5
    """
    n, rate, least = mechanism.records, mechanism.sampling_rate, mechanism.largest_batch
    if least > n or rate == 0:
        return 0.0
    if rate == 1:
        return 1.0
    total, term = 0.0, 1.0
    for size in range(least, n + 1):
        total += term
        ratio = (n - size) * rate / ((size + 1) * (1 - rate))
        term *= ratio
        if ratio < 1 and (term < 1e-18 * total * (1 - ratio) or size - least >= _MOST_TERMS):
            total += term / (1 - ratio)
            break
    return min(1.0, max(_binomial_term(n, rate, least) * total * (1 + 2e-8), sys.float_info.min))


_MOST_TERMS = 1_000_000


def _binomial_term(n: int, rate: float, size: int) -> float:
    """Return Pr[Binomial(n, rate) = size], from above to 1e-12.

    Computed in decimal digits, with factorials between Stirling's bounds:
    log m! = (m + 1/2) log m - m + log(2 pi) / 2 + s, 1/(12 m) - 1/(360 m^3) < s < 1/(12 m) - 1/(360 m^3) +
    1/(1260 m^5) (Robbins 1955; the series alternates). Products up to 60 are exact.
    """
    with localcontext() as digits:
        digits.prec, digits.Emin, digits.Emax = 60, -(10**17), 10**17
        success = Decimal(rate)
        log = _log_factorial(n, above=True) - _log_factorial(size, above=False) - _log_factorial(n - size, above=False)
        log += size * success.ln() + (n - size) * (1 - success).ln()
        return 0.0 if log < -800 else math.nextafter(float(log.exp()), 1.0)


def _log_factorial(m: int, above: bool) -> Decimal:
    """Return log m! from above or from below, to the digits of the context and 1/(1260 m^5)."""
    if m <= 60:
        return Decimal(math.factorial(m)).ln()
    x = Decimal(m)
    bound = 1 / (12 * x) - 1 / (360 * x**3) + (1 / (1260 * x**5) if above else 0)
    return (x + Decimal("0.5")) * x.ln() - x + _TWO_PI.ln() / 2 + bound


_TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918")
