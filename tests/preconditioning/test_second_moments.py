"""Second moments of rows at unit norm: sensitivity, noise scale and symmetry against obvious computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpsgd_cli.preconditioning import second_moments as moments
from dpsgd_cli.preconditioning.price import sensitivity

EXACTLY = pytest.mark.parametrize("exactly", [False, True])

ROWS = arrays(np.float64, st.tuples(st.integers(0, 6), st.just(4)), elements=st.floats(-1e6, 1e6))
ROW = arrays(np.float64, (1, 4), elements=st.floats(-1e6, 1e6))


def covariance(rows: np.ndarray, exactly: bool = False) -> np.ndarray:
    return moments.second_moments(moments.blocks(rows), math.prod(rows.shape[1:]), exactly)


def slow_covariance(rows: np.ndarray, exactly: bool) -> np.ndarray:
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        length = math.hypot(*row)
        unit = row / length if length > 1 or (exactly and length > 0) else row
        for i in range(len(row)):
            for j in range(len(row)):
                total[i, j] += unit[i] * unit[j]
    return total


def released(matrix: np.ndarray) -> np.ndarray:
    """The vector that the mechanism releases: off-diagonal entries once, times sqrt(2)."""
    return np.array(
        [matrix[i, j] * (1 if i == j else math.sqrt(2)) for i in range(len(matrix)) for j in range(i, len(matrix))]
    )


@EXACTLY
@given(rows=ROWS)
def test_covariance_is_the_sum_of_outer_products_of_shrunk_rows(rows: np.ndarray, exactly: bool) -> None:
    np.testing.assert_allclose(covariance(rows, exactly), slow_covariance(rows, exactly), atol=1e-9)


@EXACTLY
@settings(max_examples=100)
@given(rows=ROWS, record=ROW, other=ROW)
def test_one_record_moves_the_release_by_at_most_the_sensitivity(
    rows: np.ndarray, record: np.ndarray, other: np.ndarray, exactly: bool
) -> None:
    base = covariance(rows, exactly)
    added = covariance(np.vstack([rows, record]), exactly)
    replaced = covariance(np.vstack([rows, other]), exactly)
    nulled = covariance(np.vstack([rows, np.zeros_like(record)]), exactly)
    assert np.linalg.norm(released(added - base)) <= sensitivity("add-remove") + 1e-9
    assert np.linalg.norm(released(added - nulled)) <= sensitivity("zero-out") + 1e-9
    assert np.linalg.norm(released(added - replaced)) <= sensitivity("replace-one") + 1e-9


def test_the_sensitivities_are_reached() -> None:
    axes = [np.eye(1, 3, index) for index in (0, 1)]
    apart = covariance(axes[0]) - covariance(axes[1])
    assert np.linalg.norm(released(apart)) == pytest.approx(sensitivity("replace-one"))
    assert np.linalg.norm(released(covariance(5 * axes[0]))) == pytest.approx(sensitivity("add-remove"))


def test_blocks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((25, 2, 3)).astype(np.float32)
    whole = covariance(rows)
    monkeypatch.setattr(moments, "ROWS_AT_ONCE", 7)
    np.testing.assert_allclose(covariance(rows), whole, rtol=1e-12)
    assert whole.shape == (6, 6)


@pytest.mark.parametrize(("factor", "accepted"), [(1, True), (2 / 3, False), (3 / 2, False)])
def test_noise_has_the_stated_scale_and_is_symmetric(factor: float, accepted: bool) -> None:
    """Chi-square with 20,100 degrees of freedom at 5 standard deviations: false failure below 1e-6."""
    size, scale = 200, 16.0
    count = size * (size + 1) // 2
    draws = np.random.default_rng(1).standard_normal(count)
    noise = moments.with_noise(np.zeros((size, size)), lambda exact: exact + factor * scale * draws)
    assert (noise == noise.T).all()
    statistic = (released(noise) ** 2).sum() / scale**2
    assert bool(abs(statistic - count) < 5 * math.sqrt(2 * count)) is accepted


def test_every_draw_is_used_once() -> None:
    draws = np.arange(1.0, 7.0)
    np.testing.assert_allclose(released(moments.with_noise(np.zeros((3, 3)), lambda exact: exact + draws)), draws)


@EXACTLY
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e300])
def test_a_row_that_is_not_finite_moves_the_covariance_by_no_more_than_another(value: float, exactly: bool) -> None:
    """Without the rule one such row makes every entry NaN, and the eigenvectors an error."""
    rows = np.random.default_rng(0).random((20, 3))
    with np.errstate(over="ignore", invalid="ignore"):
        for column in (0, 1):
            odd = rows[3] * 1.0
            odd[column] = value
            moved = covariance(np.vstack([rows, odd]), exactly) - covariance(rows, exactly)
            assert np.linalg.norm(moved) <= 1 + 1e-12 and np.isfinite(moved).all()


@pytest.mark.parametrize("size", [1e-320, 1.4e-162, 1e160, 1e300])
def test_rows_at_unit_norm_are_not_longer_whatever_their_squares_are(size: float) -> None:
    rows = np.full((1, 2000), size)
    rows[0, 0] *= 1.2
    with np.errstate(over="ignore"):
        assert np.trace(covariance(rows, exactly=True)) <= 1 + 1e-12
