"""Dominating losses of a noisy sum over a sample, by kind of batching: from a mechanism and the width of a cell.

Notation, C apart: P and Q are the outputs on two neighbours, q the sampling rate, z the noise multiplier, H_a(P, Q) the
hockey-stick divergence, sup over events of P - a Q. A pair dominates if its H_a is no smaller, for every a >= 0 and
in both directions; then so do compositions, adaptive ones included (Zhu, Dong and Wang 2022, Theorem 10).

Three points. Let P = (1 - q) N(u) + q N(x) and Q = (1 - q) N(u) + q N(y), all of covariance s^2 I, in any dimension.

    a >= 1:  H_a(P, Q) = q E_x (1 - a L_y - b L_u)_+, where b = (1 - q) (a - 1) / q.
    a < 1:   H_a(P, Q) = E_y (q L_x + (1 - q) (1 - a) L_u - q a)_+.

E_x is the mean under N(x) and L_y the density of N(y) over that of N(x) (in the second line over that of N(y)). Each
H_a is the mean of a convex function of a sum, with weights that are no less than 0, of exponentials of Gaussians. Each
exponential has mean 1, and the logarithms have the covariances (y - x).(u - x) / s^2 and so on. Such a mean only grows
with each of these covariances (Kahane's inequality for convex functions: Kahane 1985, "Sur le chaos multiplicatif").
So a bound on all of them bounds H_a, in any dimension. (Mixtures against one Gaussian: Choquette-Choo et al. 2024,
arXiv 2310.15526.)
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.dominating_pairs import (
    TAIL,
    Floats,
    LossMasses,
    LossPair,
    cell_masses,
    connect_dots,
    dots_around,
    gaussian_cells,
    gaussian_pair,
    loss_moments,
)
from dpsgd_cli.accounting.group_pairs import group_variance, grouped
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, GroupSum, Mechanism, PureDP, TruncatedSum
from dpsgd_cli.accounting.renyi import overflow_probability


def loss_variance(mechanism: Mechanism) -> float:
    """Return the approximate variance of the loss under P; it only sets the cell width."""
    if isinstance(mechanism, PureDP | ApproximateDP):
        return mechanism.epsilon**2
    assert isinstance(mechanism, GaussianSum), "refused by Accountant.check"
    if isinstance(mechanism, GroupSum):
        return group_variance(mechanism)
    rate = mechanism.sampling_rate if mechanism.sampled else 1.0
    own = loss_moments(rate, mechanism.noise_multiplier)[1]
    return min(own * mechanism.steps, mechanism.noise_multiplier**-2) if mechanism.by_allocation else own


def poisson(mechanism: GaussianSum, width: float) -> LossPair:
    """Return the losses of a record that is present with probability q, or of another that replaces it.

    Guarantee: given all that the others add, which both outputs share. For a record that is added or removed: N(1, z^2)
    mixed with N(0, z^2), against N(0, z^2) (Zhu, Dong and Wang 2022, Theorem 11). For a replaced one: `_replaced`.
    """
    if isinstance(mechanism, GroupSum):
        return grouped(mechanism, width)
    return _poisson(mechanism.adjacency, mechanism.sampling_rate, mechanism.noise_multiplier, width)


def fixed(mechanism: GaussianSum, width: float) -> LossPair:
    """Return the losses of a batch of fixed size, drawn without replacement, with one record replaced.

    Guarantee: let U be a batch of the others and u one of it, uniform. Without the record the batch is U; with it, the
    record has replaced u. So, given U and u, outputs are those of three points of a ball of radius C: with R the sum
    over U without u, (1 - q) N(R + u) + q N(R + x), and the same with y for x. Their covariances are at most
    (2 C)^2 / s^2 each. The losses are those of `_without_replacement`.
    """
    masses = _without_replacement(mechanism.sampling_rate, mechanism.noise_multiplier, width)
    return LossPair(masses, masses)


def truncated(mechanism: GaussianSum, width: float) -> LossPair:
    """Return the losses of a Poisson step, mixed with those of a fixed batch by the probability of an overflow.

    `TruncatedSum` has the proof.
    """
    assert isinstance(mechanism, TruncatedSum)
    overflow, rate = overflow_probability(mechanism), mechanism.sampling_rate
    usual = _poisson(mechanism.adjacency, rate, mechanism.noise_multiplier, width)
    if overflow == 0:
        return usual
    rare = _without_replacement(rate, mechanism.overflowing_noise, width)
    return LossPair(_mixed(usual.remove, rare, overflow), _mixed(usual.add, rare, overflow))


def _poisson(adjacency: Adjacency, rate: float, noise: float, width: float) -> LossPair:
    if not NEIGHBOURS[adjacency].replaced:
        return gaussian_pair(rate, noise, width)
    masses = _replaced(rate, noise, width)
    return LossPair(masses, masses)


def _without_replacement(rate: float, noise: float, width: float) -> LossMasses:
    """Return the losses whose H_a is that of the worst three points of a ball, one for each a.

    All covariances are 1 / z^2 (z in units of the ball's diameter). For a >= 1 the worst points have u = y,
    H_a((1 - q) N(0) + q N(1), N(0)), and for a < 1 they have u = x, H_a(N(1), (1 - q) N(1) + q N(0)). They are what
    Zhu, Dong and Wang 2022 state for subset sampling. No one data set attains both, and neither alone dominates (Lebeda
    et al. 2024, "Avoiding pitfalls"). So losses above 0 are those of the first and losses below 0 those of the second.
    The mass that is missing at 0 is the step that the slope of H_a takes at a = 1, (1 - q) (2 Phi(1 / 2z) - 1).
    """
    cells = gaussian_cells(rate, noise, width, least=0)
    remove = connect_dots(cells.mixed, cells.lows - cells.log_ratio, cells.gaps)
    add = connect_dots(cells.without[::-1], (cells.log_ratio - cells.highs)[::-1], cells.gaps[::-1])
    add[0] += cells.above_without
    at_none = (1 - rate) * math.erf(1 / (2 * noise) / math.sqrt(2))
    masses = np.concatenate([add[:-1], [add[-1] + at_none + remove[0]], remove[1:]])
    return LossMasses(np.concatenate([-cells.ends[:0:-1], cells.ends]), masses, cells.above_mixed)


def _replaced(rate: float, noise: float, width: float) -> LossMasses:
    """Return the losses of (1 - q) N(0) + q N(1/2) against (1 - q) N(0) + q N(-1/2), of variance z^2.

    Here u = 0, and x and y are at most C from it. Guarantee: |x - y|^2, |x|^2 and (x - y).x are at most 4 C^2, C^2 and
    2 C^2. The choice x = -y of length C attains all of them, in both directions; in units of 2 C those are 1/2 and
    -1/2. The pair is its own mirror image, and so are its losses.
    """
    half = 0.5 + TAIL * noise
    highest = math.ceil(float(_replaced_loss(np.array([half]), rate, noise)[0]) / width)
    points = np.linspace(-half, half, 1001)
    density = _replaced_density(points, rate, noise)
    loss = _replaced_loss(points, rate, noise)
    mean = float((density * loss).sum() / density.sum())
    centre = round(mean / width)
    ends = dots_around({centre, -centre}, -highest, highest)
    ends = np.unique(np.concatenate([ends, -ends]))
    x = _replaced_point(ends * width, rate, noise)
    middle, upper, lower = (cell_masses((x - place) / noise) for place in (0.0, 0.5, -0.5))
    p, base = (1 - rate) * middle + rate * upper, (1 - rate) * middle + rate * lower
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.where(base > 0, np.log1p(rate * (upper - lower) / base), (ends[1:] + ends[:-1]) * width / 2)
    masses = connect_dots(p, ends[:-1] * width - log_ratio, np.expm1(-np.diff(ends) * width))
    above, below = ((1 - rate) * ndtr(-x[-1] / noise) + rate * ndtr((s - x[-1]) / noise) for s in (0.5, -0.5))
    masses[0] += below
    return LossMasses(ends, masses, float(above))


def _replaced_density(x: Floats, rate: float, noise: float) -> Floats:
    found: Floats = (1 - rate) * np.exp(-((x / noise) ** 2) / 2) + rate * np.exp(-(((x - 0.5) / noise) ** 2) / 2)
    return found


def _replaced_loss(x: Floats, rate: float, noise: float) -> Floats:
    """Return log of the density with 1/2 over that with -1/2; odd, and growing with x."""
    logs = [_log_mixture((sign * x / 2 - 1 / 8) / noise**2, rate) for sign in (1, -1)]
    return logs[0] - logs[1]


def _log_mixture(log_ratio: Floats, rate: float) -> Floats:
    if rate == 1:
        return log_ratio
    near: Floats = np.log1p(rate * np.expm1(np.minimum(log_ratio, 30.0)))
    far = np.logaddexp(math.log1p(-rate), math.log(rate) + log_ratio)
    return np.where(log_ratio < 30, near, far)


def _replaced_point(loss: Floats, rate: float, noise: float) -> Floats:
    """Return the x at which `_replaced_loss` takes each value, by a quadratic equation in u = e^(x / 2z^2); odd.

    w u^2 - gain u - w e^loss = 0, w being q e^(-1 / 8z^2) and gain (1 - q) (e^loss - 1), without cancellation in u - 1.
    """
    size, weight = np.abs(loss), rate * math.exp(-1 / (8 * noise**2))
    rise = np.expm1(size)
    gain = (1 - rate) * rise
    far = np.hypot(gain, 2 * weight * np.exp(size / 2)) + 2 * weight
    beyond_one = (gain + gain * (gain / far) + 4 * weight**2 * (rise / far)) / (2 * weight)
    found: Floats = np.sign(loss) * 2 * noise**2 * np.log1p(beyond_one)
    return found


def _mixed(usual: LossMasses, rare: LossMasses, share: float) -> LossMasses:
    """Return the losses of a pair that reveals which of two pairs it is, the second with probability `share`."""
    cells, places = np.unique(np.concatenate([usual.cells, rare.cells]), return_inverse=True)
    weights = np.concatenate([(1 - share) * usual.masses, share * rare.masses])
    masses: Floats = np.bincount(places, weights=weights, minlength=len(cells)).astype(np.float64)
    return LossMasses(cells, masses, (1 - share) * usual.infinite + share * rare.infinite)
