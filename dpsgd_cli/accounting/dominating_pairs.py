"""Discretised privacy losses of single releases, rounded so that they can only overstate. NumPy and SciPy.

A mechanism's worst pair of output distributions (P, Q) has the loss L = log dP/dQ under P. Each cell of the loss
axis is replaced by masses on its two ends that keep both P's and Q's mass of the cell. The result dominates the
pair, with an error quadratic in the cell's width (Doroshenko et al. 2022, "Connect the Dots"). Cells are of equal
width around the mean loss; far from it their width grows in proportion to the distance. The ratio of a cell's two
masses is kept as a logarithm: beyond losses of 700 one of them underflows. `loss_composition.py` composes the losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, ZeroConcentrated
from dpsgd_cli.common.plugins import named
from dpsgd_cli.errors import FailedAccountant

Floats = NDArray[np.floating]
Cells = NDArray[np.integer]

TAIL = 12.0
"""Standard deviations kept on both sides; the mass beyond (2e-33) counts as infinite loss."""
_EQUAL_CELLS = 400
"""Cells of equal width on each side of the mean; beyond them a cell's width is 1/400 of its distance from it."""


@dataclass(frozen=True)
class LossMasses:
    """P-masses on the losses cells * width (cells increasing), and the mass of infinite loss.

    Raises FailedAccountant for masses that do not add up to 1: a missing mass would be left out of delta.
    """

    cells: Cells
    masses: Floats
    infinite: float

    def __post_init__(self) -> None:
        total = float(self.masses.sum()) + self.infinite
        if not abs(total - 1) < 1e-6:
            raise FailedAccountant(f"the masses of a discretised loss add up to {total:g}, not to 1; use rdp")


@dataclass(frozen=True)
class LossPair:
    """Both directions: the record is in P's data (`remove`) or in Q's (`add`); one object if they are equal."""

    remove: LossMasses
    add: LossMasses


def discretise(mechanism: Mechanism, width: float) -> LossPair:
    """Return the dominating losses of one use of `mechanism` on multiples of `width` (> 0).

    Guarantee: for every epsilon, the hockey-stick divergence of the result is at least that of the mechanism, under the
    adjacency it is stated for. Gaussians: N(1, z^2) against N(0, z^2). Sampled Gaussians: the pair that the batching
    names (`sampled_pairs.py`, `loss_composition.py`). All others: `_pure`.
    """
    if isinstance(mechanism, GaussianSum):
        if not mechanism.sampled:
            return gaussian_pair(1.0, mechanism.noise_multiplier, width)
        assert mechanism.batches.losses is not None, "refused by Pld"
        found: LossPair = named(mechanism.batches.losses)(mechanism, width)
        return found
    assert not isinstance(mechanism, ZeroConcentrated), "refused by Accountant.check"
    leak = mechanism.delta if isinstance(mechanism, ApproximateDP) else 0.0
    masses = _pure(mechanism.epsilon, _share_of_ends(mechanism), leak, width)
    return LossPair(masses, masses)


@dataclass(frozen=True)
class GaussianCells:
    """Cells of the loss of a mixture of normals, such as (1 - q) N(0, z^2) + q N(1, z^2), against N(0, z^2).

    Masses under both and the logarithm of their ratio; losses at both ends of each cell; and the masses outside.
    """

    ends: Cells
    lows: Floats
    highs: Floats
    gaps: Floats
    mixed: Floats
    without: Floats
    log_ratio: Floats
    below_without: float
    below_mixed: float
    above_without: float
    above_mixed: float


def gaussian_cells(rate: float, noise: float, width: float, least: int | None = None) -> GaussianCells:
    """Return the cells of a sampled Gaussian's loss; from the cell `least` on, if given, which then is a dot."""
    ends = _cell_ends(rate, noise, width)
    if least is not None:
        ends = np.concatenate([[least], ends[ends > least]])
    x = _point_of_loss(ends * width, rate, noise)
    without, within = cell_masses(x / noise), cell_masses((x - 1) / noise)
    # Nothing lies below the least loss log(1 - rate), whose cell starts at x = -inf.
    below_without, below_within = float(ndtr(x[0] / noise)), float(ndtr((x[0] - 1) / noise))
    above_without, above_within = float(ndtr(-x[-1] / noise)), float(ndtr((1 - x[-1]) / noise))
    return GaussianCells(
        ends,
        (ends * width)[:-1],
        (ends * width)[1:],
        np.expm1(-np.diff(ends) * width),
        (1 - rate) * without + rate * within if rate < 1 else within,
        without,
        _log_ratio(within, without, x / noise, rate, noise),
        below_without,
        (1 - rate) * below_without + rate * below_within,
        above_without,
        (1 - rate) * above_without + rate * above_within,
    )


