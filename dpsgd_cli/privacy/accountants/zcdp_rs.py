"""zCDP(RS): Yu et al.'s closed-form ESTIMATE for Poisson batches, inside the region where they conjecture it.

The bound alpha q^2 / z^2 on the Renyi divergence is a conjecture that is false in places
(`python -m benchmarks.sampled_bound` shows where); nothing here is a guarantee. For one, use `rdp` or `pld`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpsgd_cli.privacy import conversions
from dpsgd_cli.privacy.accountants.base import Accountant, unsound_sampling, without_leaks
from dpsgd_cli.privacy.accountants.zcdp import mechanism_rho
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release


def sampled_rho(mechanism: GaussianSum) -> float:
    """P(q, z) = q^2 / z^2 (Yu et al. 2019, section IV-B2); 1/(2 z^2) without sampling."""
    if mechanism.batching == "poisson" and mechanism.sampling_rate < 1:
        return (mechanism.sampling_rate / mechanism.noise_multiplier) ** 2 if mechanism.sampling_rate else 0.0
    return mechanism_rho(mechanism)


def largest_order(mechanism: Mechanism) -> float:
    """U_alpha(q, z) = z^2 log(1 / (q z)) + 1, the largest Renyi order covered; inf for what is not sampled."""
    if not isinstance(mechanism, GaussianSum) or mechanism.batching != "poisson" or mechanism.sampling_rate in (0, 1):
        return math.inf
    return mechanism.noise_multiplier**2 * math.log(1 / (mechanism.sampling_rate * mechanism.noise_multiplier)) + 1


class ZcdpRs(Accountant):
    """Theorem 3: rho_hat = sum P_i for orders up to the smallest U_alpha, and the best of these orders."""

    name = "zcdp-rs"
    bound = "estimate"
    note = "conjectured divergence bound q^2/z^2"

    def refusal(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return None
        rate, noise = mechanism.sampling_rate, mechanism.noise_multiplier
        if mechanism.batching == "shuffle":
            return (
                "shuffled batches: its estimate is for Poisson sampling, and shuffling is not Poisson sampling (its"
                " epsilon can be several times larger: Chua et al. 2024); use zcdp, which charges an epoch as one"
                " Gaussian"
            )
        if mechanism.batching == "fixed":
            return "batches of fixed size: its estimate is for independent sampling; use rdp"
        if mechanism.batching == "poisson" and 0 < rate < 1:
            if noise < 1:
                return f"noise multiplier {noise:g}: the estimate is only stated from 1 on; use rdp or pld"
            if rate > 1 / (16 * noise):
                return (
                    f"sampling rate {rate:g} at noise multiplier {noise:g}: the estimate is only stated for rates up to"
                    f" 1 / (16 * noise multiplier) = {1 / (16 * noise):.4g}; use rdp or pld"
                )
        return unsound_sampling(mechanism)

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        self.check(releases)
        kept, leak = without_leaks([r for r in releases if r.count])
        if leak >= delta:
            return math.inf
        rho, order, left = _total_rho(kept), _smallest_order(kept), delta - leak
        if rho == 0:
            return 0.0
        # Yu et al. 2019, Theorem 3: the unconstrained best order 1 + sqrt(log(1/delta) / rho) may lie beyond.
        if left >= math.exp(-rho * (order - 1) ** 2):
            return conversions.bun_steinke_epsilon(rho, left)
        return rho * order - math.log(left) / (order - 1)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        self.check(releases)
        kept, leak = without_leaks([r for r in releases if r.count])
        rho, order = _total_rho(kept), _smallest_order(kept)
        if rho == 0:
            return leak
        if epsilon <= rho:
            return 1.0
        if (epsilon + rho) / (2 * rho) <= order:
            return min(1.0, leak + conversions.bun_steinke_delta(rho, epsilon))
        return min(1.0, leak + math.exp(min(0.0, (order - 1) * (rho * order - epsilon))))


def _total_rho(releases: Sequence[Release]) -> float:
    return math.fsum(
        r.count * (sampled_rho(r.mechanism) if isinstance(r.mechanism, GaussianSum) else mechanism_rho(r.mechanism))
        for r in releases
    )


def _smallest_order(releases: Sequence[Release]) -> float:
    return min((largest_order(r.mechanism) for r in releases), default=math.inf)
