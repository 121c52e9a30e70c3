"""Accountants whose costs add up: Gaussian DP (mu^2) and zero-concentrated DP (rho).

Both are for full and shuffled batches, zCDP also for releases that a filter in rho admits. Neither is for sampled
batches: their privacy loss is not Gaussian, and zCDP is not amplified by sampling (Yu et al. 2019, section IV-B2).
`gaussian` is exact for Gaussians. `zcdp` states epsilon by the published conversion of Bun and Steinke, `zcdp-tight` by
the best Renyi order; all three are theorems.

zCDP(RS) is Yu et al.'s closed-form ESTIMATE for Poisson batches, inside the region where they conjecture it. The bound
alpha q^2 / z^2 on the Renyi divergence is a conjecture that is false in places (`python -m benchmarks.sampled_bound`
shows where), so `zcdp-rs` guarantees nothing. For a guarantee, use `rdp` or `pld`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from dpsgd_cli.accounting import conversions
from dpsgd_cli.accounting.accountants import ONLY_ZCDP, WithoutLeaks, split_delta
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Mechanism, Release, ZeroConcentrated
from dpsgd_cli.accounting.search import ExactSum


class Additive(WithoutLeaks, stated=False):
    """Accountant for which each release costs a number, and all of them cost the sum."""

    @abstractmethod
    def cost(self, mechanism: Mechanism) -> float:
        """Return the cost of one use; inf if it has no bound."""

    @abstractmethod
    def epsilon_of(self, total: float, delta: float) -> float:
        """Return epsilon at `delta` of releases whose costs add up to `total`."""

    @abstractmethod
    def delta_of(self, total: float, epsilon: float) -> float:
        """Return delta at `epsilon` of releases whose costs add up to `total`."""

    def total(self, releases: Sequence[Release]) -> float:
        """Return the total cost of releases that were checked."""
        return math.fsum(r.count * self.cost(r.mechanism) for r in releases if r.count)

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        return self.epsilon_of(self.total(kept), delta)

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        return self.delta_of(self.total(kept), epsilon)

    def curve(self, epochs: Sequence[Sequence[Release]], delta: float) -> list[float]:
        self.check([release for releases in epochs for release in releases])
        spent, leaks, result = ExactSum(), list[Release](), []
        for releases in epochs:
            leaks += [release for release in releases if isinstance(release.mechanism, ApproximateDP)]
            for release in split_delta(releases)[0]:
                spent.add(release.count * self.cost(release.mechanism))
            leak = split_delta(leaks)[1]
            result.append(self.epsilon_of(spent.total(), delta - leak) if leak < delta else math.inf)
        return result


class Gaussian(Additive):
    """Accountant of Gaussian DP: mu^2 adds up; epsilon and delta follow from Phi.

    Guarantee: equality for Gaussians, an upper bound if pure releases take part. Holds for noise multipliers that
    are fixed beforehand. If they are chosen after seeing earlier outputs, the bound is the total that a filter was
    given beforehand (Smith and Thakurta 2022, fully adaptive Gaussian DP), as one Gaussian.
    """

    name = "gaussian"
    bound = "upper"
    note = "exact for Gaussians"

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, ZeroConcentrated):
            return ONLY_ZCDP
        if isinstance(mechanism, GaussianSum) and mechanism.mu is None:
            return (
                f"{mechanism.batching} batches: the privacy loss of a sampled Gaussian is not Gaussian; use pld"
                f"{' or rdp' if mechanism.batches.divergence else ''}"
            )
        return None

    def cost(self, mechanism: Mechanism) -> float:
        assert mechanism.mu is not None, "refused by Accountant.check"
        return mechanism.mu**2

    def epsilon_of(self, total: float, delta: float) -> float:
        return conversions.gaussian_epsilon(math.sqrt(total), delta)

    def delta_of(self, total: float, epsilon: float) -> float:
        return conversions.gaussian_delta(math.sqrt(total), epsilon)


def total_mu_squared(releases: Sequence[Release]) -> float:
    """Return mu^2 of all releases together. Raises UnsupportedMechanism for sampled batches."""
    gaussian = Gaussian()
    gaussian.check(releases)
    return gaussian.total(releases)


def total_rho(releases: Sequence[Release]) -> float:
    """Return rho of all releases together, by addition.

    Guarantee: the releases are rho-zCDP if their parameters were fixed beforehand (Bun and Steinke 2016, Lemma 1.7). If
    they are chosen after seeing earlier outputs, the bound is a budget that the sum never exceeds, whatever is chosen:
    a filter (Feldman and Zrnic 2021, Theorem 4.3). The sum that one run came to is no bound. (epsilon, delta)-DP
    releases with a positive parameter have rho inf. Raises UnsupportedMechanism for releases that `Zcdp` refuses.
    """
    zcdp = Zcdp()
    zcdp.check(releases)
    return zcdp.total(releases)


def rho_of(releases: Sequence[Release]) -> float | None:
    """Return `total_rho`, which is inf if nothing bounds it; None if there is no rho (sampled batches)."""
    if any(Zcdp().refusal(release.mechanism) for release in releases):
        return None
    return total_rho(releases)


class Zcdp(Additive):
    """Accountant of zCDP: epsilon is rho + 2 sqrt(rho log(1/delta))."""

    name = "zcdp"
    bound = "upper"
    note = "Bun-Steinke conversion"

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, GaussianSum) and mechanism.rho is None:
            estimate = ", or zcdp-rs for the published estimate" if mechanism.comes_and_goes else ""
            return (
                f"{mechanism.batching} batches: zCDP is not amplified by sampling (Yu et al. 2019, section IV-B2);"
                f" use {'rdp or pld' if mechanism.batches.divergence else 'pld'}{estimate}"
            )
        return None

    def cost(self, mechanism: Mechanism) -> float:
        assert mechanism.rho is not None, "refused by Accountant.check"
        return mechanism.rho

    def epsilon_of(self, total: float, delta: float) -> float:
        return conversions.bun_steinke_epsilon(total, delta)

    def delta_of(self, total: float, epsilon: float) -> float:
        return conversions.bun_steinke_delta(total, epsilon)


class TightZcdp(Zcdp):
    """Accountant of zCDP: the least epsilon over all Renyi orders."""

    name = "zcdp-tight"
    bound = "upper"
    note = "best Renyi order"

    def epsilon_of(self, total: float, delta: float) -> float:
        return conversions.tight_zcdp_epsilon(total, delta)

    def delta_of(self, total: float, epsilon: float) -> float:
        return conversions.tight_zcdp_delta(total, epsilon)


def sampled_rho(mechanism: Mechanism) -> float:
    """Return P(q, z) = q^2 / z^2 of a Poisson batch (Yu et al. 2019, section IV-B2); the rho of all others."""
    if isinstance(mechanism, GaussianSum) and mechanism.batching == "poisson" and mechanism.sampling_rate < 1:
        return (mechanism.sampling_rate / mechanism.noise_multiplier) ** 2 if mechanism.sampling_rate else 0.0
    return math.inf if mechanism.rho is None else mechanism.rho


def largest_order(mechanism: Mechanism) -> float:
    """Return U_alpha(q, z) = z^2 log(1 / (q z)) + 1, the largest Renyi order covered; inf if nothing is sampled."""
    if not isinstance(mechanism, GaussianSum) or mechanism.batching != "poisson" or mechanism.sampling_rate in (0, 1):
        return math.inf
    return mechanism.noise_multiplier**2 * math.log(1 / (mechanism.sampling_rate * mechanism.noise_multiplier)) + 1


class ZcdpRs(WithoutLeaks):
    """Yu et al. 2019, Theorem 3: rho_hat = sum P_i for orders up to the smallest U_alpha, and the best of these."""

    name = "zcdp-rs"
    bound = "estimate"
    note = "conjectured divergence bound q^2/z^2"

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return ONLY_ZCDP if isinstance(mechanism, ZeroConcentrated) else None
        rate, noise = mechanism.sampling_rate, mechanism.noise_multiplier
        if mechanism.batching == "shuffle":
            return (
                "shuffled batches: its estimate is for Poisson sampling, and shuffling is not Poisson sampling (its"
                " epsilon can be several times larger: Chua et al. 2024); use zcdp, which charges an epoch as one"
                " Gaussian"
            )
        if mechanism.sampled and not mechanism.comes_and_goes:
            return (
                f"{mechanism.batching} batches under {mechanism.adjacency} adjacency: its estimate is for Poisson"
                " batches with a record more or less; use pld"
            )
        if mechanism.sampled and 0 < rate < 1:
            if noise < 1:
                return f"noise multiplier {noise:g}: the estimate is only stated from 1 on; use rdp or pld"
            if rate > 1 / (16 * noise):
                return (
                    f"sampling rate {rate:g} at noise multiplier {noise:g}: the estimate is only stated for rates up to"
                    f" 1 / (16 * noise multiplier) = {1 / (16 * noise):.4g}; use rdp or pld"
                )
        return None

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        rho, order = _rho_and_order(kept)
        if rho == 0:
            return 0.0
        # Yu et al. 2019, Theorem 3: the unconstrained best order 1 + sqrt(log(1/delta) / rho) may lie beyond.
        if delta >= math.exp(-rho * (order - 1) ** 2):
            return conversions.bun_steinke_epsilon(rho, delta)
        return rho * order - math.log(delta) / (order - 1)

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        rho, order = _rho_and_order(kept)
        if rho == 0:
            return 0.0
        if epsilon <= rho:
            return 1.0
        if (epsilon + rho) / (2 * rho) <= order:
            return conversions.bun_steinke_delta(rho, epsilon)
        return math.exp(min(0.0, (order - 1) * (rho * order - epsilon)))


def _rho_and_order(kept: list[Release]) -> tuple[float, float]:
    """Return the estimated rho of all together, and the largest order that it is stated for."""
    rho = math.fsum(r.count * sampled_rho(r.mechanism) for r in kept)
    return rho, min((largest_order(r.mechanism) for r in kept), default=math.inf)
