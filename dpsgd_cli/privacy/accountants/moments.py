"""The moments accountant as published: integer moments up to 32 and Markov's inequality. Poisson and full batches.

Not the best use of the same moments: see `rdp.py` for all orders and the improved conversion.
"""

from __future__ import annotations

import math

from dpsgd_cli.privacy.accountants.base import WithoutLeaks, unsound_sampling
from dpsgd_cli.privacy.accountants.rdp import Profile
from dpsgd_cli.privacy.mechanism import GaussianSum, Mechanism, Release

MOMENTS = range(1, 33)


class Moments(WithoutLeaks):
    """epsilon = min over lambda of (alpha(lambda) + log(1/delta)) / lambda, lambda = 1, ..., 32.

    alpha(lambda) = lambda D_{lambda+1} is the log moment of the privacy loss, the larger of both directions, and
    adds up.
    Source: Abadi et al. 2016, Theorem 2; the direction by Mironov, Talwar and Zhang 2019, Theorem 5.
    """

    name = "moments"
    note = "integer moments to 32, Markov conversion"

    def refusal(self, mechanism: Mechanism) -> str | None:
        if not isinstance(mechanism, GaussianSum):
            return None
        if mechanism.batching == "shuffle":
            return (
                "shuffled batches: its moments are those of Poisson sampling, and shuffling is not Poisson sampling"
                " (its epsilon can be several times larger: Chua et al. 2024); use zcdp, gaussian, rdp or pld, which"
                " charge an epoch as one Gaussian"
            )
        if mechanism.batching == "fixed":
            return "batches of fixed size: its moments are those of independent sampling; use rdp"
        return unsound_sampling(mechanism)

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        profile, log_budget = Profile(kept), math.log(1 / delta)
        return min(profile.total(moment + 1.0) + log_budget / moment for moment in MOMENTS) if kept else 0.0

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        profile = Profile(kept)
        best = min(moment * (profile.total(moment + 1.0) - epsilon) for moment in MOMENTS)
        return math.exp(min(best, 0.0))
