"""One use of a mechanism as an (epsilon, delta) pair: the Gaussian lemma, amplification by sampling.

For accountants that compose such pairs. Not for those that compose losses or divergences, which never see one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpsgd_cli.privacy.conversions import gaussian_delta, gaussian_epsilon
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release, ZeroConcentrated

GaussianLemma = Callable[[float, float], float]


def exact_gaussian(noise_multiplier: float, delta: float) -> float:
    """Smallest epsilon of one Gaussian at `delta`. Source: Balle and Wang 2018, Theorem 8."""
    return gaussian_epsilon(1 / noise_multiplier, delta) if noise_multiplier > 0 else math.inf


def classical_gaussian(noise_multiplier: float, delta: float) -> float:
    """sqrt(2 log(1.25/delta)) / z, proved for results below 1 only.

    Source: Dwork and Roth 2014, Theorem A.1; Lecture 15, Lemma 15.3.
    """
    if noise_multiplier == 0:
        return math.inf
    return math.sqrt(2 * max(math.log(1.25 / delta), 0.0)) / noise_multiplier


def checked_classical_gaussian(noise_multiplier: float, delta: float) -> float:
    """`classical_gaussian` wherever the exact formula confirms it, which reaches beyond 1; else the exact value."""
    stated = classical_gaussian(noise_multiplier, delta)
    if stated == math.inf or gaussian_delta(1 / noise_multiplier, stated) <= delta:
        return stated
    return exact_gaussian(noise_multiplier, delta)


def amplified(epsilon: float, sampling_rate: float) -> float:
    """log(1 + q (e^epsilon - 1)): what sampling makes of epsilon, while delta becomes q delta.

    Poisson batches under add-remove, batches of fixed size under replace-one. Source: Balle, Barthe and Gaboardi 2018,
    Theorems 8 and 9; Lecture 15, Lemma 15.4.
    """
    if epsilon < 30:
        return math.log1p(sampling_rate * math.expm1(epsilon))
    return epsilon + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-epsilon)) if sampling_rate else 0.0


def use_epsilon(mechanism: Mechanism, delta: float, lemma: GaussianLemma, linear: bool = False) -> float:
    """Epsilon of one use when `delta` is granted to it (to Gaussians only: the others bring their own).

    `linear` takes q epsilon for the amplified epsilon, as published, which is less than sampling achieves.
    """
    if not isinstance(mechanism, GaussianSum):
        assert not isinstance(mechanism, ZeroConcentrated), "refused by Accountant.check"
        return mechanism.epsilon
    rate = mechanism.sampling_rate
    if rate == 0:
        return 0.0
    before = min(delta / rate, 1.0)
    if before == 0:
        return math.inf
    epsilon = lemma(mechanism.noise_multiplier, before) if before < 1 else 0.0
    return rate * epsilon if linear else amplified(epsilon, rate)


def noisy_uses(releases: Sequence[Release]) -> int:
    """How many uses need a delta of their own."""
    return sum(r.count for r in releases if isinstance(r.mechanism, GaussianSum))
