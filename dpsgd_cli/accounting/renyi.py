"""Renyi divergences of single releases, order by order, in plain floats.

For queries about a few mechanisms, which must answer before NumPy would be loaded; `renyi_arrays.py` computes the same
for many mechanisms at once. Composition and conversion are in `accountants/rdp.py`.

Notation: alpha the order (> 1), z the noise multiplier, q the sampling rate, p0 = N(0, z^2), p1 = N(1, z^2).
"""

from __future__ import annotations

import math
from functools import lru_cache

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, GroupSum
from dpsgd_cli.common.plugins import named

TAIL = 9.0
"""Standard deviations beyond the extreme peaks of an integrand where integration stops (relative loss below 1e-17)."""


LEAST_NOISE = 0.1


def gaussian_divergence(noise_multiplier: float, order: float) -> float:
    """Return D_alpha(p1 || p0) = alpha / (2 z^2). Source: Mironov 2017, Proposition 7."""
    variance = noise_multiplier * noise_multiplier
    return order / (2 * variance) if variance > 0 else math.inf


def poisson_gaussian_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return D_alpha((1-q) p0 + q p1 || p0), the direction in which Poisson sampling attains the larger divergence.

    Guarantee: the exact Renyi divergence of a Poisson-sampled Gaussian sum, to 1e-11 relative. Below z = 0.1, where
    sampling hardly helps, that of the unsampled one, which is never smaller (divergences are quasi-convex).
    Source: Mironov, Talwar and Zhang 2019, Theorem 5 (direction), section 3.3 (integer orders).
    """
    if sampling_rate == 0:
        return 0.0
    if sampling_rate == 1 or noise_multiplier < LEAST_NOISE:
        return gaussian_divergence(noise_multiplier, order)
    terms_are_fewer = order == int(order) and order <= integration_points(noise_multiplier, order)
    moment = _integer_log_moment if terms_are_fewer else _integrated_log_moment
    return moment(sampling_rate, noise_multiplier, order) / (order - 1)


def pure_divergence(epsilon: float, order: float, bounded_range: bool = False) -> float:
    """Return the largest Renyi divergence of an epsilon-DP release: that of randomised response.

    With `bounded_range` (exponential mechanism) also at most alpha epsilon^2 / 8. Sources: Mironov 2017, Proposition 5;
    Kairouz, Oh and Viswanath 2017 (randomised response dominates); Cesar and Rogers 2021, Lemma 3.2.
    """
    if epsilon == 0:
        return 0.0
    log_large = -math.log1p(math.exp(-epsilon))
    # p e^x + (1-p) e^-x - 1 with x = (alpha-1) eps and (1-p) / p = e^-eps, as a product: nothing cancels
    excess = order - 1
    if excess * epsilon < 30:
        surplus = math.exp(log_large) * math.expm1(excess * epsilon) * -math.expm1(-order * epsilon)
        divergence = math.log1p(surplus) / excess
    else:
        divergence = min(
            epsilon, epsilon + (log_large + math.log1p(math.exp(-epsilon - 2 * excess * epsilon))) / excess
        )
    return min(divergence, order * epsilon**2 / 8) if bounded_range else divergence


def laplace_divergence(epsilon: float, order: float) -> float:
    """Return the Renyi divergence of one number plus Laplace noise of scale sensitivity / `epsilon`.

    log(alpha/(2 alpha - 1) e^((alpha-1) eps) + (alpha-1)/(2 alpha - 1) e^(-alpha eps)) / (alpha - 1): Mironov 2017,
    Proposition 6.

    >>> laplace_divergence(2.0, 2.0) < pure_divergence(2.0, 2.0)
    True
    """
    excess, share = order - 1, order / (2 * order - 1)
    if excess * epsilon < 30:
        # minus 1 and without the terms linear in epsilon, which cancel each other
        surplus = share * _expm1_less(excess * epsilon) + excess / (2 * order - 1) * _expm1_less(-order * epsilon)
        return math.log1p(surplus) / excess
    rest = (1 - share) / share * math.exp(-(2 * order - 1) * epsilon)
    return min(epsilon, epsilon + (math.log(share) + math.log1p(rest)) / excess)


def _expm1_less(x: float) -> float:
    """Return e^x - 1 - x >= 0, to 1e-13 relative."""
    if abs(x) > 0.01:
        return math.expm1(x) - x
    return x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))


def log_binomial(n: float, k: float) -> float:
    """Return log of n choose k, for 0 <= k <= n."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _integer_log_moment(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return log E_{p0} (1 - q + q p1/p0)^alpha for integer alpha.

    The binomial weights add up to 1, so the moment minus 1 is a sum of positive terms, and nothing cancels.
    """
    alpha = int(order)
    log_q, log_rest = math.log(sampling_rate), math.log1p(-sampling_rate)
    half_precision = 1 / (2 * noise_multiplier**2)
    logs = []
    for k in range(2, alpha + 1):
        exponent = k * (k - 1) * half_precision
        gain = math.log(math.expm1(exponent)) if exponent < 30 else exponent
        logs.append(log_binomial(alpha, k) + k * log_q + (alpha - k) * log_rest + gain)
    return log1p_of_sum(logs)


def _integrated_log_moment(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return log E_{p0} (1 - q + q p1/p0)^alpha for any alpha > 1, by the trapezoidal rule in units of z.

    With u = q (p1/p0 - 1), E_{p0} u = 0, so the moment minus 1 is the expectation of (1+u)^alpha - 1 - alpha u >= 0:
    again nothing cancels. The integrand is analytic up to the zeros of 1 + u at height pi z, so that the rule
    converges geometrically in 1/step (Trefethen and Weideman 2014, Theorem 5.1).
    """
    step = trapezoid_step(noise_multiplier)
    points = integration_points(noise_multiplier, order)
    scale = math.log(step / math.sqrt(2 * math.pi))
    logs = []
    for i in range(points + 1):
        x = i * step - TAIL
        log_ratio = x / noise_multiplier - 1 / (2 * noise_multiplier**2)
        log_value = log_convex_excess(sampling_rate, log_ratio, order)
        logs.append(log_value - x * x / 2 + scale)
    return log1p_of_sum(logs)


