"""Advanced composition as Lecture 15 teaches it: Lemma 15.2 over the Gaussian mechanism of Lemma 15.3.

Not the tightest form of anything; it is there to be compared with. Valid for epsilon below 1, and refused beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.privacy.accountants.base import Accountant, smallest_delta, unsound_sampling, without_leaks
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release
from dpsgd_cli.privacy.single_use import classical_gaussian, use_epsilon


class AdvancedComposition(Accountant):
    """k uses of at most (eps', delta / 2k) cost (2 sqrt(2 k log(2/delta)) eps', delta) when that is below 1.

    Guarantee: with k delta' = delta / 2, Dwork, Rothblum and Vadhan 2010 at delta / 2 gives sqrt(2k log(2/delta))
    eps' + k eps' (e^eps' - 1) <= epsilon/2 + epsilon^2 / (4 log(2/delta)) (1 + eps') <= epsilon. Sampled uses are
    amplified exactly (Lemma 15.4). Source: Lecture 15, Lemmas 15.2 to 15.4.
    """

    name = "advanced-composition"
    note = "Lemmas 15.2 and 15.3, for epsilon < 1"

    def refusal(self, mechanism: Mechanism) -> str | None:
        return unsound_sampling(mechanism) if isinstance(mechanism, GaussianSum) else None

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks([r for r in releases if r.count])
        if not kept:
            return 0.0
        if leak >= delta:
            return math.inf
        uses, left = sum(r.count for r in kept), delta - leak
        single = max(use_epsilon(r.mechanism, left / (2 * uses), _lemma_15_3) for r in kept)
        epsilon = 2 * math.sqrt(2 * uses * math.log(2 / left)) * single
        if not epsilon < 1:
            raise UnsupportedMechanism(
                f"{self.name}: Lemma 15.2 is stated for epsilon below 1 and would give {epsilon:.4g} here;"
                " add noise, or take another accountant"
            )
        return epsilon

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        if not any(r.count for r in releases):
            return 0.0
        return smallest_delta(lambda delta: self.epsilon(releases, delta), epsilon)


def _lemma_15_3(noise_multiplier: float, delta: float) -> float:
    """The Gaussian mechanism's epsilon, which Lemma 15.3 states below 1 only."""
    epsilon = classical_gaussian(noise_multiplier, delta)
    if not epsilon < 1:
        raise UnsupportedMechanism(
            f"advanced-composition: Lemma 15.3 is stated for epsilon below 1; noise multiplier {noise_multiplier:g} has"
            f" {epsilon:.4g} at delta {delta:.3g}; add noise, or take another accountant"
        )
    return epsilon
