"""The lower bound for shuffled batches against simulation-free special cases and the published number."""

from __future__ import annotations

import pytest

from dpsgd_cli.privacy.conversions import gaussian_epsilon
from dpsgd_cli.privacy.statement import epsilon_at_least


def test_published_number() -> None:
    assert round(epsilon_at_least(0.5, 10_000, 1e-6), 2) == 10.99


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("batches", [1, 10, 1000])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_never_above_the_upper_bound(noise: float, batches: int, delta: float) -> None:
    assert epsilon_at_least(noise, batches, delta) <= gaussian_epsilon(1 / noise, delta) * (1 + 1e-9)


def test_more_batches_hide_the_record_better() -> None:
    values = [epsilon_at_least(1.0, batches, 1e-5) for batches in (1, 10, 100, 10_000)]
    assert values == sorted(values, reverse=True)
    assert values[-1] > 0
