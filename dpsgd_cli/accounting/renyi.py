"""Renyi divergences of one use of a mechanism, in the worse of the two directions, from its numbers.

Notation: alpha the order (> 1), z the noise multiplier, q the sampling rate, p0 = N(0, z^2), p1 = N(1, z^2). With
u = dP/dQ - 1 and f_b(u) = (1 + u)^b - 1 - b u >= 0, a divergence is log(1 + E_Q f_alpha(u)) / (alpha - 1), because
E_Q u = 0. Nothing cancels in that, so small divergences keep their digits.

Integrals over x, in units of z, are sums by the trapezoidal rule. The integrands are analytic up to the zeros of 1 + u,
so that the rule converges geometrically in 1/step (Trefethen and Weideman 2014, Theorem 5.1). Sampling never adds to a
divergence (it is jointly quasi-convex), so that the unsampled Gaussian is a bound where an integral would take too many
points.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating]
TAIL = 9.0
"""Standard deviations beyond the extreme peaks of an integrand where integration stops (relative loss below 1e-17)."""
LEAST_NOISE = 0.1
"""Below it sampling hardly helps, and the unsampled Gaussian is the bound."""
_MOST_NUMBERS, _MOST_POINTS = 1 << 22, 9600
"""Most numbers of arrays of several mechanisms or records, and most points where each order takes its own."""
_NODES = 16


def gaussian_divergence(noise_multiplier: float, order: float) -> float:
    """Return D_alpha(p1 || p0) = alpha / (2 z^2). Source: Mironov 2017, Proposition 7."""
    variance = noise_multiplier * noise_multiplier
    return order / (2 * variance) if variance > 0 else math.inf


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
        rest = math.log1p(math.exp(-epsilon - 2 * excess * epsilon))
        divergence = min(epsilon, epsilon + (log_large + rest) / excess)
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


def poisson_gaussian_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return D_alpha((1-q) p0 + q p1 || p0), the direction in which Poisson sampling attains the larger divergence.

    Guarantee: the exact Renyi divergence of a Poisson-sampled Gaussian sum, to 1e-11 relative, or that of the unsampled
    one. Source: Mironov, Talwar and Zhang 2019, Theorem 5 (direction).
    """
    return float(poisson_gaussian_divergences(sampling_rate, noise_multiplier, order)[0])


