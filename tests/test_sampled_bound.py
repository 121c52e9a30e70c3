"""The conjectured bound of zCDP(RS): its counter-examples, and where none is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sampled_bound import Grid, excess, largest_orders, search
from dpsgd_cli.accounting.renyi import poisson_gaussian_divergence


def test_worst_counter_example_by_the_slow_formula() -> None:
    order = float(largest_orders(np.array([0.062]), np.array([1.0]))[0])
    ratio = poisson_gaussian_divergence(0.062, 1.0, order) / (order * 0.062**2)
    assert order == pytest.approx(3.7806, abs=1e-4)
    assert ratio == pytest.approx(1.1565, abs=1e-4)
    assert float(excess(np.array([0.062]), np.array([1.0]), np.array([order]))[0]) == pytest.approx(ratio, rel=1e-9)


def test_search_finds_the_counter_examples_near_one_and_none_above() -> None:
    low = search(Grid(lowest=1.0, highest=1.01, noise_step=0.005, rate_step=0.02))
    assert low.pairs == 9
    assert len(low.violating) > 0
    assert (low.violating["ratio"] > 1).all()
    assert "exceeds" in low.text()
    high = search(Grid(lowest=1.2, highest=12.0, noise_step=0.9, rate_step=0.004))
    assert high.pairs > 30
    assert len(high.violating) == 0
    assert "holds" in high.text()
