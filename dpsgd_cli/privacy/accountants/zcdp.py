"""Zero-concentrated DP: rho adds up. Full and shuffled batches, and whatever a filter in rho lets through.

Not for sampled batches: zCDP is not amplified by sampling (Yu et al. 2019, section IV-B2). `zcdp` states epsilon by the
published conversion of Bun and Steinke, `zcdp-tight` by the best Renyi order; both are theorems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy import conversions
from dpsgd_cli.privacy.accountants.base import Accountant, unsound_sampling, without_leaks
from dpsgd_cli.privacy.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, Release, ZeroConcentrated
from dpsgd_cli.search import ExactSum


def mechanism_rho(mechanism: Mechanism) -> float:
    """rho of one use.

    Gaussian 1/(2 z^2), also for one epoch of shuffled batches (Yu et al. 2019, Theorem 2); exponential mechanism
    eps^2/8 (Cesar and Rogers 2021, Lemma 3.2); any other pure release eps^2/2 (Bun and Steinke 2016, Proposition 1.4);
    inf where zCDP says nothing.
    """
    if isinstance(mechanism, GaussianSum):
        if mechanism.sampled:
            return math.inf
        variance = mechanism.noise_multiplier**2
        return 1 / (2 * variance) if variance > 0 else math.inf
    if isinstance(mechanism, PureDP):
        return mechanism.epsilon**2 / (8 if mechanism.source == "exponential" else 2)
    if isinstance(mechanism, ZeroConcentrated):
        return mechanism.rho
    return 0.0 if mechanism.epsilon == mechanism.delta == 0 else math.inf


def total_rho(releases: Sequence[Release]) -> float:
    """rho of all releases together, by addition.

    Guarantee: the releases are rho-zCDP where their parameters were fixed beforehand (Bun and Steinke 2016, Lemma 1.7).
    Where they are chosen after seeing earlier outputs, a budget that the sum never passes, on any way, is one: a filter
    (Feldman and Zrnic 2021, Theorem 4.3); the sum that one run came to is not. Raises UnsupportedMechanism for what
    `Zcdp` refuses and for (epsilon, delta)-DP releases, which have no rho.
    """
    Zcdp().check(releases)
    return math.fsum(r.count * mechanism_rho(r.mechanism) for r in releases if r.count)


class Zcdp(Accountant):
    """rho + 2 sqrt(rho log(1/delta))."""

    by_divergence = True
    name = "zcdp"
    note = "Bun-Steinke conversion"

    def refusal(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return None
        if mechanism.sampled:
            return (
                f"{mechanism.batching} batches: zCDP is not amplified by sampling (Yu et al. 2019, section IV-B2);"
                " use rdp or pld, or zcdp-rs for the published estimate"
            )
        return unsound_sampling(mechanism)

    def rho(self, releases: Sequence[Release]) -> float:
        """`total_rho`, for callers that hold the accountant."""
        return total_rho(releases)

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        if leak >= delta:
            return math.inf
        return self.epsilon_of_rho(total_rho(kept), delta - leak)

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        flat = [release for releases in epochs for release in releases]
        self.check(flat)
        if any(isinstance(release.mechanism, ApproximateDP) for release in flat):
            return super().curve(epochs, delta)
        spent, result = ExactSum(), []
        for releases in epochs:
            for release in releases:
                spent.add(release.count * mechanism_rho(release.mechanism) if release.count else 0.0)
            result.append(self.epsilon_of_rho(spent.total(), delta))
        return result

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        kept, leak = without_leaks(releases)
        return min(1.0, leak + self._delta(total_rho(kept), epsilon))

    def epsilon_of_rho(self, rho: float, delta: float) -> float:
        """Epsilon at `delta` of whatever is rho-zCDP."""
        return conversions.bun_steinke_epsilon(rho, delta)

    def _delta(self, rho: float, epsilon: float) -> float:
        return conversions.bun_steinke_delta(rho, epsilon)


class TightZcdp(Zcdp):
    """The least epsilon over all Renyi orders."""

    name = "zcdp-tight"
    note = "best Renyi order"

    def epsilon_of_rho(self, rho: float, delta: float) -> float:
        return conversions.tight_zcdp_epsilon(rho, delta)

    def _delta(self, rho: float, epsilon: float) -> float:
        return conversions.tight_zcdp_delta(rho, epsilon)
