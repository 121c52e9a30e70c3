"""Preprocessing steps against row-by-row truth, and what each refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.data import preprocess
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.step_settings import PreprocessStep
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning.second_moments import blocks, second_moments

COLUMNS = (
    Column("age", (0, 100)),
    Column("job", values=("a", "b", "c")),
    Column("pay", (-50, 50)),
    Column("sex", values=("f", "m")),
)
TABLE = Layout((4,), COLUMNS)
ROWS = np.array([[20.0, 2, 0, 1], [150, 0, -99, 0], [-3, 1, 25, 1]])
IMAGES = Layout((1, 2, 2), bounds=(0.0, 1.0))


def made(settings: dict[str, Any], adjacency: Adjacency = "add-remove") -> Any:
    entry = PreprocessStep.model_validate(settings)
    return preprocess.STEPS[entry.kind](entry.step, adjacency)


def run(step: dict[str, Any], rows: np.ndarray, layout: Layout) -> tuple[np.ndarray, Layout]:
    built = made(step)
    after = built.plan(layout)
    out = built.transform(layout, built.kept(rows, layout))(rows)
    assert out.shape[1:] == after.shape
    return out, after


def test_one_hot_puts_an_indicator_per_public_value_in_place() -> None:
    out, after = run({"one-hot": {}}, ROWS, TABLE)
    assert out.tolist() == [[20, 0, 0, 1, 0, 0, 1], [150, 1, 0, 0, -99, 1, 0], [-3, 0, 1, 0, 25, 0, 1]]
    assert [c.name for c in after.columns or ()] == ["age", "job=a", "job=b", "job=c", "pay", "sex=f", "sex=m"]


def test_one_hot_of_chosen_columns_only() -> None:
    out, after = run({"one-hot": {"columns": ["sex"]}}, ROWS, TABLE)
    assert out[:, 1].tolist() == [2, 0, 1]
    assert after.categorical == ["job"]


def test_one_hot_names_the_unknown_column() -> None:
    with pytest.raises(DataError, match="'jbo' is not a categorical column; did you mean 'job'"):
        run({"one-hot": {"columns": ["jbo"]}}, ROWS, TABLE)


def test_scaling_by_bounds_clamps_and_leaves_codes_alone() -> None:
    out, _ = run({"scale": {}}, ROWS, TABLE)
    np.testing.assert_allclose(out, np.array([[0.2, 2, 0.5, 1], [1, 0, 0, 0], [0, 1, 0.75, 1]]), rtol=1e-6)
    assert out.dtype == np.float32
    out, _ = run({"scale": {"to": [-1, 1]}}, ROWS, TABLE)
    np.testing.assert_allclose(out[:, 0], [-0.6, 1, -1], rtol=1e-6)


def test_scaling_keeps_indicators_and_images_in_their_interval() -> None:
    expanded, layout = run({"one-hot": {}}, ROWS, TABLE)
    scaled, _ = run({"scale": {"to": [-1, 1]}}, expanded, layout)
    assert scaled[:, 1:4].tolist() == expanded[:, 1:4].tolist()
    image, after = run({"scale": {"to": [-1, 1]}}, np.full((2, 1, 2, 2), 0.75, np.float32), IMAGES)
    assert image.tolist() == np.full((2, 1, 2, 2), 0.5).tolist()
    assert after.bounds == (-1, 1)


@pytest.mark.parametrize("by", ["standard", "min-max"])
def test_fitted_scaling_reads_training_rows_only_and_says_so(by: str) -> None:
    rows = np.random.default_rng(0).normal(5, 3, (40, 2))
    rows[:, 1] = 7.0
    layout = Layout((2,), (Column("x"), Column("constant")))
    step = made({"scale": {"by": by}})
    transform = step.transform(layout, step.kept(rows, layout))
    out = transform(rows)
    if by == "standard":
        expected = (rows[:, 0] - rows[:, 0].mean()) / rows[:, 0].std()
    else:
        expected = (rows[:, 0] - rows[:, 0].min()) / (rows[:, 0].max() - rows[:, 0].min())
    np.testing.assert_allclose(out[:, 0], expected, atol=1e-5)
    assert out[:, 1].tolist() == [0.0] * 40
    assert step.nonprivate is not None
    assert "without noise" in step.nonprivate


def test_scaling_by_bounds_names_every_column_without_bounds() -> None:
    layout = Layout((3,), (Column("age"), Column("pay"), Column("ok", (0, 1))))
    with pytest.raises(DataError, match=r"columns age, pay; give data.bounds: \{age: \[low, high\]"):
        run({"scale": {}}, np.zeros((1, 3)), layout)
    with pytest.raises(DataError, match="put scale before pca"):
        run({"scale": {}}, np.zeros((1, 3)), Layout((3,)))


def test_scaling_is_per_record() -> None:
    alone, _ = run({"scale": {}}, ROWS[:1], TABLE)
    together, _ = run({"scale": {}}, ROWS, TABLE)
    assert alone[0].tolist() == together[0].tolist()


def test_unit_norm() -> None:
    rows = np.array([[3.0, 4], [0, 0], [0.3, 0.4]])
    layout = Layout((2,), bounds=(0.0, 5.0))
    exactly, at_most = np.array([[0.6, 0.8], [0, 0], [0.6, 0.8]]), np.array([[0.6, 0.8], [0, 0], [0.3, 0.4]])
    np.testing.assert_allclose(run({"unit-norm": {}}, rows, layout)[0], exactly)
    np.testing.assert_allclose(run({"unit-norm": {"at_most": True}}, rows, layout)[0], at_most)
    image, _ = run({"unit-norm": {}}, np.ones((2, 1, 2, 2)), IMAGES)
    np.testing.assert_allclose(image, np.full((2, 1, 2, 2), 0.5))


def test_bias_appends_one_constant_and_flattens() -> None:
    out, after = run({"bias": {"value": 2}}, np.ones((3, 1, 2, 2)), IMAGES)
    assert out.tolist() == [[1, 1, 1, 1, 2]] * 3
    assert after.shape == (5,)
    assert run({"bias": {}}, ROWS, TABLE)[1].columns[-1].name == "bias"  # type: ignore[index]


def test_pca_projects_the_rows_as_they_are() -> None:
    rows = np.random.default_rng(1).normal(0, 9, (30, 1, 2, 2)).astype(np.float32)
    out, after = run({"pca": {"components": 2, "public": True}}, rows, IMAGES)
    axes = preprocess.directions(second_moments(blocks(rows), math.prod(rows.shape[1:])), 2)
    np.testing.assert_allclose(out, rows.reshape(30, 4) @ axes, rtol=1e-4, atol=1e-4)
    assert after == Layout((2,))


@pytest.mark.parametrize(
    ("adjacency", "sensitivity"), [("add-remove", 1.0), ("zero-out", 1.0), ("replace-one", 2**0.5)]
)
def test_private_pca_releases_what_it_adds(adjacency: Any, sensitivity: float) -> None:
    step = made({"pca": {"components": 4, "noise_multiplier": 3}}, adjacency)
    assert step.release is not None
    assert (step.release.noise_multiplier, step.release.sensitivity, step.release.adjacency, step.release.batching) == (
        3,
        pytest.approx(sensitivity),
        adjacency,
        "full",
    )
    rows = np.random.default_rng(2).normal(0, 1, (10, 1, 2, 2))
    asked: list[tuple[int, ...]] = []

    def noised(exact: np.ndarray) -> np.ndarray:
        asked.append(exact.shape)
        return exact + 3 * sensitivity

    noise = 3 * sensitivity * np.where(np.eye(4, dtype=bool), 1, 0.5**0.5)
    axes = preprocess.directions(second_moments(blocks(rows), math.prod(rows.shape[1:])) + noise, 4)
    np.testing.assert_allclose(
        step.transform(IMAGES, step.learn(rows, IMAGES)(noised))(rows), rows.reshape(10, 4) @ axes, atol=1e-5
    )
    assert asked == [(10,)]


@pytest.mark.parametrize("step", [{"unit-norm": {}}, {"pca": {"components": 1, "public": True}}])
def test_steps_on_numbers_refuse_codes(step: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="job, sex would be used as numbers"):
        run(step, ROWS, TABLE)


def test_pca_refuses_more_components_than_features() -> None:
    with pytest.raises(DataError, match="components is 5, but the data have 4 features"):
        run({"pca": {"components": 5, "public": True}}, np.ones((3, 1, 2, 2)), IMAGES)
