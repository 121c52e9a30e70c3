"""Privacy losses of one use of a mechanism, by cells of outcomes, rounded so that they can only overstate.

Notation, C apart: P and Q are the outputs on two neighbours, q the sampling rate, z the noise multiplier, H_a(P, Q) the
hockey-stick divergence, sup over events of P - a Q. A pair dominates if its H_a is no smaller, for every a >= 0 and
in both directions; then so do compositions, adaptive ones included (Zhu, Dong and Wang 2022, Theorem 10).

All sampled Gaussians here are pairs of mixtures of normals N(c, z^2) whose likelihood ratio grows with x:

| batching | places c | P | Q |
| --- | --- | --- | --- |
| full | 0, 1 | at 1 | at 0 |
| poisson (add-remove, zero-out) | 0, 1 | 1 - q, q | at 0 |
| poisson, a group of K | 0, ..., K | Binomial(K, q) | at 0 |
| poisson (replace-one) | 0, 1/2, -1/2 | 1 - q at 0, q at 1/2 | 1 - q at 0, q at -1/2 |

Cells are of x, not of the loss L = log dP/dQ. When the P-mass of a cell is split between multiples of a width below and
above its losses, so that its Q-mass is kept, too, the result dominates the pair: "connect the dots" (Doroshenko et al.
2022).

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr, ndtr

from dpsgd_cli.errors import FailedAccountant

Floats = NDArray[np.floating]
TAIL = 12.0
"""Standard deviations kept on both sides; the mass beyond (2e-33) counts as infinite loss."""
_CELLS = 8192
_LOST = 1e-33
"""Probability of many of a group in one batch that counts as infinite loss."""


@dataclass(frozen=True)
class Losses:
    """Cells of outcomes (M,): P-mass, log of P-mass over Q-mass, least and greatest loss inside; P's infinite loss.

    `deviation`, if given, is that of losses on atoms: widths are fractions of it, so that atoms are multiples.
    """

    masses: Floats
    ratio: Floats
    low: Floats
    high: Floats
    infinite: float = 0.0
    deviation: float | None = None

    def moments(self) -> tuple[float, float]:
        """Return the mean of the finite loss under P and its variance, about: they set widths and windows."""
        held = self.masses > 0
        masses, middle = self.masses[held], np.clip(self.ratio, self.low, self.high)[held]
        mean = float((masses * middle).sum() / masses.sum())
        variance = float((masses * (middle - mean) ** 2).sum() / masses.sum())
        return mean, variance if self.deviation is None else self.deviation**2

    def cells(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the cells without the infinite loss."""
        return self.masses, self.ratio, self.low, self.high

    def dots(self, width: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Return the multiples of `width` below and above each cell's losses, and the mass that goes to the upper one.

        Raises FailedAccountant for masses that do not add up to 1: a missing mass would be left out of delta.
        """
        total = float(self.masses.sum()) + self.infinite
        if not abs(total - 1) < 1e-6:
            raise FailedAccountant(f"the masses of a discretised loss add up to {total:g}, not to 1; use rdp")
        if not float(np.abs([self.low, self.high]).max()) < 2.0**60 * width:
            raise FailedAccountant("pld: a loss is too large to discretise; use rdp")
        low = np.floor(self.low / width).astype(np.int64)
        high = np.maximum(np.ceil(self.high / width).astype(np.int64), low + 1)
        with np.errstate(invalid="ignore", over="ignore"):
            share = np.expm1(low * width - self.ratio) / np.expm1((low - high) * width)
        return low, high, self.masses * np.clip(np.nan_to_num(share, nan=1.0), 0.0, 1.0)


Pair = tuple[Losses, Losses]
"""Losses in both directions: the record is in P's data, or in Q's; one object if they are equal."""


def gaussian_pair(rate: float, noise: float) -> Pair:
    """Return the losses of N(1, z^2), mixed with N(0, z^2) below rate 1, against N(0, z^2).

    Guarantee: those of a record that is present with probability q = `rate`, given all that the others add, which both
    outputs share (Zhu, Dong and Wang 2022, Theorem 11).
    """
    return mixtures(np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([-rate, rate]), noise)


def mixtures(places: Floats, base: Floats, change: Floats, noise: float, least: float | None = None) -> Pair:
    """Return the losses of the mixture with weights `base` + `change` against the one with weights `base`, both (J,).

    `least`: only cells of x from there on, whose lower end is a dot, and no mass below it.
    """
    ends = places.min() - TAIL * noise if least is None else least, places.max() + TAIL * noise
    x = np.linspace(*ends, _CELLS + 1)
    within = cell_masses((x - places[:, None]) / noise)
    p, q = (np.maximum(weights, 0.0) @ within for weights in (base + change, base))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.log1p(change @ within / q)
        logs = (places[:, None] * x - places[:, None] ** 2 / 2) / noise**2
        relative = np.exp(logs - logs.max(axis=0))
        near = np.log1p(change @ relative / (base @ relative))
        weights = np.log(np.maximum(base + change, 0.0))[:, None], np.log(base)[:, None]
        lost = q < 1e-280  # masses underflow, their logarithms do not
        z = (x - places[:, None]) / noise
        each = log_mass(z[:, :-1][:, lost], z[:, 1:][:, lost])
        ratio[lost] = np.subtract(*(np.logaddexp.reduce(each + own, axis=0) for own in weights))
        far = np.subtract(*(np.logaddexp.reduce(logs + own, axis=0) for own in weights))
    loss = np.where(np.abs(far) < 1, near, far)
    below, above = ndtr((x[0] - places) / noise), ndtr((places - x[-1]) / noise)
    remove, add = p.copy(), q[::-1].copy()
    remove[0] += (base + change) @ below if least is None else 0.0
    add[0] += base @ above
    return (
        Losses(remove, ratio, loss[:-1], loss[1:], float((base + change) @ above)),
        Losses(add, -ratio[::-1], -loss[:0:-1], -loss[-2::-1], float(base @ below) if least is None else 0.0),
    )


def replaced_pair(rate: float, noise: float) -> Pair:
    """Return the losses of (1 - q) N(0) + q N(1/2) against (1 - q) N(0) + q N(-1/2), of variance z^2.

    The losses of a Poisson batch of which one record is replaced: u = 0, and x and y are at most C from it. Guarantee:
    |x - y|^2, |x|^2 and (x - y).x are at most 4 C^2, C^2 and 2 C^2. The choice x = -y of length C attains all of them,
    in both directions; in units of 2 C those are 1/2 and -1/2. The pair is its own mirror image, and so are its losses.
    """
    weights = np.array([1 - rate, 0.0, rate]), np.array([0.0, rate, -rate])
    found = mixtures(np.array([0.0, 0.5, -0.5]), *weights, noise)
    return found[0], found[0]


def grouped_pair(size: int, rate: float, noise: float) -> Pair:
    """Return the losses of a Poisson batch that holds each of K records; weights below 1e-33 in all are infinite."""
    j = np.arange(size + 1)
    logs = gammaln(size + 1) - gammaln(j + 1) - gammaln(size - j + 1) + j * np.log(rate) + (size - j) * np.log1p(-rate)
    above = np.exp(logs)[::-1].cumsum()[::-1]
    kept = max(2, int((above > _LOST).sum()))
    change = np.exp(logs[:kept])
    change[0] = math.expm1(size * math.log1p(-rate))
    remove, add = mixtures(j[:kept].astype(float), np.eye(kept)[0], change, noise)
    beyond = float(above[kept]) if kept <= size else 0.0
    return Losses(*remove.cells(), remove.infinite + beyond), add


def fixed_pair(rate: float, noise: float) -> Pair:
    """Return the losses of a batch of fixed size, drawn without replacement, with one record replaced.

    Guarantee: let U be a batch of the others and u one of it, uniform. Without the record the batch is U; with it, the
    record has replaced u. So, given U and u, outputs are those of three points of a ball of radius C: with R the sum
    over U without u, (1 - q) N(R + u) + q N(R + x), and the same with y for x. H_a is that of the worst three points of
    the ball, one for each a.

    All covariances are 1 / z^2 (z in units of the ball's diameter). For a >= 1 the worst points have u = y,
    H_a((1 - q) N(0) + q N(1), N(0)), and for a < 1 they have u = x, H_a(N(1), (1 - q) N(1) + q N(0)). They are what
    Zhu, Dong and Wang 2022 state for subset sampling. No one data set attains both, and neither alone dominates (Lebeda
    et al. 2024, "Avoiding pitfalls"). So losses above 0 are those of the first and losses below 0 those of the second.
    The mass that is missing at 0 is the step that the slope of H_a takes at a = 1, (1 - q) (2 Phi(1 / 2z) - 1).
    """
    forth, back = mixtures(np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([-rate, rate]), noise, least=0.5)
    at_none = np.array([(1 - rate) * math.erf(1 / (2 * noise) / math.sqrt(2))]), *(np.zeros(1),) * 3
    every = zip(back.cells(), at_none, forth.cells(), strict=True)
    masses, ratio, low, high = (np.concatenate(parts) for parts in every)
    losses = Losses(masses, ratio, low, high, forth.infinite)
    return losses, losses


def pure_pair(epsilon: float, source: str, leak: float) -> Pair:
    """Return a mixture of randomised response and a loss on [-eps, eps] of P-density proportional to e^(l/2).

    Randomised response alone dominates any eps-DP release (Kairouz, Oh and Viswanath 2017); the density alone one of
    bounded range (Dong, Durfee and Rogers 2020); Laplace noise on one number has the loss eps with probability 1/2.
    `leak` is the probability of an infinite loss.
    """
    share = {"pure": 1.0, "laplace": (1 + math.exp(-epsilon)) / 2, "exponential": 0.0}[source]
    atoms, rare = np.array([-epsilon, epsilon]), math.exp(-epsilon)
    ends = np.linspace(-epsilon, epsilon, _CELLS + 1)
    spread = -np.exp((ends[1:] - epsilon) / 2) * np.expm1(-np.diff(ends) / 2)
    spread = spread / -math.expm1(-epsilon) if epsilon else np.full(_CELLS, 1 / _CELLS)
    middle = (ends[1:] + ends[:-1]) / 2
    masses = np.concatenate([share * np.array([rare, 1.0]) / (1 + rare), (1 - share) * spread]) * (1 - leak)
    ratio, low, high = (np.concatenate([atoms, own]) for own in (middle, ends[:-1], ends[1:]))
    losses = Losses(masses, ratio, low, high, leak, epsilon)
    return losses, losses


def cell_masses(z: Floats) -> Floats:
    """Return the standard normal mass between neighbours along the last axis, relatively precise in both tails."""
    tails = ndtr(-np.abs(z))
    middle = (z[..., :-1] < 0) & (z[..., 1:] > 0)
    return np.where(middle, 1 - tails[..., :-1] - tails[..., 1:], np.abs(np.diff(tails)))


def log_mass(low: Floats, high: Floats) -> Floats:
    """Return log of the standard normal mass of cells, however far out."""
    near, far = log_ndtr(np.where(low > 0, -low, high)), log_ndtr(np.where(low > 0, -high, low))
    found: Floats = near + np.log(-np.expm1(far - near))
    return found
