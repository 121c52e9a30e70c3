"""Principal directions and whitening."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpsgd_cli.data import preprocess
from dpsgd_cli.preconditioning.second_moments import blocks, second_moments


def test_directions_are_the_leading_eigenvectors_with_a_fixed_sign() -> None:
    root = np.random.default_rng(2).standard_normal((8, 8))
    matrix = root @ root.T
    values, vectors = np.linalg.eigh(matrix)
    axes = preprocess.directions(matrix, 3)
    assert axes.shape == (8, 3)
    for rank in range(3):
        assert abs(axes[:, rank] @ vectors[:, -1 - rank]) == pytest.approx(1)
        np.testing.assert_allclose(matrix @ axes[:, rank], values[-1 - rank] * axes[:, rank], rtol=1e-8, atol=1e-8)
        assert axes[np.abs(axes[:, rank]).argmax(), rank] > 0


def test_whitened_projections_have_equal_second_moments_and_the_old_total() -> None:
    rows = np.random.default_rng(3).standard_normal((200, 5)) * [4, 3, 2, 1, 0.5] / 30
    matrix = second_moments(blocks(rows), 5)
    axes = preprocess.directions(matrix, 3)
    plain, white = rows @ axes, rows @ (axes * preprocess.whitening(matrix, axes))
    moments = (white**2).sum(axis=0)
    np.testing.assert_allclose(moments, moments.mean(), rtol=1e-9)
    assert moments.sum() == pytest.approx((plain**2).sum())
    assert not np.allclose((plain**2).sum(axis=0), moments.mean(), rtol=0.1)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), -np.eye(3)])
def test_whitening_leaves_directions_without_moment_alone(matrix: np.ndarray) -> None:
    assert preprocess.whitening(matrix, np.eye(3)[:, :2]).tolist() == [1, 1]


def test_whitening_bounds_the_factor_of_an_empty_direction() -> None:
    assert preprocess.whitening(np.diag([1.0, 0.0]), np.eye(2)).max() == pytest.approx(math.sqrt(0.5e6), rel=1e-5)
