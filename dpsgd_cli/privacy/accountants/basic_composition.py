"""Basic composition: epsilons add up, deltas add up. The yardstick that every other accountant must beat.

Holds for any mechanisms; each Gaussian gets an equal share of delta and its exact epsilon at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy.accountants.base import Accountant, smallest_delta, unsound_sampling, without_leaks
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release
from dpsgd_cli.privacy.single_use import exact_gaussian, noisy_uses, use_epsilon


class BasicComposition(Accountant):
    """Sum of epsilons at the sum of deltas (Dwork and Roth 2014, Theorem 3.16)."""

    name = "basic-composition"
    note = "exact Gaussian per use"

    def refusal(self, mechanism: Mechanism) -> str | None:
        return unsound_sampling(mechanism) if isinstance(mechanism, GaussianSum) else None

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        if leak >= delta:
            return math.inf
        share = (delta - leak) / max(noisy_uses(kept), 1)
        return math.fsum(r.count * use_epsilon(r.mechanism, share, exact_gaussian) for r in kept if r.count)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        if not noisy_uses(releases):
            kept, leak = without_leaks(releases)
            total = math.fsum(r.count * use_epsilon(r.mechanism, 0.0, exact_gaussian) for r in kept if r.count)
            return leak if total <= epsilon else 1.0
        return smallest_delta(lambda delta: self.epsilon(releases, delta), epsilon)