def gaussian_pair(rate: float, noise: float, width: float) -> LossPair:
    """Return the losses of N(1, z^2), mixed with N(0, z^2) below rate 1, against N(0, z^2)."""
    return pair_of(gaussian_cells(rate, noise, width))


def pair_of(cells: GaussianCells) -> LossPair:
    """Return the losses of both directions on the ends of `cells`."""
    remove = connect_dots(cells.mixed, cells.lows - cells.log_ratio, cells.gaps)
    remove[0] += cells.below_mixed
    # Seen from Q the losses change sign and the cells their order.
    add = connect_dots(cells.without[::-1], (cells.log_ratio - cells.highs)[::-1], cells.gaps[::-1])
    add[0] += cells.above_without
    return LossPair(
        LossMasses(cells.ends, remove, cells.above_mixed),
        LossMasses(-cells.ends[::-1], add, cells.below_without),
    )


def _cell_ends(rate: float, noise: float, width: float) -> Cells:
    """Return the multiples of `width` that become dots: dense around the mean losses under P and Q, thinner far out."""
    mean, _, mean_under_q = loss_moments(rate, noise)
    low, high = _loss_at(np.array([-TAIL * noise, 1 + TAIL * noise]), rate, noise) / width
    return dots_around({round(mean / width), round(mean_under_q / width)}, int(np.floor(low)), int(np.ceil(high)))


def dots_around(centres: set[int], lowest: int, highest: int) -> Cells:
    """Return ends of cells from `lowest` to `highest`: of equal width around `centres`, wider farther out."""
    parts = [np.array([lowest, highest])]
    for centre in centres:
        farthest = max(highest - centre, centre - lowest, 1)
        growths = max(0, int(np.ceil(np.log(farthest / _EQUAL_CELLS) * _EQUAL_CELLS)))
        beyond = _EQUAL_CELLS * np.exp(np.arange(1, growths + 1) / _EQUAL_CELLS)
        offsets = np.concatenate([np.arange(_EQUAL_CELLS + 1), np.round(beyond)]).astype(np.int64)
        parts += [centre - offsets, centre + offsets]
    ends = np.unique(np.concatenate(parts))
    return ends[(ends >= lowest) & (ends <= highest)]


def loss_moments(rate: float, noise: float) -> tuple[float, float, float]:
    """Return E_P L, its variance and E_Q L: exact for unsampled Gaussians, by 1000 points for sampled ones."""
    if rate == 1:
        variance = noise**-2
        return variance / 2, variance, -variance / 2
    z = np.linspace(-TAIL, TAIL + 1 / noise, 1000)
    loss = _loss_at(z * noise, rate, noise)
    density = np.exp(-(z**2) / 2)
    mixed = (1 - rate) * density + rate * np.exp(-((z - 1 / noise) ** 2) / 2)
    mixed /= mixed.sum()
    mean = float((mixed * loss).sum())
    variance = float((mixed * (loss - mean) ** 2).sum())
    return mean, variance, float((density * loss).sum() / density.sum())


def connect_dots(p: Floats, log_shares: Floats, gaps: Floats) -> Floats:
    """Split each cell's P-mass between its ends so that both masses of the cell are kept.

    Args: p, the P-masses; log_shares, log(q e^low / p) <= 0, 0 where all of it belongs on the low end; gaps,
    e^(low - high) - 1.
    """
    with np.errstate(over="ignore"):  # infinite where a cell is wide or far: then all of it is on one end
        upper = p * np.clip(np.expm1(log_shares) / gaps, 0.0, 1.0)
    dots = np.zeros(len(p) + 1)
    dots[1:] += upper
    dots[:-1] += p - upper
    return dots


def _share_of_ends(mechanism: PureDP | ApproximateDP) -> float:
    """Return the share of randomised response in the dominating loss; see `_pure`."""
    if isinstance(mechanism, ApproximateDP) or mechanism.source == "pure":
        return 1.0
    return (1 + math.exp(-mechanism.epsilon)) / 2 if mechanism.source == "laplace" else 0.0


