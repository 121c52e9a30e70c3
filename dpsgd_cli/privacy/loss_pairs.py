"""Discretised privacy losses of single releases, rounded so that they can only overstate. NumPy and SciPy.

A mechanism's worst pair of output distributions (P, Q) has the loss L = log dP/dQ under P. Each cell of the loss
axis is replaced by masses on its two ends that keep both P's and Q's mass of the cell: the result dominates the
pair, with an error quadratic in the cell's width (Doroshenko et al. 2022, "Connect the Dots"). Cells are of equal
width around the mean loss and grow in proportion to their distance far from it. Composition is `loss_composition.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from dpsgd_cli.privacy.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, ZeroConcentrated

Floats = NDArray[np.floating]
Cells = NDArray[np.integer]

_TAIL = 12.0
"""Standard deviations kept on both sides; what lies beyond (2e-33) counts as infinite loss."""
_EQUAL_CELLS = 400
"""Cells of equal width on each side of the mean; beyond them a cell is 1/400 of its distance from it."""


@dataclass(frozen=True)
class LossMasses:
    """P-masses on the losses cells * width (cells increasing), and the mass of infinite loss."""

    cells: Cells
    masses: Floats
    infinite: float


@dataclass(frozen=True)
class LossPair:
    """Both directions of add-remove: the record is in P's data (`remove`) or in Q's (`add`)."""

    remove: LossMasses
    add: LossMasses


def discretise(mechanism: Mechanism, width: float) -> LossPair:
    """The dominating losses of one use of `mechanism` on multiples of `width` (> 0).

    Guarantee: for every epsilon, the hockey-stick divergence of the result is at least that of the mechanism, under the
    adjacency it is stated for. Gaussians: N(1, z^2) against N(0, z^2), mixed with N(0, z^2) when Poisson-sampled
    (Zhu, Dong and Wang 2022, Theorem 11); pure and approximate: randomised response (Kairouz, Oh and Viswanath 2017).
    """
    if isinstance(mechanism, GaussianSum):
        rate = mechanism.sampling_rate if mechanism.batching == "poisson" else 1.0
        return _gaussian(rate, mechanism.noise_multiplier, width)
    assert not isinstance(mechanism, ZeroConcentrated), "refused by Accountant.check"
    leak = mechanism.delta if isinstance(mechanism, ApproximateDP) else 0.0
    masses = _randomised_response(mechanism.epsilon, leak, width)
    return LossPair(masses, masses)


def loss_variance(mechanism: Mechanism) -> float:
    """Variance of the loss under P, to a few percent; it only sets the cell width."""
    if isinstance(mechanism, PureDP | ApproximateDP):
        return mechanism.epsilon**2
    assert isinstance(mechanism, GaussianSum), "refused by Accountant.check"
    rate = mechanism.sampling_rate if mechanism.batching == "poisson" else 1.0
    mean, mean_square, _ = _loss_moments(rate, mechanism.noise_multiplier)
    return mean_square - mean**2


def _gaussian(rate: float, noise: float, width: float) -> LossPair:
    ends = _cell_ends(rate, noise, width)
    x = _point_of_loss(ends * width, rate, noise)
    without = _cell_masses(x / noise)
    within = _cell_masses((x - 1) / noise)
    mixed = (1 - rate) * without + rate * within if rate < 1 else within
    # Nothing lies below the least loss log(1 - rate), whose cell starts at x = -inf.
    below_without, below_within = float(ndtr(x[0] / noise)), float(ndtr((x[0] - 1) / noise))
    above_without, above_within = float(ndtr(-x[-1] / noise)), float(ndtr((1 - x[-1]) / noise))
    remove = _connect_dots(mixed, without, ends, width)
    remove[0] += (1 - rate) * below_without + rate * below_within
    # Seen from Q the losses change sign and the cells their order.
    add = _connect_dots(without[::-1], mixed[::-1], -ends[::-1], width)
    add[0] += above_without
    return LossPair(
        LossMasses(ends, remove, (1 - rate) * above_without + rate * above_within),
        LossMasses(-ends[::-1], add, below_without),
    )


def _cell_ends(rate: float, noise: float, width: float) -> Cells:
    """The multiples of `width` that become dots: dense around the mean losses under P and under Q, thinner far out."""
    mean, _, mean_under_q = _loss_moments(rate, noise)
    low, high = _loss_at(np.array([-_TAIL * noise, 1 + _TAIL * noise]), rate, noise) / width
    lowest, highest = int(np.floor(low)), int(np.ceil(high))
    parts = [np.array([lowest, highest])]
    for centre in {round(mean / width), round(mean_under_q / width)}:
        farthest = max(highest - centre, centre - lowest, 1)
        growths = max(0, int(np.ceil(np.log(farthest / _EQUAL_CELLS) * _EQUAL_CELLS)))
        beyond = _EQUAL_CELLS * np.exp(np.arange(1, growths + 1) / _EQUAL_CELLS)
        offsets = np.concatenate([np.arange(_EQUAL_CELLS + 1), np.round(beyond)]).astype(np.int64)
        parts += [centre - offsets, centre + offsets]
    ends = np.unique(np.concatenate(parts))
    return ends[(ends >= lowest) & (ends <= highest)]


def _loss_moments(rate: float, noise: float) -> tuple[float, float, float]:
    """E_P L, E_P L^2 and E_Q L of the sampled Gaussian, by a sum over 1000 points."""
    z = np.linspace(-_TAIL, _TAIL + 1 / noise, 1000)
    loss = _loss_at(z * noise, rate, noise)
    density = np.exp(-(z**2) / 2)
    mixed = (1 - rate) * density + rate * np.exp(-((z - 1 / noise) ** 2) / 2)
    mixed /= mixed.sum()
    return float((mixed * loss).sum()), float((mixed * loss**2).sum()), float((density * loss).sum() / density.sum())


def _connect_dots(p: Floats, q: Floats, ends: Cells, width: float) -> Floats:
    """Split each cell's P-mass between its ends so that both masses of the cell are kept."""
    upper = (p - q * np.exp(ends[:-1] * width)) / -np.expm1(-np.diff(ends) * width)
    upper = np.clip(upper, 0.0, p)
    dots = np.zeros(len(ends))
    dots[1:] += upper
    dots[:-1] += p - upper
    return dots


