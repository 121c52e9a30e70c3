"""Gaussian DP: exact for compositions of Gaussians on full or shuffled batches.

Not for sampled batches, whose privacy loss is not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy import conversions
from dpsgd_cli.privacy.accountants.base import Accountant, unsound_sampling, without_leaks
from dpsgd_cli.privacy.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, Release
from dpsgd_cli.privacy.normal import normal_quantile
from dpsgd_cli.search import ExactSum


def mechanism_mu(mechanism: Mechanism) -> float:
    """mu of one use.

    Gaussian 1/z, also for an epoch of shuffled batches (given the partition, only one of them differs). Pure epsilon:
    2 Phi^-1(e^epsilon / (1 + e^epsilon)), because the trade-off curve of mu-GDP is convex and meets that of
    epsilon-DP at its corner (Dong, Roth and Su 2022, Proposition 2.10 and Definition 2.6).
    """
    if isinstance(mechanism, GaussianSum):
        return 1 / mechanism.noise_multiplier if mechanism.noise_multiplier**2 > 0 else math.inf
    if isinstance(mechanism, PureDP):
        if mechanism.epsilon == 0:
            return 0.0
        tail = 1 / (1 + math.exp(mechanism.epsilon)) if mechanism.epsilon < 700 else 0.0
        return -2 * normal_quantile(tail) if tail > 0 else math.inf
    return math.inf


class Gaussian(Accountant):
    """mu^2 adds up; epsilon and delta follow from Phi.

    Guarantee: equality for Gaussians, an upper bound where pure releases take part. Holds for noise multipliers that
    are fixed beforehand. Where they are chosen after seeing earlier outputs, what holds is the total that a filter was
    given beforehand (Smith and Thakurta 2022, fully adaptive Gaussian DP), as one Gaussian.
    """

    name = "gaussian"
    note = "exact for Gaussians"

    def refusal(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return None
        if mechanism.sampled:
            return (
                f"{mechanism.batching} batches: the privacy loss of a sampled Gaussian is not Gaussian; use pld or rdp"
            )
        return unsound_sampling(mechanism)

    def mu(self, releases: Sequence[Release]) -> float:
        """The Gaussian-DP parameter of all releases together."""
        return math.sqrt(math.fsum(r.count * mechanism_mu(r.mechanism) ** 2 for r in releases if r.count))

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        if leak >= delta:
            return math.inf
        return conversions.gaussian_epsilon(self.mu(kept), delta - leak)

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        flat = [release for releases in epochs for release in releases]
        self.check(flat)
        if any(isinstance(release.mechanism, ApproximateDP) for release in flat):
            return super().curve(epochs, delta)
        spent, result = ExactSum(), []
        for releases in epochs:
            for release in releases:
                spent.add(release.count * mechanism_mu(release.mechanism) ** 2 if release.count else 0.0)
            result.append(conversions.gaussian_epsilon(math.sqrt(spent.total()), delta))
        return result

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        return min(1.0, leak + conversions.gaussian_delta(self.mu(kept), epsilon))
