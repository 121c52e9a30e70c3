"""Vectorised divergences against the scalar ones."""

from __future__ import annotations

import numpy as np
import pytest

from dpsgd_cli.privacy.renyi import poisson_gaussian_divergence
from dpsgd_cli.privacy.renyi_arrays import integrated_divergences, poisson_gaussian_divergences

RATES = np.array([1e-6, 0.001, 0.01, 0.2, 0.9])
NOISES = np.array([0.4, 1.0, 3.0, 12.0, 60.0])


@pytest.mark.parametrize("order", [1.001, 1.5, 2.0, 7.3, 32.0, 63.0, 512.0])
def test_many_mechanisms_at_once(order: float) -> None:
    rates, noises = (grid.ravel() for grid in np.meshgrid(RATES, NOISES))
    slow = [poisson_gaussian_divergence(q, z, order) for q, z in zip(rates, noises, strict=True)]
    np.testing.assert_allclose(poisson_gaussian_divergences(rates, noises, order), slow, rtol=1e-10)


def test_an_order_of_its_own_for_each() -> None:
    orders = np.array([1.2, 3.0, 8.8, 40.0, 2.5])
    slow = [poisson_gaussian_divergence(q, z, a) for q, z, a in zip(RATES, NOISES, orders, strict=True)]
    np.testing.assert_allclose(integrated_divergences(RATES, NOISES, orders), slow, rtol=1e-10)
