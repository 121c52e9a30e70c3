"""Counts in cells: what one record moves them by, and what map they give, by obvious computations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import linalg

from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.step_settings import Bin
from dpsgd_cli.preconditioning.marginals import ColumnCells, Columns, MapBlock, Products, counted, scaling
from dpsgd_cli.preconditioning.price import sensitivity

AGE, JOB, ONLY = Column("age", (17.0, 90.0)), Column("job", values=("a", "b", "c")), Column("only", values=("x",))
LAYOUT = Layout((4,), (AGE, JOB, ONLY, Column("pay", (-100.0, 1e5))))
ROWS = arrays(np.float64, st.tuples(st.integers(0, 6), st.just(5)), elements=st.floats())
ROW = arrays(np.float64, (1, 5), elements=st.floats())
COLUMNS = [
    ColumnCells(np.array([0, 1]), np.eye(2)),
    ColumnCells(np.array([2, 3]), np.array([[1.0, 0.5], [-1.0, 0.5], [0.0, 1.0]])),
    ColumnCells(np.array([4]), np.ones((1, 1))),
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


def rows_of(blocks: list[MapBlock], rows: np.ndarray) -> np.ndarray:
    """Rows times the map, block by block."""
    out = np.zeros_like(rows)
    for block in blocks:
        out[:, block.outputs] += rows[:, block.inputs] @ block.matrix
    return out


def every_combination() -> tuple[np.ndarray, Columns]:
    """Columns of 3, 2 and 4 categories, a constant, and all products of pairs, each as often as its weights say."""
    widths, rows = (3, 2, 4), []
    firsts = [0, 3, 5]
    cells = [
        ColumnCells(np.arange(at, at + width), 0.5 * np.eye(width)) for at, width in zip(firsts, widths, strict=True)
    ]
    products, at = [], 10
    for one, other in itertools.combinations(cells, 2):
        own = np.arange(at, at + len(one.features) * len(other.features))
        products.append(Products(own, one.features, other.features, 0.7))
        at += len(own)
    columns = Columns([ColumnCells(np.array([9]), np.array([[0.5]])), *cells], products)
    for codes in itertools.product(*map(range, widths)):
        row = np.zeros(at)
        row[[*(first + code for first, code in zip(firsts, codes, strict=True)), 9]] = 0.5
        for pair in products:
            row[pair.features] = 0.7 * np.outer(row[pair.first], row[pair.second]).ravel()
        rows += [row] * ((1 + codes[0]) * (2 - codes[1]) * (1 + codes[2] ** 2))
    return np.array(rows), columns


def test_the_map_of_independent_columns_makes_all_directions_alike() -> None:
    """Second moments after it, products included: 1 / (number of directions), or 0; a row has mean square length 1."""
    table, columns = every_combination()
    out = rows_of(scaling(counted([table[:100], table[100:]], columns.cells), columns, len(table), 1e-9), table)
    values = np.linalg.eigvalsh(out.T @ out / len(out))
    there = 1 + 2 + 1 + 3 + 2 * 1 + 2 * 3 + 1 * 3
    np.testing.assert_allclose(values[-there:], 1 / there, rtol=1e-3)
    np.testing.assert_allclose(values[:-there], 0, atol=1e-6)


def test_the_map_is_the_inverse_root_of_covariances_and_a_ridge() -> None:
    """Of two columns and their products, by scipy, of features moved by their means."""
    table, columns = every_combination()
    ridge = 0.02
    blocks = scaling(counted([table], columns.cells), columns, len(table), ridge)
    out, centred = rows_of(blocks, table), table.copy()
    for cells in columns.cells[1:]:
        centred[:, cells.features] -= table[:, cells.features].mean(axis=0)
    for pair in columns.products:
        own = centred[:, pair.first, None] * centred[:, None, pair.second]
        centred[:, pair.features] = 0.7 * own.reshape(len(table), -1)
    moments = centred.T @ centred / len(table)
    expected = centred @ np.linalg.inv(linalg.sqrtm(moments / moments.trace() + ridge * np.eye(len(moments))))
    expected /= math.sqrt((expected**2).sum(axis=1).mean())
    np.testing.assert_allclose(out, expected, atol=1e-8)


@pytest.mark.parametrize("given", [{}, {"waves": 4}, {"bins": [4, 16]}, {"bins": 64}, {"bins": 3}, {"integers": "all"}])
def test_cells_of_a_table_hold_each_feature_once_and_each_value_in_its_own(given: dict[str, object]) -> None:
    made = step(**given)
    cells, width = made.columns(LAYOUT).cells, made.plan(LAYOUT).features
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
        own = rows[:, one.features]
        others = np.linalg.norm(own[:, None] - one.values[None], axis=2).min(axis=1)
        assert (np.linalg.norm(own - near, axis=1) <= 3 * others + 1e-5).all()


@pytest.mark.parametrize("given", [{"waves": 8}, {"waves": 4, "products": True}, {"bins": [4, 16]}])
def test_the_map_of_a_table_makes_rows_of_mean_square_length_1(given: dict[str, object]) -> None:
    """Of columns that are independent, and values spread over their cells; the rest is for the worst values in them."""
    rng = np.random.default_rng(0)
    raw = np.stack([rng.normal(45, 12, 20_000), rng.integers(3, size=20_000), np.zeros(20_000),
                    rng.lognormal(6, 1, 20_000)], axis=1)  # fmt: skip
    made = step(**given)
    rows, columns = made.transform(LAYOUT, None)(raw).astype(np.float64), made.columns(LAYOUT)
    blocks = scaling(counted([rows], columns.cells), columns, len(rows), 1e-3)
    assert sorted(np.concatenate([block.outputs for block in blocks]).tolist()) == list(range(rows.shape[1]))
    assert 0.7 < (rows_of(blocks, rows) ** 2).sum(axis=1).mean() <= 1 + 1e-9


def test_values_away_from_the_middles_of_cells_make_no_long_rows() -> None:
    """Half of the records in one spot, as many hold 0: 32 cosines that differ within a cell only stay small."""
    rng = np.random.default_rng(0)
    raw = np.stack([np.full(5000, 45.0), rng.integers(3, size=5000), np.zeros(5000),
                    np.where(rng.random(5000) < 0.5, 0.0, rng.lognormal(6, 1, 5000))], axis=1)  # fmt: skip
    made = step(waves=32)
    rows, columns = made.transform(LAYOUT, None)(raw).astype(np.float64), made.columns(LAYOUT)
    moved = rows_of(scaling(counted([rows], columns.cells), columns, len(rows), 2e-4), rows)
    assert np.linalg.norm(moved, axis=1).mean() < 1.2


BOUNDS = st.one_of(
    st.sampled_from([(47.0, 48.0), (0.0, 1.0), (-1.0, 1.0), (0.0, 50.0), (0.0, 99999.0), (-1000.0, 1000.0)]),
    st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6)).map(lambda pair: (pair[0], pair[0] + pair[1])),
)


@settings(max_examples=20, deadline=None)
@given(
    bounds=st.lists(BOUNDS, min_size=1, max_size=3),
    given=st.sampled_from([{"waves": 4}, {"waves": 32}, {"bins": [4, 16]}, {"bins": [3, 7]}]),
    whole=st.booleans(),
    narrow=st.sampled_from([1.0, 0.1, 1e-4]),
    ridge=st.sampled_from([1e-2, 1e-4, 1e-6]),
)
def test_no_values_in_the_cells_make_rows_longer_than_1(
    bounds: list[tuple[float, float]], given: dict[str, object], whole: bool, narrow: float, ridge: float
) -> None:
    """Each of 3,000 values within the bounds of each kind of column; then all records take the worst of their cells."""
    rng, n = np.random.default_rng(0), 2000
    bounds = [(float(np.floor(low)), float(np.ceil(high))) for low, high in bounds] if whole else bounds
    mark = Column("gap", (0.0, 1.0), indicator=True, marks="x0")
    columns = (*(Column(f"x{i}", pair) for i, pair in enumerate(bounds)), Column("few", (1.0, 5.0)), JOB, mark)
    layout = Layout((len(columns),), columns)
    made = step(integers="all" if whole else ["few"], **given)
    raw = np.stack(
        [*(low + (high - low) * (0.37 + narrow * rng.normal(size=n) / 4) for low, high in bounds),
         rng.integers(1, 6, n), rng.choice(3, n, p=[0.9, 0.09, 0.01]), rng.integers(0, 2, n)], axis=1
    )  # fmt: skip
    transform, cells = made.transform(layout, None), made.columns(layout)
    rows = transform(raw)
    blocks = scaling(counted([rows], cells.cells), cells, n, ridge)
    total = np.square(rows_of(blocks, rows.astype(np.float64))).sum(axis=1).mean()
    constant = next(one.features for one in cells.cells if len(one.values) == 1)
    worst = np.square(rows_of(blocks, rows[:1].astype(np.float64))[0, constant]).sum()
    for at, column in enumerate(columns):
        low, high = column.bounds or (0, 2)
        power = np.concatenate([[0, 1], np.geomspace(1e-8, 1, 1500), 1 - np.geomspace(1e-8, 1, 1500)])
        values = np.arange(3) if column.values else np.append(raw[:, at], low + (high - low) * power)
        tried = np.repeat(raw[:1], len(values), axis=0)
        tried[:, at] = values
        every = transform(tried)
        moved = np.flatnonzero((every != every[:1]).any(axis=0))
        own = next(one for one in cells.cells if moved[0] in one.features)
        squares = np.square(rows_of(blocks, every.astype(np.float64))[:, own.features]).sum(axis=1)
        longest = np.zeros(len(own.values))
        np.maximum.at(longest, own.of(every), squares)
        worst += longest[own.of(rows)].mean()
    assert total <= worst + 1e-9 and worst <= 1 + 1e-9


def test_a_mark_has_two_cells() -> None:
    """Of a missing age; a record that has one, and a record that has none."""
    layout = Layout((2,), (AGE, Column("age is missing", (0.0, 1.0), indicator=True, marks="age")))
    made = step()
    mark = next(one for one in made.columns(layout).cells if len(one.values) == 2)
    rows = made.transform(layout, None)(np.array([[30.0, 0.0], [17.0, 1.0]]))
    assert mark.of(rows).tolist() == [0, 1] and (mark.values / mark.values.max()).tolist() == [[1, 0], [0, 1]]


def test_a_budget_next_to_nothing_still_leaves_shares() -> None:
    """Noise of 1e17 hides a difference of 1."""
    columns = Columns([ColumnCells(np.arange(3), np.eye(3))])
    assert np.isfinite(scaling(np.array([1e17, -1e17, 3e16]), columns, 10, 1e9)[0].matrix).all()


def test_pairs_have_no_cells() -> None:
    assert step(pairs=4).columns(LAYOUT) == Columns()
