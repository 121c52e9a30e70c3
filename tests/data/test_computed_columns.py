"""Dates, hashes and text: by hand, record by record, and no row longer than its bound."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.data import outline, prepare
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.data.column_settings import DateColumn, HashedColumn, TextColumn
from dpsgd_cli.data.computed_columns import columns_of
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.step_settings import Bin
from dpsgd_cli.data.table import to_matrix
from dpsgd_cli.errors import DataError

DAY = DateColumn(date="%d.%m.%Y %H:%M", bounds=("2020-01-01", "2020-12-31"))


def matrix(cells: list[Any], use: Any, **filling: Any) -> tuple[np.ndarray, list[Column]]:
    from dpsgd_cli.data.column_settings import Missing

    problems: list[str] = []
    columns = columns_of("c", use, Missing(**filling) if filling else None, problems)
    assert problems == []
    return to_matrix(TableRows.of({"c": cells}), columns, "here"), columns


def test_a_date_is_its_days_and_its_places_in_the_cycles() -> None:
    """29 February 2020, at noon and one minute to midnight, was a Saturday; 1 January 2021 lies outside, a Friday."""
    found, columns = matrix(["29.02.2020 12:00", "29.02.2020 23:59", "01.01.2021 00:00"], DAY)
    assert [column.name for column in columns] == ["c", "c (month)", "c (weekday)", "c (hour)"]
    assert columns[0].bounds == (0.0, 366.0)
    told = [[column.values[int(code)] for column, code in zip(columns[1:], row[1:], strict=True)] for row in found]  # type: ignore[index]
    assert told == [["2", "Saturday", "12"], ["2", "Saturday", "23"], ["1", "Friday", "0"]]
    assert found[:, 0].tolist() == pytest.approx([59.5, 59 + (24 * 60 - 1) / (24 * 60), 366.0])


def test_dates_before_1970_and_those_that_a_file_holds_as_dates() -> None:
    use = DateColumn(date="%Y-%m-%d", bounds=("1900-01-01", "2000-01-01"))
    for cells in (["1969-12-31"], [pd.Timestamp("1969-12-31")]):
        found, columns = matrix(cells, use)
        assert [column.values[int(code)] for column, code in zip(columns[1:], found[0, 1:], strict=True)] == [  # type: ignore[index]
            "12",
            "Wednesday",
        ]
        assert found[0, 0] == 25566


def test_a_missing_date_means_what_the_recipe_says() -> None:
    use = DateColumn(date="%Y-%m-%d", bounds=("2020-01-01", "2020-01-10"))
    found, columns = matrix(["2020-01-02", None, "NA"], use, indicator=True)
    assert [column.name for column in columns] == ["c", "c is missing", "c (month)", "c (weekday)"]
    assert found[:, :2].tolist() == [[1, 0], [5, 1], [5, 1]]
    assert found[1:, 3].tolist() == [7, 7] and columns[3].values is not None and columns[3].values[7] == ""
    assert matrix(["2020-01-02", ""], use, value="2020-01-03")[0][1, 0] == 2
    with pytest.raises(DataError, match="'c' has 1 missing date, first in data row 2"):
        matrix(["2020-01-02", None], use)


def test_a_hash_is_public_and_the_same_everywhere() -> None:
    """MurmurHash3 with seed 0, whose published value for "foo" is 0xf6a5c420."""
    found, columns = matrix(["foo", "foo", None, "007", "7"], HashedColumn(hash=64))
    assert len(columns) == 1 and len(columns[0].values or ()) == 65
    assert found[0, 0] == found[1, 0] == 0xF6A5C420 % 64
    assert found[2, 0] == 64 and found[3, 0] != found[4, 0]


def test_a_text_is_its_words_at_length_one() -> None:
    found, columns = matrix(["good food", "Good, FOOD!", "food", "", None], TextColumn(text=32))
    assert len(columns) == 32 and {column.category for column in columns} == {"c (text)"}
    assert (found[0] == found[1]).all() and (found[2] > 0).sum() == 1
    assert not found[3].any() and not found[4].any()
    assert (found[0] > 0).sum() <= 3 and np.linalg.norm(found[0]) == pytest.approx(1, abs=1e-6)


@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.integers(2, 40), st.integers(1, 4))
def test_no_text_is_longer_than_one_in_the_numbers_that_are_stored(texts: list[str], buckets: int, words: int) -> None:
    found, columns = matrix(texts, TextColumn(text=buckets, words=words))
    for row in found.astype(np.float32):
        assert sum(Fraction(float(entry)) ** 2 for entry in row) <= 1
    number = Column("n", (0, 9))
    layout = Layout((buckets + 1,), (number, *columns))
    for settings in (Bin(waves=4), Bin(bins=4), Bin(pairs=3)):
        step = BinColumns(settings, "add-remove")
        made = step.transform(layout, None)(np.hstack([np.full((len(texts), 1), 5.0), found]))
        assert made.shape[1:] == step.plan(layout).shape
        for row in made:
            assert 0 < sum(Fraction(float(entry)) ** 2 for entry in row) <= 1


def test_other_records_do_not_change_what_a_record_becomes() -> None:
    cells = ["01.02.2020 10:00", "03.04.2020 11:30", None]
    for use, filling in ((DAY, {"indicator": True}), (HashedColumn(hash=8), {}), (TextColumn(text=8), {})):
        together = matrix(cells, use, **filling)[0]
        apart = np.concatenate([matrix([one], use, **filling)[0] for one in cells])
        assert (together == apart).all()


def test_the_cells_of_a_text_are_its_buckets_and_each_row_is_in_one() -> None:
    found, columns = matrix(["good food", "", "bad"], TextColumn(text=4))
    layout = Layout((5,), (Column("n", (0, 9)), *columns))
    step = BinColumns(Bin(waves=2), "add-remove")
    cells = step.columns(layout).cells
    rows = step.transform(layout, None)(np.hstack([np.full((3, 1), 5.0), found]))
    assert sorted(int(at) for one in cells for at in one.features) == list(range(rows.shape[1]))
    text = next(one for one in cells if len(one.features) == 4 and one.values.shape == (4, 4))
    assert text.of(rows).tolist() == [int(found[0].argmax()), 0, int(found[2].argmax())]


ROWS = pd.DataFrame(
    {
        "when": ["2020-01-01", "2020-06-30"] * 10,
        "city": [f"c{i}" for i in range(20)],
        "note": ["a good day", "bad"] * 10,
        "y": ["u", "v"] * 10,
    }
)
USES = {"when": {"date": "%Y-%m-%d", "bounds": ["2020-01-01", "2020-12-31"]}, "city": {"hash": 8}, "note": {"text": 16}}


@pytest.mark.parametrize("steps", [[{"bin": {}}], [{"scale": {}}, {"one-hot": {}}]])
def test_a_table_of_them_is_bounded_and_public(tmp_path: Path, steps: list[Any]) -> None:
    """The outline knows the longest row; one-hots and scaled days by hand: 1 + 3 one-hots + 1 text."""
    ROWS.to_csv(tmp_path / "t.csv", index=False)
    told = {"path": "t.csv", "target": "y", "classes": ["u", "v"], "columns": USES, "preprocess": steps}
    data = Data.model_validate(told)
    known = outline(data, tmp_path)
    assert known.norm_bound == pytest.approx(1.0 if "bin" in steps[0] else 5**0.5)
    assert known.norm_bound is not None
    made = prepare(data, tmp_path, 1, lambda *_: np.zeros(0), "add-remove")
    assert np.linalg.norm(made.train_x, axis=1).max() <= known.norm_bound * (1 + 1e-6)
    assert sum("becomes numbers is public (recipe)" in said for said in known.declarations) == 3
    new: Any = ROWS.assign(city="never seen", note="nor this").drop(columns="y")
    layout = made.layout
    assert layout is not None and layout == Layout.from_plain(layout.plain())
    assert len(source_of(data, layout).rows(new)) == 20