def trapezoid_step(noise_multiplier: float) -> float:
    """Return a step with error below e^-60 of the integral.

    Moving the path up by y < pi z, the half-width of the strip of analyticity, multiplies the Gaussian by e^(y^2/2) and
    the error by e^(-2 pi y / step); wider strips than sqrt(120) gain nothing.
    """
    height = min(math.pi * noise_multiplier, math.sqrt(120))
    return min(0.5, 2 * math.pi * height / (60 + height**2 / 2))


def integration_points(noise_multiplier: float, order: float) -> int:
    """Return the number of steps that cover the Gaussian and the farthest peak, at alpha / z."""
    return int((2 * TAIL + order / noise_multiplier) / trapezoid_step(noise_multiplier)) + 1


def log_convex_excess(sampling_rate: float, log_ratio: float, order: float) -> float:
    """Return log of (1+u)^alpha - 1 - alpha u for u = q (e^log_ratio - 1); -inf where it underflows."""
    if log_ratio > 300:
        log_one_plus_u = log_ratio + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-log_ratio))
        return _log_excess(math.inf, log_one_plus_u, order)
    u = sampling_rate * math.expm1(log_ratio)
    return _log_excess(u, math.log1p(u), order)


def _log_excess(u: float, log_one_plus_u: float, order: float) -> float:
    """Return log of (1+u)^alpha - 1 - alpha u for alpha above 1 or below 0; -inf where it underflows."""
    power = order * log_one_plus_u
    if power > 40 or u == math.inf:
        if order < 0:
            return power
        linear = math.log(order) + log_one_plus_u
        return power + math.log1p(-math.exp(min(linear - power, -1e-300)))
    if abs(u) * (abs(order) + 1) < 1e-3:
        series = 1 + u * (order - 2) / 3 * (1 + u * (order - 3) / 4 * (1 + u * (order - 4) / 5))
        value = order * (order - 1) / 2 * u * u * series
    else:
        value = math.expm1(power) - order * u
    return math.log(value) if value > 0 else -math.inf


def log1p_of_sum(logs: list[float]) -> float:
    """Return log(1 + sum of exp(logs)) without overflow."""
    top = max(logs)
    if top < 600:
        return math.log1p(math.fsum(map(math.exp, logs)))
    return top + math.log(math.exp(-top) + math.fsum(math.exp(value - top) for value in logs))


