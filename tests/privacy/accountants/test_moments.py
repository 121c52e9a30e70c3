"""The moments accountant against direct numerical integrals of both directions."""

from __future__ import annotations

import mpmath as mp
import pytest

from dpsgd_cli.privacy.accountants.moments import Moments
from dpsgd_cli.privacy.mechanism import GaussianSum, Release


def log_moment(rate: float, noise: float, moment: int) -> mp.mpf:
    """max of log E_mix (mix/p0)^lambda and log E_p0 (p0/mix)^lambda (Abadi et al. 2016, equations 3 and 4)."""
    with mp.workdps(25):
        q, z = mp.mpf(rate), mp.mpf(noise)

        def ratio(x: mp.mpf) -> mp.mpf:
            return 1 - q + q * mp.exp(x / z - 1 / (2 * z * z))

        high = (moment + 1) / noise + 12
        cuts = [-12 + i * (high + 12) / 12 for i in range(13)]
        first = mp.quad(lambda x: mp.npdf(x) * ratio(x) ** (moment + 1), cuts)
        second = mp.quad(lambda x: mp.npdf(x) * ratio(x) ** -moment, cuts)
        return mp.log(max(first, second))


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "near"),
    [(0.01, 4.0, 10**4, range(17, 21)), (0.06, 1.0, 100, range(3, 7)), (0.5, 3.0, 20, range(4, 8))],
)
def test_epsilon_is_the_best_integer_moment(rate: float, noise: float, steps: int, near: range) -> None:
    releases = [Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)]
    direct = min((steps * log_moment(rate, noise, moment) + mp.log(10**5)) / moment for moment in near)
    assert Moments().epsilon(releases, 1e-5) == pytest.approx(float(direct), rel=1e-9)


def test_every_moment_is_its_integral() -> None:
    from dpsgd_cli.privacy.accountants.rdp import Profile

    profile = Profile([Release(GaussianSum(1.5, "add-remove", "poisson", 0.03), 1)])
    for moment in (1, 3, 10, 32):
        assert moment * profile.total(moment + 1.0) == pytest.approx(float(log_moment(0.03, 1.5, moment)), rel=1e-9)


def test_moments_end_at_32() -> None:
    """With so much noise a larger moment would be better, and the published accountant may not take it."""
    releases = [Release(GaussianSum(100.0, "add-remove"), 1)]
    assert Moments().epsilon(releases, 1e-5) == pytest.approx(33 / (2 * 100**2) + mp.log(10**5) / 32)
