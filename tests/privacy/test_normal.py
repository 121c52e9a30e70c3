"""The scalar normal distribution against mpmath."""

from __future__ import annotations

import mpmath as mp
import pytest

from dpsgd_cli.privacy.conversions import log_upper_tail, mills_ratio

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
