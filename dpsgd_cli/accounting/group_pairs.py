"""Dominating losses of a Poisson step for a group of records: a mixture of Gaussians. `GroupSum` has the proof.

Notation: w_j = Pr[Binomial(K, q) = j]; P = sum_j w_j N(j, z^2), Q = N(0, z^2); R(x) = dP/dQ, which grows with x. So
cells of the loss log R are cells of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, ndtr

from dpsgd_cli.accounting.dominating_pairs import (
    TAIL,
    Floats,
    GaussianCells,
    LossPair,
    cell_masses,
    dots_around,
    log_mass,
    pair_of,
)
from dpsgd_cli.accounting.mechanism import GroupSum

_LOST = 1e-33
"""Probability of many of the group in one batch that counts as infinite loss."""
_NEWTON_STEPS = 60


@dataclass(frozen=True)
class Mixture:
    """Weights w_1, ..., w_J of the normals at 1, ..., J, w_0 = 1 - their sum - `beyond`, of deviation `noise`.

    `beyond` is the mass of more than J records, which has no density here: its loss counts as infinite.
    """

    noise: float
    logs: Floats
    log_none: float
    beyond: float

    @classmethod
    def of(cls, mechanism: GroupSum) -> Mixture:
        size, rate = mechanism.size, mechanism.sampling_rate
        j = np.arange(1, size + 1)
        logs = gammaln(size + 1) - gammaln(j + 1) - gammaln(size - j + 1)
        logs = logs + j * np.log(rate) + (size - j) * np.log1p(-rate)
        above = np.cumsum(np.exp(logs)[::-1])[::-1]
        kept = np.flatnonzero(above > _LOST)
        most = int(kept[-1]) + 1 if len(kept) else 1
        beyond = float(above[most]) if most < size else 0.0
        return cls(mechanism.noise_multiplier, logs[:most], float(size * np.log1p(-rate)), beyond)

    @property
    def places(self) -> Floats:
        found: Floats = np.arange(1, len(self.logs) + 1, dtype=np.float64)
        return found

    @property
    def weights(self) -> Floats:
        found: Floats = np.exp(self.logs)
        return found

    def log_parts(self, x: Floats) -> Floats:
        """Return log(w_j dN(j)/dN(0)), shape (J, len(x))."""
        j = self.places[:, None]
        found: Floats = self.logs[:, None] + (j * x - j * j / 2) / self.noise**2
        return found

    def loss(self, x: Floats) -> tuple[Floats, Floats]:
        """Return log R(x) and its slope."""
        parts = self.log_parts(x)
        top = np.maximum(parts.max(axis=0), self.log_none)
        weighed = np.exp(parts - top)
        total = np.exp(self.log_none - top) + weighed.sum(axis=0)
        return top + np.log(total), (self.places @ weighed) / total / self.noise**2

    def point_of(self, losses: Floats, low: float, high: float) -> Floats:
        """Return the x of each loss, -inf below R's range: Newton's method from the right of a convex function."""
        found = np.full(losses.shape, -np.inf)
        held = losses > self.log_none + 1e-15
        wanted = losses[held]
        # on the right of the solution every step stays on the right
        grid = np.linspace(low, high, 2000)
        above = np.searchsorted(self.loss(grid)[0], wanted)
        x = np.append(grid, high)[above]
        for _ in range(_NEWTON_STEPS):
            value, slope = self.loss(x)
            step = (value - wanted) / np.maximum(slope, 1e-300)
            x = x - step
            if float(np.abs(step).max(initial=0.0)) < 1e-13 * self.noise:
                break
        found[held] = x
        return found

    def excess(self, x: Floats) -> Floats:
        """Return R(x) - 1, without cancellation where it is small."""
        j = self.places[:, None]
        found: Floats = self.weights @ np.expm1((j * x - j * j / 2) / self.noise**2) - self.beyond
        return found

    def tail(self, x: Floats, above: bool) -> Floats:
        """Return P's mass on one side of x."""
        sign = -1 if above else 1
        found: Floats = np.exp(self.log_none) * ndtr(sign * x / self.noise)
        return found + self.weights @ ndtr(sign * (x - self.places[:, None]) / self.noise)

    def highest(self) -> float:
        """Return an x above which P has at most `_LOST`."""
        grid = np.linspace(0.0, len(self.logs) + (TAIL + 1) * self.noise, 2000)
        return float(grid[np.searchsorted(-self.tail(grid, above=True), -_LOST).clip(0, len(grid) - 1)])

    def moments(self, low: float, high: float) -> tuple[float, float, float]:
        """Return E_P L, its variance and E_Q L, about: they place cells and set their width."""
        x = np.linspace(low, high, 4000)
        loss = self.loss(x)[0]
        q = np.exp(-((x / self.noise) ** 2) / 2)
        p = np.exp(loss - (x / self.noise) ** 2 / 2)
        mean = float((p * loss).sum() / p.sum())
        return mean, float((p * (loss - mean) ** 2).sum() / p.sum()), float((q * loss).sum() / q.sum())


def grouped(mechanism: GroupSum, width: float) -> LossPair:
    """Return the losses of one step, on multiples of `width`."""
    mixture = Mixture.of(mechanism)
    noise, low, high = mixture.noise, -TAIL * mixture.noise, mixture.highest()
    mean, _, mean_under_q = mixture.moments(low, high)
    least, most = (mixture.loss(np.array([low, high]))[0] / width).tolist()
    ends = dots_around({round(mean / width), round(mean_under_q / width)}, int(np.floor(least)), int(np.ceil(most)))
    x = mixture.point_of(ends * width, low - noise, high + noise)
    without = cell_masses(x / noise)
    mixed = np.exp(mixture.log_none) * without
    excess = np.full(len(without), -mixture.beyond)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for j, weight in zip(mixture.places, mixture.weights, strict=True):
            within = cell_masses((x - j) / noise)
            mixed += weight * within
            excess += weight * (within / without - 1)
        log_ratio = np.log1p(excess)
    lost = np.flatnonzero((without < 1e-280) | ~np.isfinite(log_ratio))
    if len(lost):
        low_z, high_z = x[lost] / noise, x[lost + 1] / noise
        shift = mixture.places[:, None] / noise
        parts = mixture.logs[:, None] + log_mass(low_z - shift, high_z - shift)
        alone = log_mass(low_z, high_z)
        log_ratio[lost] = np.logaddexp(np.logaddexp.reduce(parts, axis=0) - alone, mixture.log_none)
    first, last = x[:1], x[-1:]
    cells = GaussianCells(
        ends,
        (ends * width)[:-1],
        (ends * width)[1:],
        np.expm1(-np.diff(ends) * width),
        mixed,
        without,
        log_ratio,
        float(ndtr(first[0] / noise)),
        float(mixture.tail(first, above=False)[0]),
        float(ndtr(-last[0] / noise)),
        float(mixture.tail(last, above=True)[0]) + mixture.beyond,
    )
    return pair_of(cells)


def group_variance(mechanism: GroupSum) -> float:
    """Return the approximate variance of the loss of one step under P."""
    mixture = Mixture.of(mechanism)
    return mixture.moments(-TAIL * mixture.noise, mixture.highest())[1]
