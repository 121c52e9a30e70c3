"""The scalar normal distribution against mpmath."""

from __future__ import annotations

import mpmath as mp
import pytest

from dpsgd_cli.privacy.normal import log_upper_tail, mills_ratio, normal_quantile

POINTS = [-30.0, -6.0, -1.5, 0.0, 0.3, 2.0, 5.999, 6.0, 6.001, 12.0, 40.0, 1e4]


@pytest.mark.parametrize("x", POINTS)
def test_mills_ratio(x: float) -> None:
    with mp.workdps(60):
        exact = mp.erfc(mp.mpf(x) / mp.sqrt(2)) / 2 / mp.npdf(mp.mpf(x))
        assert abs(mp.mpf(mills_ratio(x)) / exact - 1) < 2e-13


@pytest.mark.parametrize("x", POINTS)
def test_log_upper_tail(x: float) -> None:
    with mp.workdps(60):
        exact = mp.log(mp.erfc(mp.mpf(x) / mp.sqrt(2)) / 2)
        assert abs(mp.mpf(log_upper_tail(x)) - exact) < 1e-13 * max(1, abs(exact))


def test_mills_ratio_is_infinite_where_it_leaves_the_range_of_floats() -> None:
    assert mills_ratio(-50) == float("inf")


@pytest.mark.parametrize("probability", [1e-300, 1e-9, 0.2, 0.5, 0.999])
def test_quantile_inverts_the_distribution(probability: float) -> None:
    with mp.workdps(40):
        assert abs(mp.ncdf(normal_quantile(probability)) / mp.mpf(probability) - 1) < 1e-9