def poisson_gaussian_divergences(sampling_rates: ArrayLike, noise_multipliers: ArrayLike, orders: ArrayLike) -> Floats:
    """Return `poisson_gaussian_divergence` for M mechanisms, shape (M,); numbers stand for all M.

    1 + u has its zeros at height pi z.
    """
    given = np.broadcast_arrays(sampling_rates, noise_multipliers, orders)
    rates, noises, orders = (np.atleast_1d(own).astype(float) for own in given)
    with np.errstate(divide="ignore", over="ignore"):
        found = np.where(rates == 0, 0.0, orders / (2 * noises**2))
    sampled = np.flatnonzero((rates > 0) & (rates < 1) & (noises >= LEAST_NOISE))
    steps = _step(noises[sampled])
    points = ((2 * TAIL + orders[sampled] / noises[sampled]) / steps).astype(int) + 1
    sampled, steps, points = (own[points < _MOST_NUMBERS] for own in (sampled, steps, points))
    pieces = -(-len(sampled) * int(points.max(initial=1)) // _MOST_NUMBERS)
    for part in np.array_split(np.arange(len(sampled)), pieces) if pieces else ():
        q, z, alpha = (own[sampled[part], None] for own in (rates, noises, orders))
        x = np.arange(points[part].max() + 1) * steps[part, None] - TAIL  # (M, points)
        logs = _log_excess(*_sampled(q, x / z - 1 / (2 * z**2)), alpha) - x * x / 2
        log_moments = _log1p_of_sums(logs + np.log(steps[part, None] / math.sqrt(2 * math.pi)))
        found[sampled[part]] = log_moments / (alpha[:, 0] - 1)
    return found


def fixed_size_gaussian_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return a bound on the Renyi divergence of a Gaussian sum over a batch of fixed size, under replace-one.

    `noise_multiplier` is relative to the replace-one sensitivity. Guarantee: the divergence of the losses that dominate
    such a batch (`losses.fixed_pair`): Renyi divergences are integrals of hockey-stick divergences
    with weights that are no less than 0. Let R = 1 - q + q e^((x - 1/2) / z^2), and E_0 the mean over x > 1/2 of
    N(0, z^2). The losses log R have masses R, the losses -log R masses 1, and loss 0 has the rest of the mass:

        e^((alpha - 1) D) - 1 = E_0 [R^alpha - R + R^(1 - alpha) - 1] = E_0 [f_alpha(R - 1) + f_(1 - alpha)(R - 1)].

    Computed by Gauss's rule on panels as wide as the distance pi z (in units of z) of the zeros of R, which leaves an
    error below 1e-15 of a panel.
    """
    if sampling_rate == 0:
        return 0.0
    unsampled = gaussian_divergence(noise_multiplier, order)
    if sampling_rate == 1 or noise_multiplier < LEAST_NOISE:
        return unsampled
    start, width = 1 / (2 * noise_multiplier), min(1.0, math.pi * noise_multiplier)
    panels = math.ceil((TAIL + order / noise_multiplier - min(start, TAIL)) / width) + 1
    if panels * _NODES > _MOST_POINTS:
        return unsampled
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    x = start + width * (np.arange(panels)[:, None] + (1 + nodes) / 2)
    own = _sampled(sampling_rate, (x - start) / noise_multiplier)
    scale = np.log(weights / 2 * width / math.sqrt(2 * math.pi)) - x * x / 2
    logs = np.stack([_log_excess(*own, power) + scale for power in (order, 1 - order)])
    return min(unsampled, float(_log1p_of_sums(logs.reshape(1, -1))[0]) * (1 + 1e-12) / (order - 1))


def replaced_divergence(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return the Renyi divergence of a Poisson-sampled Gaussian sum of which one record is replaced.

    `noise_multiplier` is relative to the replace-one sensitivity. Guarantee: that of the pair that attains the largest
    hockey-stick divergences (`losses.replaced_pair`): P = (1 - q) N(0) + q N(1/2), Q = (1 - q) N(0) + q N(-1/2). Within
    pi z of the real axis, in units of z, |P| is at most as on it and |Q| at least 2^(-1/2) of that, so the step pays
    for a factor of 2^((alpha - 1) / 2).
    """
    if sampling_rate == 0:
        return 0.0
    unsampled = gaussian_divergence(noise_multiplier, order)
    if sampling_rate == 1 or noise_multiplier < LEAST_NOISE:
        return unsampled
    step, half = float(_step(noise_multiplier, order)), 1 / (2 * noise_multiplier)
    points = int((2 * TAIL + (order + 1) * half) / step) + 1
    if points > _MOST_POINTS:
        return unsampled
    x = np.arange(points + 1) * step - TAIL - half
    one, other = (sign * x * half - half * half / 2 for sign in (1, -1))
    log_p, log_q = (_sampled(sampling_rate, ratio)[1] for ratio in (one, other))
    with np.errstate(divide="ignore", over="ignore"):
        # log |P - Q|, over N(0)
        gap = np.log(sampling_rate) + np.maximum(one, other) + np.log(-np.expm1(-np.abs(one - other)))
        u = np.copysign(np.exp(gap - log_q), one - other)
    logs = _log_excess(u, log_p - log_q, order) + log_q - x * x / 2 + math.log(step / math.sqrt(2 * math.pi))
    return min(unsampled, float(_log1p_of_sums(logs[None])[0]) / (order - 1))


def grouped_divergence(size: int, sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """Return the larger Renyi divergence of the pair of `mechanism.GroupSum`, a Poisson batch of K = `size` records.

    R(x) = sum_j w_j e^(jx/z - j^2/2z^2), x in units of z. At x + iy all terms lie in a sector of angle K |y| / z. Below
    pi, R has no zeros and |R(x + iy)| <= R(x), so the step is that of one record with noise z / K, by the same bound,
    for E_Q R^alpha. Below pi / 2 also |R(x + iy)| >= R(x) / sqrt(2), so for E_Q R^(1 - alpha) the error gains a factor
    of at most 2^((alpha - 1) / 2), which its step pays for. The other direction is at most -K log(1 - q), as R is at
    least (1 - q)^K. The unsampled sum of all K dominates, and serves where too many points would be needed.
    """
    if sampling_rate == 0:
        return 0.0
    unsampled = gaussian_divergence(noise_multiplier / size, order)
    if sampling_rate == 1 or noise_multiplier == 0:
        return unsampled
    own = size, sampling_rate, noise_multiplier
    step = float(_step(noise_multiplier / size))
    points = int((2 * TAIL + order * size / noise_multiplier) / step) + 1
    if points * size > _MOST_NUMBERS:
        return unsampled
    remove = _grouped_log_moment(*own, order, step, points) / (order - 1)
    most = -size * math.log1p(-sampling_rate)
    if remove >= most:
        return min(unsampled, remove)
    step = float(_step(noise_multiplier / size / 2, order))
    points = int((2 * TAIL + 1 / noise_multiplier) / step) + 1
    add = most if points * size > _MOST_NUMBERS else _grouped_log_moment(*own, 1 - order, step, points) / (order - 1)
    return min(unsampled, max(remove, min(add, most)))


def _grouped_log_moment(size: int, rate: float, noise: float, power: float, step: float, points: int) -> float:
    """Return log E_Q R^power for a power above 1 or below 0."""
    j = np.arange(1, size + 1)[:, None]
    weights = np.cumsum(np.log((size + 1 - j) / j), axis=0) + j * np.log(rate) + (size - j) * np.log1p(-rate)
    x = np.arange(points + 1) * step - TAIL
    exponents = j * x / noise - j * j / (2 * noise**2)
    excess = (np.exp(weights) * np.expm1(np.minimum(exponents, 300))).sum(axis=0)
    far = np.logaddexp(np.logaddexp.reduce(weights + exponents, axis=0), size * np.log1p(-rate))
    log_ratio = np.where(exponents.max(axis=0) > 300, far, np.log1p(excess))
    logs = _log_excess(excess, log_ratio, power) - x * x / 2 + math.log(step / math.sqrt(2 * math.pi))
    return float(_log1p_of_sums(logs[None])[0])


def _step(noise: ArrayLike, order: float = 1.0) -> Floats:
    """Return a step of the trapezoidal rule with error below e^-60 of the integral, in units of `noise`.

    Moving the path up by y < pi z, the half-width of the strip of analyticity, multiplies the Gaussian by e^(y^2/2) and
    the error by e^(-2 pi y / step); wider strips than sqrt(120) gain nothing. Above order 1 the step also pays for a
    factor of 2^((order - 1) / 2).
    """
    height = np.minimum(np.pi * np.asarray(noise), math.sqrt(120))
    return np.asarray(np.minimum(0.5, 2 * np.pi * height / (60 + height**2 / 2 + (order - 1) * math.log(2) / 2)))


def _sampled(rate: Floats | float, log_ratio: Floats) -> tuple[Floats, Floats]:
    """Return u = q (e^log_ratio - 1), cut off at e^300, and log(1 + u)."""
    u = rate * np.expm1(np.minimum(log_ratio, 300))
    far = log_ratio + np.log(rate + (1 - rate) * np.exp(-np.maximum(log_ratio, 0)))
    return u, np.where(log_ratio > 300, far, np.log1p(u))


def _log_excess(u: Floats, log_one_plus_u: Floats, order: Floats | float) -> Floats:
    """Return log of (1+u)^alpha - 1 - alpha u, for alpha above 1 or below 0; -inf where it underflows."""
    powers = order * log_one_plus_u
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        series = 1 + u * (order - 2) / 3 * (1 + u * (order - 3) / 4 * (1 + u * (order - 4) / 5))
        small = order * (order - 1) / 2 * u * u * series
        near = np.where(np.abs(u) * (np.abs(order) + 1) < 1e-3, small, np.expm1(np.minimum(powers, 40)) - order * u)
        # u and alpha have one sign where the power is large
        linear = np.log(np.abs(order)) + np.log(np.abs(np.expm1(-log_one_plus_u))) + log_one_plus_u
        log_large = powers + np.log1p(-np.exp(np.minimum(linear - powers, -1e-300)))
        return np.where(powers > 40, log_large, np.log(np.maximum(near, 0.0)))


def _log1p_of_sums(logs: Floats) -> Floats:
    """Return log(1 + sum of exp) along the last axis, without overflow."""
    tops = np.maximum(logs.max(axis=-1), 0.0)
    sums = np.exp(logs - tops[:, None]).sum(axis=-1)
    return np.where(tops > 0, tops + np.log(np.exp(-tops) + sums), np.log1p(sums))
