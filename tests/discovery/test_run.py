"""From noisy counts to bounds and categories: what is read from them, and that nothing else is."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.discover import Discover
from dpsgd_cli.data.table import to_matrix
from dpsgd_cli.discovery import run
from dpsgd_cli.discovery.run import (
    EDGES,
    Found,
    bounds_of,
    categories_of,
    code,
    codes,
    counts_of_codes,
    counts_of_numbers,
)
from dpsgd_cli.discovery.settings import Discovery
from dpsgd_cli.errors import DataError

LAYOUT = Layout(
    (3,),
    (Column("age", (0.0, 99.0)), Column("income", private="bounds"), Column("job", private="categories", filling="")),
)
STEP = Discover(
    Discovery(noise_multiplier=1.0, delta=0.01, most_categories=3), "add-remove", {"income": False, "job": True}, 1
)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_in_the_cell_between_whose_ends_it_lies(number: float) -> None:
    counts = counts_of_numbers(np.array([number]))
    (cell,) = np.flatnonzero(counts)
    assert counts.sum() == 1
    within = min(max(number, -(2.0**40)), 2.0**40 * (1 - 2**-52))
    assert EDGES[cell] <= within < EDGES[cell + 1]


def test_the_cells_are_public_and_as_documented() -> None:
    ends = [s * 2.0**k * (1 + j / 4) for s in (-1, 1) for k in range(-20, 40) for j in range(4)] + [-(2.0**40), 2.0**40]
    assert sorted(ends) == EDGES.tolist()


def test_what_is_missing_or_infinite_is_in_no_cell() -> None:
    values = np.array([math.nan, math.inf, -math.inf, 3.0])
    assert counts_of_numbers(values).sum() == 1
    assert counts_of_codes(values)[0].tolist() == [3.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(17, 91), (16.0, 96.0)),
        (np.zeros(50), (0.0, 1.0)),
        (np.linspace(-3.1, 0, 50), (-3.5, 0.0)),
        (np.linspace(0.3, 0.7, 50), (0.25, 0.75)),
        (np.r_[np.zeros(900), np.full(95, 1000.0), np.full(5, 1e9)], (0.0, 1024.0)),
        (np.full(5, 1e300), (2.0**39 * 1.75, 2.0**40)),
    ],
)
def test_bounds_without_noise_are_the_ends_of_the_cells_around_the_values(
    values: np.ndarray, expected: tuple[float, float]
) -> None:
    assert bounds_of(counts_of_numbers(values.astype(float)), 1e-9, 0.01) == (expected, True)


def test_bounds_hold_what_noise_leaves_clear() -> None:
    """30,000 values with noise of 40 on every cell: of 100 releases all hold 97%, none is twice as wide as needed."""
    random = np.random.default_rng(0)
    values = random.normal(50_000, 10_000, 30_000)
    counts = counts_of_numbers(values)
    for _ in range(100):
        (low, high), clear = bounds_of(counts + 40 * random.standard_normal(len(counts)), 40.0, 0.01)
        assert clear and ((values >= low) & (values <= high)).mean() > 0.97
        assert high - low <= 2 * np.ptp(np.quantile(values, [0.005, 0.995]))


def test_powers_that_are_clear_together_only_are_found_together() -> None:
    """500 values over 4 powers: each count is some 3 deviations of its noise, all together some 6."""
    random = np.random.default_rng(1)
    counts = counts_of_numbers(2.0 ** random.uniform(3, 7, 500))
    found = [bounds_of(counts + 20 * random.standard_normal(len(counts)), 20.0, 0.01) for _ in range(50)]
    assert sum(clear and 2 <= low <= 16 and 64 <= high <= 512 for (low, high), clear in found) >= 45


@given(st.integers(0, 10**9), st.sampled_from([0.1, 1.0, 10.0]), st.sampled_from([0.0, 0.01, 0.49]))
def test_any_counts_give_bounds_in_order_at_ends_of_cells(seed: int, scale: float, outside: float) -> None:
    random = np.random.default_rng(seed)
    counts = counts_of_numbers(random.standard_cauchy(int(random.integers(0, 60))) * 10.0 ** random.integers(-8, 14))
    (low, high), _ = bounds_of(counts + scale * random.standard_normal(len(counts)), scale, outside)
    assert low < high and {low, high} <= {*EDGES.tolist(), 0.0, 1.0}


def test_bounds_of_noise_alone_are_called_a_guess() -> None:
    noise = np.random.default_rng(3).standard_normal(run.CELLS)
    (low, high), clear = bounds_of(noise, 1.0, 0.01)
    assert low < high and not clear
    found = Found({"income": (low, high)}, {"job": []}, ["income"])
    assert "income: no count is clear" in found.warnings[0] and "job: no category" in found.warnings[0]
    assert not Found({"income": (0.0, 2.0)}, {"job": ["a"]}).warnings


def test_categories_above_the_threshold_are_named_in_alphabetical_order_and_at_most_so_many() -> None:
    noisy, texts = np.array([9.0, 5.0, 7.0, 4.9, 7.0]), ["e", "b", "d", "a", "c"]
    assert categories_of(noisy, texts, 4.95, 10) == ["b", "c", "d", "e"]
    assert categories_of(noisy, texts, 4.95, 2) == ["c", "e"]
    assert categories_of(noisy[::-1], texts[::-1], 4.95, 2) == ["c", "e"]


def test_the_code_of_a_cell_is_a_function_of_that_cell_alone() -> None:
    cells = pd.Series(["b", "a", None, "?", "", "b"])

    def to_private_codes(kept: pd.Series) -> np.ndarray:
        return to_matrix(TableRows.of({"c": kept}), [Column("c", private="categories")], "here")[:, 0]

    made = to_private_codes(cells)
    assert made[[0, 1, 5]].tolist() == [code("b"), code("a"), code("b")] and np.isnan(made[2:5]).all()
    for row in range(6):
        assert np.array_equal(to_private_codes(cells.drop(row)), np.delete(made, row), equal_nan=True)


def test_a_code_is_the_start_of_a_hash_and_two_texts_with_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.blake2b("Straße".encode(), digest_size=8).hexdigest()
    assert code("Straße") == int(digest[:13], 16)
    assert codes(["a", "b", "a"], "job") == {code("a"): "a", code("b"): "b"}
    monkeypatch.setattr(run, "code", lambda text: 1.0)
    with pytest.raises(DataError, match="column 'job': two of its categories") as failure:
        codes(["secret", "other"], "job")
    assert "secret" not in str(failure.value)


def test_rows_become_numbers_within_public_bounds_and_places_of_categories() -> None:
    kept = Found({"income": (10.0, 20.0)}, {"job": ["a", "b"]}).to_array()
    rows = np.array(
        [(5, 15, code("a")), (5, -1e9, code("b")), (5, 1e9, code("c")), (5, math.nan, math.nan)], dtype=float
    )
    made = STEP.transform(LAYOUT, kept)(rows)
    assert made.tolist() == [[5, 0.5, 0], [5, 0, 1], [5, 1, 4], [5, 0.5, 3]]
    after = STEP.plan(LAYOUT).columns
    assert after is not None
    assert after[1:] == (Column("income", (0.0, 1.0)), Column("job", values=("#1", "#2", "#3", "", "other")))


def test_a_missing_value_is_what_the_recipe_says() -> None:
    kept = Found({"income": (10.0, 20.0)}, {"job": ["a", "b"]}).to_array()
    columns = (Column("income", filling=12.0, private="bounds"), Column("job", filling="b", private="categories"))
    made = STEP.transform(Layout((2,), columns), kept)(np.array([[math.nan, math.nan]]))
    assert made.tolist() == [[0.2, 1]]
    unknown = (columns[0], Column("job", filling="z", private="categories"))
    assert STEP.transform(Layout((2,), unknown), kept)(np.array([[math.nan, math.nan]])).tolist() == [[0.2, 4]]


@given(st.lists(st.text(max_size=5), max_size=3, unique=True), st.floats(-1e300, 1e300))
def test_what_was_found_is_kept_to_the_bit(texts: list[str], number: float) -> None:
    found = Found({"a": (number, math.nextafter(number, math.inf))}, {"b": texts}, ["a"])
    assert Found.from_array(found.to_array()) == found
