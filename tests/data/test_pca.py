"""The private covariance: sensitivity, noise scale, and directions against obvious computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpsgd_cli.data import pca

ROWS = arrays(np.float64, st.tuples(st.integers(0, 6), st.just(4)), elements=st.floats(-1e6, 1e6))
ROW = arrays(np.float64, (1, 4), elements=st.floats(-1e6, 1e6))


def slow_covariance(rows: np.ndarray) -> np.ndarray:
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        length = math.sqrt(sum(value * value for value in row))
        unit = row / length if length > 1 else row
        for i in range(len(row)):
            for j in range(len(row)):
                total[i, j] += unit[i] * unit[j]
    return total


def released(matrix: np.ndarray) -> np.ndarray:
    """The vector that the mechanism releases: off-diagonal entries once, times sqrt(2)."""
    return np.array(
        [matrix[i, j] * (1 if i == j else math.sqrt(2)) for i in range(len(matrix)) for j in range(i, len(matrix))]
    )


@given(ROWS)
def test_covariance_is_the_sum_of_outer_products_of_shrunk_rows(rows: np.ndarray) -> None:
    np.testing.assert_allclose(pca.covariance(rows), slow_covariance(rows), atol=1e-9)


@settings(max_examples=200)
@given(ROWS, ROW, ROW)
def test_one_record_moves_the_release_by_at_most_the_sensitivity(
    rows: np.ndarray, record: np.ndarray, other: np.ndarray
) -> None:
    base = pca.covariance(rows)
    added = pca.covariance(np.vstack([rows, record]))
    replaced = pca.covariance(np.vstack([rows, other]))
    nulled = pca.covariance(np.vstack([rows, np.zeros_like(record)]))
    assert np.linalg.norm(released(added - base)) <= pca.sensitivity("add-remove") + 1e-9
    assert np.linalg.norm(released(added - nulled)) <= pca.sensitivity("zero-out") + 1e-9
    assert np.linalg.norm(released(added - replaced)) <= pca.sensitivity("replace-one") + 1e-9


def test_the_sensitivities_are_reached() -> None:
    axes = [np.eye(1, 3, index) for index in (0, 1)]
    apart = pca.covariance(axes[0]) - pca.covariance(axes[1])
    assert np.linalg.norm(released(apart)) == pytest.approx(pca.sensitivity("replace-one"))
    assert np.linalg.norm(released(pca.covariance(5 * axes[0]))) == pytest.approx(pca.sensitivity("add-remove"))


def test_blocks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((25, 2, 3)).astype(np.float32)
    whole = pca.covariance(rows)
    monkeypatch.setattr(pca, "ROWS_AT_ONCE", 7)
    np.testing.assert_allclose(pca.covariance(rows), whole, rtol=1e-12)
    assert whole.shape == (6, 6)


@pytest.mark.parametrize(("factor", "accepted"), [(1, True), (2 / 3, False), (3 / 2, False)])
def test_noise_has_the_stated_scale_and_is_symmetric(factor: float, accepted: bool) -> None:
    """Chi-square with 20,100 degrees of freedom at 5 standard deviations: false failure below 1e-6."""
    size, scale = 200, 16.0
    count = size * (size + 1) // 2
    draws = np.random.default_rng(1).standard_normal(count)
    noise = pca.add_noise(np.zeros((size, size)), factor * scale, draws)
    assert (noise == noise.T).all()
    statistic = (released(noise) ** 2).sum() / scale**2
    assert bool(abs(statistic - count) < 5 * math.sqrt(2 * count)) is accepted


def test_every_draw_is_used_once() -> None:
    draws = np.arange(1.0, 7.0)
    np.testing.assert_allclose(released(pca.add_noise(np.zeros((3, 3)), 1.0, draws)), draws)


def test_directions_are_the_leading_eigenvectors_with_a_fixed_sign() -> None:
    root = np.random.default_rng(2).standard_normal((8, 8))
    matrix = root @ root.T
    values, vectors = np.linalg.eigh(matrix)
    axes = pca.directions(matrix, 3)
    assert axes.shape == (8, 3)
    for rank in range(3):
        assert abs(axes[:, rank] @ vectors[:, -1 - rank]) == pytest.approx(1)
        np.testing.assert_allclose(matrix @ axes[:, rank], values[-1 - rank] * axes[:, rank], rtol=1e-8, atol=1e-8)
        assert axes[np.abs(axes[:, rank]).argmax(), rank] > 0


def test_whitened_projections_have_equal_second_moments_and_the_old_total() -> None:
    rows = np.random.default_rng(3).standard_normal((200, 5)) * [4, 3, 2, 1, 0.5] / 30
    matrix = pca.covariance(rows)
    axes = pca.directions(matrix, 3)
    plain, white = rows @ axes, rows @ (axes * pca.whitening(matrix, axes))
    moments = (white**2).sum(axis=0)
    np.testing.assert_allclose(moments, moments.mean(), rtol=1e-9)
    assert moments.sum() == pytest.approx((plain**2).sum())
    assert not np.allclose((plain**2).sum(axis=0), moments.mean(), rtol=0.1)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), -np.eye(3)])
def test_whitening_leaves_directions_without_moment_alone(matrix: np.ndarray) -> None:
    assert pca.whitening(matrix, np.eye(3)[:, :2]).tolist() == [1, 1]


def test_whitening_bounds_the_factor_of_an_empty_direction() -> None:
    assert pca.whitening(np.diag([1.0, 0.0]), np.eye(2)).max() == pytest.approx(math.sqrt(0.5e6), rel=1e-5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300])
def test_a_row_that_is_not_finite_moves_the_covariance_by_no_more_than_another(value: float) -> None:
    """Without the rule one such row makes every entry NaN, and the eigenvectors an error."""
    rows = np.random.default_rng(0).random((20, 3))
    with np.errstate(over="ignore", invalid="ignore"):
        for column in (0, 1):
            odd = rows[3] * 1.0
            odd[column] = value
            moved = pca.covariance(np.vstack([rows, odd])) - pca.covariance(rows)
            assert np.linalg.norm(moved) <= 1 and np.isfinite(moved).all()
