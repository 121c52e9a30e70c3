"""Columns as cosines or one-hots over public bounds: what they are, and that no row is longer than 1."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data import bins, outline
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.step_settings import Bin
from dpsgd_cli.errors import DataError

AGE = Column("age", (0, 3))
SHARE = Column("share", (0, 1))
JOB = Column("job", values=("a", "b", "c"))
MARK = Column("pay is missing", (0.0, 1.0), indicator=True, category="pay is missing", marks="pay")


def binned(columns: tuple[Column, ...], rows: Any, **settings: Any) -> tuple[np.ndarray, list[str]]:
    """One-hots of 4 and 16 bins where nothing is said."""
    settings = settings if "waves" in settings else {"bins": [4, 16]} | settings
    layout, step = Layout((len(columns),), columns), BinColumns(Bin(**settings), "add-remove")
    after = step.plan(layout)
    out = step.transform(layout, None)(np.array(rows, float))
    assert out.shape[1:] == after.shape and out.dtype == np.float32
    return out, [column.name for column in after.columns or ()]


def test_whole_numbers_have_a_bin_each_and_categories_a_column_each() -> None:
    out, names = binned((AGE, JOB), [[2, 0], [-7, 1], [99, 2], [0.4, 2]], integers=["age"])
    assert names == [
        "age from 0",
        "age from 0.5",
        "age from 1.5",
        "age from 2.5",
        "job=a",
        "job=b",
        "job=c",
        "constant",
    ]
    ones = [[0, 0, 1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0, 1, 1]]
    np.testing.assert_allclose(out, np.array(ones) / np.sqrt(3), rtol=1e-6)


def test_fractions_have_equal_steps_and_steps_that_are_fine_near_zero() -> None:
    """Quarters, and edges where asinh(1000 x) is a quarter of asinh(1000)."""
    _, names = binned((SHARE,), [[0.5]], bins=4)
    edges = [np.sinh(np.arcsinh(1000) * part / 4) / 1000 for part in (1, 2, 3)]
    assert names[:4] == ["share from 0", "share from 0.25", "share from 0.5", "share from 0.75"]
    assert names[4:8] == ["share from 0", *(f"share from {edge:g}" for edge in edges)]
    out, _ = binned((SHARE,), [[0.5], [0.005]], bins=4)
    assert (out[0] > 0).tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1]
    assert (out[1] > 0).tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("bounds", "integers", "whole"),
    [((0, 1), [], False), ((0, 1), "all", True), ((0, 1), ["x"], True), ((0, 9), [], False), ((47, 48), [], False)],
)
def test_only_the_recipe_says_that_numbers_are_whole(bounds: tuple[float, float], integers: Any, whole: bool) -> None:
    """Bounds never do."""
    _, names = binned((Column("x", bounds),), [[0]], integers=integers, bins=16)
    assert (len(names) == bounds[1] - bounds[0] + 2) == whole


@pytest.mark.parametrize("bounds", [(0, 100), (-10000, 50000), (1, 31), (-3, -1), (1900, 2020)])
def test_edges_of_whole_numbers_lie_between_them(bounds: tuple[int, int]) -> None:
    """A number and anything that rounds to it lie in the same bins."""
    near = np.arange(max(bounds[0], -300), min(bounds[1], 2100) + 1)
    numbers = np.concatenate([near, np.arange(*bounds, 1 + (bounds[1] - bounds[0]) // 300)])[:, None]
    exact, _ = binned((Column("x", bounds),), numbers, integers="all")
    for shift in (-0.49, 0.49):
        np.testing.assert_array_equal(binned((Column("x", bounds),), numbers + shift, integers="all")[0], exact)
    assert (exact.sum(axis=0) > 0).all(), "a bin that holds no number"


def test_pairs_are_the_products_of_coarse_bins() -> None:
    out, names = binned((AGE, JOB, SHARE), [[3, 1, 0.9]], bins=4, pairs=2, integers=["age"])
    single = 4 + 3 + 8
    assert len(names) == single + 2 * 3 + 2 * 2 + 3 * 2 + 1
    assert {name for name, one in zip(names, out[0], strict=True) if one and ", " in name} == {
        "age from 1.5, job=b",
        "age from 1.5, share from 0.0223495",
        "job=b, share from 0.0223495",
    }
    np.testing.assert_allclose(out[0].max(), 1 / np.sqrt(8), rtol=1e-6)


numbers = st.floats(allow_nan=True, allow_infinity=True)
bounds = st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(bounds, numbers), min_size=1, max_size=12), st.integers(2, 40), st.sampled_from([None, 2, 5]))
def test_no_row_is_longer_than_the_bound_whatever_it_holds(
    given: list[tuple[tuple[float, float], float]], steps: int, pairs: int | None
) -> None:
    """In exact arithmetic on the float32 numbers that are stored; and all rows are as long as each other."""
    columns = (*(Column(f"x{i}", pair) for i, (pair, _) in enumerate(given)), JOB, MARK)
    other = [value for _, value in given]
    out, _ = binned(columns, [[*other, 1, 0], [*[0.0] * len(other), 2, 1]], bins=steps, pairs=pairs)
    squares = [sum(float(entry) ** 2 for entry in row if entry) for row in out]
    assert squares[0] == squares[1] and 1 - 1e-6 < squares[0] <= 1


def test_waves_are_cosines_of_a_column_and_of_its_asinh() -> None:
    """Of [0, 100] by hand: 50 is half of the way, 100 and what is no number the whole of it."""
    wide = Column("x", (0, 100))
    out, names = binned((wide, AGE), [[50, 0], [100, 3], [np.nan, 3], [-np.inf, 0]], waves=2, integers="all")
    ages = ["age from 0", "age from 0.5", "age from 1.5", "age from 2.5"]
    assert names == [*ages, "x wave 1", "x wave 2", "asinh x wave 1", "asinh x wave 2", "constant"]
    rows = out / out[:, -1:]
    part = np.arcsinh(50) / np.arcsinh(100)
    slow, fast = 16 / 17, 4 / 5
    half = [1, 0, 0, 0, 0, -fast, slow * np.cos(np.pi * part), fast * np.cos(2 * np.pi * part), 1]
    end, start = [0, 0, 0, 1, -slow, fast, -slow, fast, 1], [1, 0, 0, 0, slow, fast, slow, fast, 1]
    np.testing.assert_allclose(rows, [half, end, end, start], atol=1e-6)


many = st.lists(st.tuples(bounds, numbers), min_size=1, max_size=12)


@given(many, st.integers(1, 64), st.booleans(), st.integers(0, 2**32 - 1))
def test_no_row_of_waves_is_longer_than_the_bound_whatever_it_holds(
    given: list[tuple[tuple[float, float], float]], waves: int, products: bool, seed: int
) -> None:
    """In exact arithmetic on the float32 numbers that are stored; the longest is of all lower bounds."""
    columns = (*(Column(f"x{i}", pair) for i, (pair, _) in enumerate(given)), JOB, MARK)
    drawn = [[*np.random.default_rng((seed, i)).uniform(-1e6, 2e6, len(given)), 2, 1] for i in range(5)]
    least = [*(pair[0] for pair, _ in given), 0, 1]
    rows = [[*(value for _, value in given), 1, 0], *drawn, least]
    out, _ = binned(columns, rows, waves=waves, products=products)
    squares = [sum(Fraction(float(entry)) ** 2 for entry in row) for row in out]
    assert max(squares) <= 1 and squares[-1] > 1 - 1e-5


def test_few_whole_numbers_are_one_hots_where_the_recipe_says_that_they_are_whole() -> None:
    """A mark from 0 to 3 may have fractions, which rounding would lose."""
    for integers, whole in [([], False), (["age"], True), ("all", True)]:
        out, names = binned((AGE,), [[2.4], [2.0]], waves=2, integers=integers)
        assert (names[0] == "age from 0") == whole
        assert (out[0] == out[1]).all() == whole


def test_whole_numbers_are_rounded() -> None:
    """Bounds are wide, so these are cosines."""
    columns = (Column("x", (-50, 99999)),)
    for waves in (2, 64):
        exact, _ = binned(columns, [[0], [1], [7], [99999], [-50]], waves=waves, integers=["x"])
        near, _ = binned(columns, [[0.4], [0.6], [6.51], [1e9], [-50.3]], waves=waves, integers=["x"])
        np.testing.assert_array_equal(near, exact)
        assert (binned(columns, [[0.4]], waves=waves)[0] != exact[0]).any()


def test_bins_and_pairs_stand_in_place_of_waves() -> None:
    for settings in ({"bins": 4}, {"pairs": 4}):
        with pytest.raises(ValueError, match="bins and pairs stand in place of waves"):
            Bin(waves=8, **settings)
        assert Bin(**settings).cosines is None
    assert Bin().cosines == 16 and Bin(waves=8).cosines == 8


def test_an_entry_is_the_largest_number_that_keeps_a_row_short() -> None:
    for ones in range(1, 3000):
        entry = bins._entry(ones)
        assert ones * Fraction(float(entry)) ** 2 <= 1 < ones * Fraction(float(np.nextafter(entry, np.float32(2)))) ** 2


def table(folder: Path, rows: pd.DataFrame, **settings: Any) -> Data:
    rows.to_csv(folder / "t.csv", index=False)
    told = {
        "path": "t.csv",
        "target": "y",
        "bounds": {"a": [0, 9]},
        "categorical": {"c": ["x", "y"]},
        "classes": [0, 1],
    }
    return Data.model_validate(told | {"missing": {"a": {"indicator": True}}, "preprocess": [{"bin": {}}]} | settings)


ROWS = pd.DataFrame({"a": [None, 1, 5.5, 9] * 5, "c": ["x", "y", "", "x"] * 5, "y": [0, 1, 1, 0] * 5})


@pytest.mark.parametrize(
    ("steps", "bound"),
    [([], 1.0), ([{"bias": {"value": 2}}], 5**0.5), ([{"bias": {"value": 2}}, {"unit-norm": {}}], 1.0)],
)
def test_the_outline_knows_the_norm(tmp_path: Path, steps: list[Any], bound: float) -> None:
    known = outline(table(tmp_path, ROWS, preprocess=[{"bin": {}}, *steps]), tmp_path)
    assert known.norm_bound == pytest.approx(bound, rel=1e-12)


def test_the_outline_is_that_of_every_table_of_so_many_rows(tmp_path: Path) -> None:
    """No edge, name or bound follows from a record: another table gives the same outline."""
    first = outline(table(tmp_path, ROWS), tmp_path)
    other = pd.DataFrame({"a": [1e9, -4.0] * 9 + [3, 1e9], "c": ["y"] * 20, "y": [1] * 19 + [0]})
    assert outline(table(tmp_path, other), tmp_path) == first


@pytest.mark.parametrize(
    ("columns", "settings", "said"),
    [
        (None, {}, "bin: is for the columns of a table"),
        ((Column("x"), SHARE), {}, "bin: no public bounds for column x; give data.bounds: {x: "),
        ((Column("x", (-1.7e308, 1.7e308)),), {}, "the bounds of x are too near or too far apart to compute with"),
        ((SHARE, Column("x", (0, 5e-324))), {}, "the bounds of x are too near or too far apart to compute with"),
        ((SHARE, Column("x", (0, 9.5))), {"integers": "all"}, "the bounds of x are no whole numbers; give whole ones"),
        ((SHARE,), {"integers": ["shar"]}, "integers names 'shar', which is no numeric column; did you mean 'share'?"),
        ((Column("job=a", (0.0, 1.0), indicator=True, category="job"),), {}, "job=a is the work of an earlier step"),
        (tuple(Column(f"x{i}", (0, 1)) for i in range(60)), {"pairs": 40}, "but 100000 are the most"),
        (tuple(Column(f"x{i}", (0, 1)) for i in range(800)), {"waves": 64}, "but 100000 are the most"),
    ],
)
def test_what_cannot_be_binned_is_refused(columns: Any, settings: dict[str, Any], said: str) -> None:
    layout = Layout((4,), bounds=(0.0, 1.0)) if columns is None else Layout((len(columns),), columns)
    with pytest.raises(DataError) as refused:
        BinColumns(Bin(**settings), "add-remove").plan(layout)
    assert said in str(refused.value)


def test_products_are_of_the_first_two_cosines_and_of_categories_that_are_not_too_many() -> None:
    """By hand, at half weight; 51 categories have none, nor have two columns with more than 256 together."""
    wide, many = Column("far", (0, 100)), Column("many", values=tuple(map(str, range(51))))
    half = Column("half", values=tuple(map(str, range(50))))
    out, names = binned((wide, JOB, many, half), [[50, 1, 0, 7]], waves=4, products=True)
    pairs = {name: number for number, name in enumerate(names) if " x " in name}
    assert len(pairs) == 2 * 3 + 2 * 50 + 3 * 50 and not any("many=" in name for name in pairs)
    row = out[0] / out[0, -1]
    named = dict(zip(names, row, strict=True))
    for name, number in pairs.items():
        one, other = name.split(" x ")
        assert row[number] == pytest.approx(0.5 * named[one] * named[other], abs=1e-6)