def _randomised_response(epsilon: float, leak: float, width: float) -> LossMasses:
    """Loss epsilon with probability e^eps/(1+e^eps), else -epsilon; infinite with probability `leak`."""
    if epsilon == 0:
        return LossMasses(np.zeros(1, dtype=np.int64), np.array([1 - leak]), leak)
    cells, masses = [], []
    for loss, mass in ((-epsilon, 1 / (1 + np.exp(epsilon))), (epsilon, 1 / (1 + np.exp(-epsilon)))):
        start = int(np.floor(loss / width))
        ends = np.array([start, start + 1])
        cells.append(ends)
        masses.append(_connect_dots(np.array([mass]), np.array([mass * np.exp(-loss)]), ends, width))
    return LossMasses(np.concatenate(cells), (1 - leak) * np.concatenate(masses), leak)


def _cell_masses(z: Floats) -> Floats:
    """Standard normal mass between neighbours of the increasing z, to full relative precision in both tails."""
    tails = ndtr(-np.abs(z))
    middle = (z[:-1] < 0) & (z[1:] > 0)
    return np.where(middle, 1 - tails[:-1] - tails[1:], np.abs(np.diff(tails)))


def _loss_at(x: Floats, rate: float, noise: float) -> Floats:
    log_ratio = (x - 0.5) / noise**2
    return np.logaddexp(np.log1p(-rate), np.log(rate) + log_ratio) if rate < 1 else log_ratio


def _point_of_loss(loss: Floats, rate: float, noise: float) -> Floats:
    """Where log(1 - q + q e^((x - 1/2)/z^2)) takes each value; -inf below its range."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # log(1 + (e^loss - 1)/q), in the form that does not overflow for large losses.
        near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30)) / rate, -1.0))
        far = loss + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30))) - np.log(rate)
    return noise**2 * np.where(loss < 30, near, far) + 0.5
