"""Counts in cells: what one record moves them by, and what second moments they stand for, by obvious computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.step_settings import Bin
from dpsgd_cli.preconditioning.marginals import Cells, counted, model
from dpsgd_cli.preconditioning.price import sensitivity

AGE, JOB, ONLY = Column("age", (17.0, 90.0)), Column("job", values=("a", "b", "c")), Column("only", values=("x",))
LAYOUT = Layout((4,), (AGE, JOB, ONLY, Column("pay", (-100.0, 1e5))))
ROWS = arrays(np.float64, st.tuples(st.integers(0, 6), st.just(5)), elements=st.floats())
ROW = arrays(np.float64, (1, 5), elements=st.floats())
COLUMNS = [
    Cells(np.array([0, 1]), np.eye(2)),
    Cells(np.array([2, 3]), np.array([[1.0, 0.5], [-1.0, 0.5], [0.0, 1.0]])),
    Cells(np.array([4]), np.ones((1, 1))),
]


def step(**given: object) -> BinColumns:
    return BinColumns(Bin.model_validate(given), "add-remove")


@settings(max_examples=200)
@given(rows=ROWS, record=ROW, other=ROW)
def test_one_record_moves_the_release_by_at_most_the_sensitivity(
    rows: np.ndarray, record: np.ndarray, other: np.ndarray
) -> None:
    with np.errstate(all="ignore"):
        base, added = counted([rows], COLUMNS), counted([rows, record], COLUMNS)
        replaced, nulled = counted([rows, other], COLUMNS), counted([rows, 0 * record], COLUMNS)
    for one in (base, nulled):
        assert np.linalg.norm(added - one) <= sensitivity("add-remove") + 1e-9
    assert np.linalg.norm(added - replaced) <= sensitivity("replace-one") + 1e-9


def test_the_sensitivity_is_reached() -> None:
    first, second = np.array([[1.0, 0, 1, 0.5, 1]]), np.array([[0, 1.0, -1, 0.5, 1]])
    assert np.linalg.norm(counted([first], COLUMNS)) == pytest.approx(1)
    assert np.linalg.norm(counted([first], COLUMNS) - counted([second], COLUMNS)) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("row", [np.zeros(5), np.array([0, np.nan, 0, 0, 1]), np.array([np.inf, 1, 0, 0, 1])])
def test_a_row_of_zeros_or_that_is_not_finite_adds_nothing(row: np.ndarray) -> None:
    assert counted([row[None]], COLUMNS).tolist() == [0.0] * 5


def test_of_every_combination_of_values_the_model_is_the_mean_of_outer_products() -> None:
    """Columns of 3, 2, 1 and 4 categories, one after the other, each combination as often as its weights say."""
    columns, rows = [], []
    for first, width in ((0, 3), (3, 2), (5, 1), (6, 4)):
        columns.append(Cells(np.arange(first, first + width), np.eye(width)))
    for codes in itertools.product(range(3), range(2), range(1), range(4)):
        row = np.zeros(10)
        row[[0 + codes[0], 3 + codes[1], 5, 6 + codes[3]]] = 0.5
        rows += [row] * ((1 + codes[0]) * (2 - codes[1]) * (1 + codes[3] ** 2))
    table = np.array(rows)
    found = model(counted([table[:100], table[100:]], columns), columns, len(table), 10)
    np.testing.assert_allclose(found, table.T @ table / len(table), atol=1e-12)


@pytest.mark.parametrize("given", [{}, {"waves": 4}, {"bins": [4, 16]}, {"bins": 64}, {"bins": 3}, {"integers": "all"}])
def test_cells_of_a_table_hold_each_feature_once_and_each_value_in_its_own(given: dict[str, object]) -> None:
    made = step(**given)
    cells, width = made.cells(LAYOUT), made.plan(LAYOUT).features
    assert sorted(np.concatenate([one.features for one in cells]).tolist()) == list(range(width))
    transform = made.transform(LAYOUT, None)
    ages = np.array([17.2, 18.9, 30.1, 42.0, 65.7, 89.9])
    raw = np.stack([ages, [0, 1, 2, 2, 1, 0], np.zeros(6), [-99, 0, 10, 500, 8e4, 1e5 - 1]], axis=1)
    rows = transform(raw)
    job = next(one for one in cells if len(one.values) == 3)
    assert job.of(rows).tolist() == [0, 1, 2, 2, 1, 0]
    for one in cells:
        assert np.abs(one.values).max(axis=0).min() > 0
        assert ((rows[:, one.features] * one.values[one.of(rows)]).sum(axis=1) > 0).all()
        near = one.values[one.of(rows)]
        own = rows[:, one.features] / rows[:, -1:]
        others = np.linalg.norm(own[:, None] - one.values[None], axis=2).min(axis=1)
        assert (np.linalg.norm(own - near, axis=1) <= 3 * others + 1e-5).all()


def test_the_model_of_cosines_is_near_the_mean_of_outer_products_of_independent_columns() -> None:
    rng = np.random.default_rng(0)
    raw = np.stack([rng.normal(45, 12, 20_000), rng.integers(3, size=20_000), np.zeros(20_000),
                    rng.lognormal(6, 1, 20_000)], axis=1)  # fmt: skip
    made = step(waves=8)
    rows, cells = made.transform(LAYOUT, None)(raw).astype(np.float64), made.cells(LAYOUT)
    found = model(counted([rows], cells), cells, len(rows), rows.shape[1])
    exact = rows.T @ rows / len(rows)
    assert np.linalg.norm(found - exact, 2) < 0.04 * np.linalg.norm(exact, 2)


def test_a_mark_has_two_cells() -> None:
    """Of a missing age; a record that has one, and a record that has none."""
    layout = Layout((2,), (AGE, Column("age is missing", (0.0, 1.0), indicator=True, marks="age")))
    made = step()
    mark = next(one for one in made.cells(layout) if len(one.values) == 2)
    rows = made.transform(layout, None)(np.array([[30.0, 0.0], [17.0, 1.0]]))
    assert mark.of(rows).tolist() == [0, 1] and mark.values.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("bins", [16, 64, 200])
def test_the_model_of_bins_of_one_column_is_the_mean_of_outer_products(bins: int) -> None:
    layout = Layout((1,), (Column("share", (0.0, 1.0)),))
    made = step(bins=bins)
    rows = made.transform(layout, None)(np.random.default_rng(0).beta(2, 5, (5000, 1))).astype(np.float64)
    cells = made.cells(layout)
    found = model(counted([rows], cells), cells, len(rows), rows.shape[1])
    assert np.linalg.norm(found - rows.T @ rows / len(rows), 2) < 0.02


def test_a_budget_next_to_nothing_still_leaves_shares() -> None:
    """Noise of 1e17 hides a difference of 1."""
    columns = [Cells(np.arange(3), np.eye(3))]
    assert np.isfinite(model(np.array([1e17, -1e17, 3e16]), columns, 10, 3)).all()


def test_pairs_have_no_cells() -> None:
    assert step(pairs=4).cells(LAYOUT) == []