def _pure(epsilon: float, share: float, leak: float, width: float) -> LossMasses:
    """Return a mixture of randomised response (`share`) and a loss on [-eps, eps] of P-density proportional to e^(l/2).

    Guarantee: it dominates, in adaptive compositions too (Zhu, Dong and Wang 2022, Theorem 10):

    - share 1: any eps-DP mechanism (Kairouz, Oh and Viswanath 2017).
    - share (1 + e^-eps)/2: one number plus Laplace noise. It is that loss itself: eps with probability 1/2, -eps with
      e^-eps/2, and between them of density e^((l - eps)/2)/4.
    - share 0: any eps-bounded-range mechanism. Losses in an interval [t - eps, t] are dominated by its two ends, t with
      probability (e^eps - e^t)/(e^eps - 1) (Dong, Durfee and Rogers 2020, section 4). The largest delta over all t,
      (e^(eps/2) - e^(x/2))^2/(e^eps - 1) at x in [0, eps], is that of this loss. A single t would not suffice: it may
      be chosen by earlier outputs.

    In addition, the loss is infinite with probability `leak`.
    """
    if epsilon == 0:
        return LossMasses(np.zeros(1, dtype=np.int64), np.array([1 - leak]), leak)
    highest = math.ceil(epsilon / width)
    corners = np.unique([-highest, 1 - highest, highest - 1, highest])
    ends = corners if share == 1 else dots_around({highest}, -highest, highest)
    rare, gaps = math.exp(-epsilon), np.expm1(-np.diff(ends) * width)
    atoms, at_ends = np.zeros(len(ends) - 1), np.zeros(len(ends) - 1)
    atoms[0], at_ends[0] = rare / (1 + rare), epsilon - highest * width
    atoms[-1], at_ends[-1] = 1 / (1 + rare), ends[-2] * width - epsilon
    masses = share * connect_dots(atoms, at_ends, gaps)
    if share < 1:
        inside = np.clip(ends * width, -epsilon, epsilon)
        spread = -np.exp((inside[1:] - epsilon) / 2) * np.expm1(-np.diff(inside) / 2) / -math.expm1(-epsilon)
        middle = (inside[1:] + inside[:-1]) / 2
        masses += (1 - share) * connect_dots(spread, ends[:-1] * width - middle, gaps)
    return LossMasses(ends, (1 - leak) * masses, leak)


def cell_masses(z: Floats) -> Floats:
    """Return the standard normal mass between neighbours of the increasing z, relatively precise in both tails."""
    tails = ndtr(-np.abs(z))
    middle = (z[:-1] < 0) & (z[1:] > 0)
    return np.where(middle, 1 - tails[:-1] - tails[1:], np.abs(np.diff(tails)))


def _log_ratio(within: Floats, without: Floats, z: Floats, rate: float, noise: float) -> Floats:
    """Return log of a cell's mass under the mixture over that under N(0, z^2), also where they underflow."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = within / without
        logs = np.log1p(rate * (quotients - 1)) if rate < 1 else np.log(quotients)
    lost = np.flatnonzero(np.minimum(within, without) < 1e-280)
    if len(lost):
        low, high = z[lost], z[lost + 1]
        logs[lost] = _log_mixture(log_mass(low - 1 / noise, high - 1 / noise) - log_mass(low, high), rate)
    return logs


def log_mass(low: Floats, high: Floats) -> Floats:
    """Return log of the standard normal mass of cells, however far out."""
    near, far = log_ndtr(np.where(low > 0, -low, high)), log_ndtr(np.where(low > 0, -high, low))
    return near + np.log(-np.expm1(far - near))


def _log_mixture(log_ratio: Floats, rate: float) -> Floats:
    """Return log(1 - q + q e^log_ratio), to full relative precision near 0."""
    if rate == 1:
        return log_ratio
    logs = np.log1p(rate * np.expm1(np.minimum(log_ratio, 30)))
    far = log_ratio >= 30
    if far.any():
        logs[far] = np.logaddexp(np.log1p(-rate), np.log(rate) + log_ratio[far])
    return logs


def _loss_at(x: Floats, rate: float, noise: float) -> Floats:
    return _log_mixture((x - 0.5) / noise**2, rate)


def _point_of_loss(loss: Floats, rate: float, noise: float) -> Floats:
    """Return the x at which log(1 - q + q e^((x - 1/2)/z^2)) takes each value; -inf below its range."""
    if rate == 1:
        return noise**2 * loss + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        # log(1 + (e^loss - 1)/q), in the form that does not overflow for large losses.
        near = np.log1p(np.maximum(np.expm1(np.minimum(loss, 30)) / rate, -1.0))
        far = loss + np.log1p(-(1 - rate) * np.exp(-np.maximum(loss, 30))) - np.log(rate)
    return noise**2 * np.where(loss < 30, near, far) + 0.5
