"""Bounds on the Renyi divergence of one use, by kind of batching: from a mechanism and an order (> 1). Plain floats.

Each is the formula of `renyi.py` whose theorem covers the mechanism's adjacency; the worse of both directions.
"""

from __future__ import annotations

import math

from dpsgd_cli.privacy import renyi
from dpsgd_cli.privacy.mechanism import GaussianSum, TruncatedSum
from dpsgd_cli.recipe.batching import NEIGHBOURS, Adjacency


def poisson(mechanism: GaussianSum, order: float) -> float:
    """Mironov, Talwar and Zhang 2019 for a record that comes or goes; of a replaced one `_replaced`."""
    return _poisson(mechanism.adjacency, mechanism.sampling_rate, mechanism.noise_multiplier, order)


def fixed(mechanism: GaussianSum, order: float) -> float:
    """Wang, Balle and Kasiviswanathan 2019."""
    return renyi.fixed_size_gaussian_divergence(mechanism.sampling_rate, mechanism.noise_multiplier, order)


def truncated(mechanism: GaussianSum, order: float) -> float:
    """Of the pair that says whether the batch overflowed (`TruncatedSum`): powers of ratios add up, by probability."""
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
    """A replaced record of a Poisson batch is one of a fixed batch, in the place of a record that is nothing."""
    if NEIGHBOURS[adjacency].replaced:
        return renyi.fixed_size_gaussian_divergence(rate, noise, order)
    return renyi.poisson_gaussian_divergence(rate, noise, order)


def overflow_probability(mechanism: TruncatedSum) -> float:
    """Pr[Binomial(N, q) >= B], from above: by its terms, and a geometric series where those are negligible.

    >>> two_of_three = TruncatedSum(1.0, "add-remove", "truncated-poisson", 0.5, records=3, largest_batch=2)
    >>> round(overflow_probability(two_of_three), 5)
    0.5
    """
    n, rate, least = mechanism.records, mechanism.sampling_rate, mechanism.largest_batch
    if least > n or rate == 0:
        return 0.0
    if rate == 1:
        return 1.0
    log_choices = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1)
    first = log_choices + least * math.log(rate) + (n - least) * math.log1p(-rate)
    total, term = 0.0, 1.0
    for size in range(least, n + 1):
        total += term
        ratio = (n - size) * rate / ((size + 1) * (1 - rate))
        term *= ratio
        if ratio < 1 and term < 1e-18 * total * (1 - ratio):
            total += term / (1 - ratio)
            break
    # a million records leave log gamma with nine digits
    return min(1.0, math.exp(min(first + math.log(total), 0.0)) * (1 + 1e-6))