def fixed_size_gaussian_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return a bound on the Renyi divergence of a Gaussian sum over a batch of fixed size, under replace-one.

    `noise_multiplier` is relative to the replace-one sensitivity. Guarantee: the divergence of the losses that dominate
    such a batch (`losses._without_replacement`): Renyi divergences are integrals of hockey-stick divergences
    with weights that are no less than 0. Let R = 1 - q + q e^((x - 1/2) / z^2), and E_0 the mean over x > 1/2 of
    N(0, z^2). The losses log R have masses R, the losses -log R masses 1, and loss 0 has the rest of the mass:

        e^((alpha - 1) D) - 1 = E_0 [R^alpha - R + R^(1 - alpha) - 1] = E_0 [f_alpha(R - 1) + f_(1 - alpha)(R - 1)],

    f_b(u) = (1 + u)^b - 1 - b u >= 0: nothing cancels. Computed by Gauss's rule on panels as wide as the distance pi z
    (in units of z) of the zeros of R, which leaves an error below 1e-15 of a panel.
    """
    if sampling_rate == 0:
        return 0.0
    unsampled = gaussian_divergence(noise_multiplier, order)
    if sampling_rate == 1 or noise_multiplier < LEAST_NOISE:
        return unsampled
    start, width = 1 / (2 * noise_multiplier), min(1.0, math.pi * noise_multiplier)
    panels = math.ceil((TAIL + order / noise_multiplier - min(start, TAIL)) / width) + 1
    if panels > _MOST_PANELS:
        return unsampled
    logs = []
    for panel in range(panels):
        for node, weight in gauss_rule():
            x = start + (panel + node) * width
            u = sampling_rate * math.expm1(ratio) if (ratio := (x - start) / noise_multiplier) < 300 else math.inf
            far = ratio + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-ratio))
            log_ratio = far if u == math.inf else math.log1p(u)
            scale = math.log(weight * width / math.sqrt(2 * math.pi)) - x * x / 2
            logs += [_log_excess(u, log_ratio, power) + scale for power in (order, 1 - order)]
    # Sampling never adds to the divergence (it is jointly quasi-convex).
    return min(unsampled, log1p_of_sum(logs) * (1 + 1e-12) / (order - 1))


_MOST_PANELS = 600
_NODES = 16


@lru_cache(maxsize=1)
def gauss_rule() -> tuple[tuple[float, float], ...]:
    """Return nodes and weights of Gauss and Legendre's rule on [0, 1], by Newton's method."""
    found = []
    for i in range(_NODES):
        x = math.cos(math.pi * (i + 0.75) / (_NODES + 0.5))
        for _ in range(6):
            before, value = 1.0, x
            for n in range(2, _NODES + 1):
                before, value = value, ((2 * n - 1) * x * value - (n - 1) * before) / n
            slope = _NODES * (x * value - before) / (x * x - 1)
            x -= value / slope
        found.append(((1 + x) / 2, 1 / ((1 - x * x) * slope * slope)))
    return tuple(found)


def replaced_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Renyi divergence of a Poisson-sampled Gaussian sum of which one record is replaced.

    `noise_multiplier` is relative to the replace-one sensitivity. Guarantee: that of the pair that attains the largest
    hockey-stick divergences (`losses._replaced`): P = (1 - q) N(0) + q N(1/2), Q = (1 - q) N(0) + q N(-1/2).
    With u = P / Q - 1, E_Q u = 0, so the moment less 1 is E_Q of (1+u)^alpha - 1 - alpha u >= 0. By the trapezoidal
    rule: within pi z of the real axis, in units of z, |P| is at most as on it and |Q| at least 2^(-1/2) of that, so the
    step pays for a factor of 2^((alpha - 1) / 2).
    """
    if sampling_rate == 0:
        return 0.0
    unsampled = gaussian_divergence(noise_multiplier, order)
    if sampling_rate == 1 or noise_multiplier < LEAST_NOISE:
        return unsampled
    height = min(math.pi * noise_multiplier, math.sqrt(120))
    step = min(0.5, 2 * math.pi * height / (60 + height**2 / 2 + (order - 1) * math.log(2) / 2))
    half = 1 / (2 * noise_multiplier)
    points = int((2 * TAIL + (order + 1) * half) / step) + 1
    if points > _NODES * _MOST_PANELS:
        return unsampled
    logs = []
    for i in range(points + 1):
        x = i * step - TAIL - half
        one, other = (sign * x * half - half * half / 2 for sign in (1, -1))
        logs_of = [_log_mixed(sampling_rate, ratio) for ratio in (one, other)]
        # (N(1/2) - N(-1/2)) over N(0), and over the mixture
        gap = max(one, other) + math.log(-math.expm1(-abs(one - other))) if one != other else -math.inf
        size = math.log(sampling_rate) + gap - logs_of[1]
        u = math.inf if size > 600 else math.copysign(math.exp(size), one - other)
        scale = logs_of[1] - x * x / 2 + math.log(step / math.sqrt(2 * math.pi))
        logs.append(_log_excess(u, logs_of[0] - logs_of[1], order) + scale)
    return min(unsampled, log1p_of_sum(logs) / (order - 1))


def _log_mixed(sampling_rate: float, log_ratio: float) -> float:
    """Return log(1 - q + q e^log_ratio)."""
    if log_ratio < 300:
        return math.log1p(sampling_rate * math.expm1(log_ratio))
    return log_ratio + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-log_ratio))


def poisson_divergence(mechanism: GaussianSum, order: float) -> float:
    """Return the bound for Poisson batches.

    For a record that is added or removed: Mironov, Talwar and Zhang 2019. For a replaced one: see `_poisson`.
    """
    if isinstance(mechanism, GroupSum) and 0 < mechanism.sampling_rate < 1 and mechanism.noise_multiplier > 0:
        found: float = named("dpsgd_cli.accounting.renyi_arrays:grouped_divergence")(mechanism, order)
        return found
    if isinstance(mechanism, GroupSum):
        mechanism = GaussianSum(mechanism.unsampled_noise, mechanism.adjacency, "poisson", mechanism.sampling_rate)
    return _poisson(mechanism.adjacency, mechanism.sampling_rate, mechanism.noise_multiplier, order)


def fixed_divergence(mechanism: GaussianSum, order: float) -> float:
    """Return the bound for batches of fixed size."""
    return fixed_size_gaussian_divergence(mechanism.sampling_rate, mechanism.noise_multiplier, order)


def _poisson(adjacency: Adjacency, rate: float, noise: float, order: float) -> float:
    """Return the bound for Poisson batches of `rate` and `noise`.

    A record comes or goes, or is replaced.
    """
    if NEIGHBOURS[adjacency].replaced:
        return replaced_divergence(rate, noise, order)
    return poisson_gaussian_divergence(rate, noise, order)
