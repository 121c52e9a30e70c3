"""Strong composition of (epsilon, delta) pairs (Dwork, Rothblum and Vadhan 2010), after amplification by sampling.

`strong-composition` is a bound: exact amplification, and the split of delta between the uses and the composition is
optimised. `strong-composition-published` repeats the number of Abadi et al. 2016: amplification to q epsilon and delta
split in half; q epsilon is less than log(1 + q (e^epsilon - 1)), so it bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy.accountants.base import Accountant, smallest_delta, unsound_sampling, without_leaks
from dpsgd_cli.privacy.conversions import minimise
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release
from dpsgd_cli.privacy.single_use import checked_classical_gaussian, classical_gaussian, noisy_uses, use_epsilon


class StrongComposition(Accountant):
    """sqrt(2 log(1/delta') sum eps_i^2) + sum eps_i (e^eps_i - 1), at delta' + sum delta_i.

    Source: Dwork, Rothblum and Vadhan 2010, Theorem III.3, for unequal uses Kairouz, Oh and Viswanath 2017, Theorem 3.5
    (whose second term is smaller). Noise multipliers must not depend on earlier outputs (Rogers et al. 2016).
    """

    name = "strong-composition"
    note = "Gaussian lemma per use, split of delta optimised"

    def refusal(self, mechanism: Mechanism) -> str | None:
        return unsound_sampling(mechanism) if isinstance(mechanism, GaussianSum) else None

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        if leak >= delta:
            return math.inf
        if not noisy_uses(kept):
            return self._composed(kept, delta - leak, 0.0)

        def at(logit: float) -> float:
            return self._composed(kept, delta - leak, 1 / (1 + math.exp(-logit)))

        return at(minimise(at, -12.0, 12.0, 1e-4))

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        return (
            smallest_delta(lambda delta: self.epsilon(releases, delta), epsilon)
            if any(r.count for r in releases)
            else 0.0
        )

    def _composed(self, releases: Sequence[Release], delta: float, share: float) -> float:
        """Epsilon when `share` of delta goes to the uses, in equal parts, and the rest to the composition."""
        per_use = delta * share / max(noisy_uses(releases), 1)
        uses = [(r.count, use_epsilon(r.mechanism, per_use, checked_classical_gaussian)) for r in releases if r.count]
        if any(epsilon > 700 for _, epsilon in uses):
            return math.inf
        squares = math.fsum(n * epsilon**2 for n, epsilon in uses)
        drift = math.fsum(n * epsilon * math.expm1(epsilon) for n, epsilon in uses)
        return math.sqrt(2 * math.log(1 / (delta * (1 - share))) * squares) + drift


class PublishedStrongComposition(StrongComposition):
    """sqrt(2 log(2/delta) sum (q eps)^2) + sum (q eps)^2, with half of delta for the uses."""

    name = "strong-composition-published"
    bound = "estimate"
    note = "linear amplification q*eps is below what sampling achieves: no bound"

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        if leak >= delta:
            return math.inf
        half = (delta - leak) / 2
        per_use = half / max(noisy_uses(kept), 1)
        squares = math.fsum(
            r.count * use_epsilon(r.mechanism, per_use, classical_gaussian, linear=True) ** 2 for r in kept if r.count
        )
        return math.sqrt(2 * math.log(1 / half) * squares) + squares
