"""A value is a function of its own cell and of the recipe: attacks of one record on others, each of which once won."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dpsgd_cli.data import memory, opening, table_files
from dpsgd_cli.data.cells import Cells, TableRows, number_of, numbers_in
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.splits import content_keys
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.of_records import StatedFacts, recipe_of_table
from dpsgd_cli.users.settings import Unit
from tests.data import neighbours


def read(folder: Path, content: str | pd.DataFrame, name: str, **told: Any) -> Any:
    opening._kept.clear()
    unit = told.pop("unit", None)
    data = Data.model_validate({"path": name, "target": "y", "classes": ["no", "yes"], **told})
    data = data if unit is None else data.protecting(Unit(column=unit, most_rows=9))
    if isinstance(content, str):
        (folder / name).write_text(content)
        return opening.load_raw(data, folder)
    with memory.holding(folder / name, memory.table_of(content) or TableRows.of({})):
        return opening.load_raw(data, folder)


def of_others(folder: Path, rows: Sequence[str], record: str, name: str, **told: Any) -> tuple[Any, Any]:
    """Return a table of `rows` below a header, with and without one more record in front, as they are read."""
    header, *others = rows
    lines = [header] if header else []
    return tuple(
        read(folder, "\n".join([*lines, *held]) + "\n", name, **told).train for held in ([record, *others], others)
    )


NUMBERS = {"missing": {"x": {"value": 3, "indicator": True}}, "bounds": {"x": [-9, 9]}}


@pytest.mark.parametrize(("cell", "mark"), [("0.00", "0"), ("-1.00", "-1"), ("009", "9")])
@pytest.mark.parametrize("record", ['"1,234.50"', "(12.00)", "1.5"])
def test_a_mark_of_missing_values_is_a_text_in_every_file(tmp_path: Path, cell: str, mark: str, record: str) -> None:
    """pandas took marks for numbers or for texts, by the type of the column, which one record decides."""
    told = NUMBERS | {"format": {"missing": [mark], "thousands": ","}}
    rows = ["x,y", *[f"{cell},no", f"{mark},yes", "2.5,no"] * 3]
    first, second = of_others(tmp_path, rows, f"{record},no", "t.csv", **told)
    np.testing.assert_array_equal(first.x[1:], second.x)
    assert second.x[:3].tolist() == [[float(cell), 0], [3, 1], [2.5, 0]]


def test_a_mark_is_compared_with_the_text_of_a_typed_number() -> None:
    written = TableFormat(missing=["-999", "0.00", "0.1"])
    for dtype in (np.float64, np.float32, np.int64):
        values = np.array([-999, 0, 7, 1], dtype) if dtype == np.int64 else np.array([-999, 0, 7, 0.1], dtype)
        found = numbers_in(Cells.of("x", values), written)[0]
        assert np.isnan(found).tolist() == [True, False, False, dtype != np.int64]


def test_a_quote_that_is_not_closed_in_the_last_cell_is_refused(tmp_path: Path) -> None:
    for end in ("", "\n"):
        (tmp_path / "t.csv").write_text(f'a,b\n1,x\n1,"y{end}')
        with pytest.raises(DataError, match="EOF inside of quotes"):
            table_files.read_table(tmp_path / "t.csv", ".csv")


def test_minus_zero_is_zero_so_no_fraction_moves_a_coin(tmp_path: Path) -> None:
    first, second = of_others(tmp_path, ["x,y", *["-0,no", "0,yes"] * 9], "1.5,no", "t.csv", bounds={"x": [0, 9]})
    assert first.x[1:].tobytes() == second.x.tobytes() == np.zeros((18, 1)).tobytes()
    np.testing.assert_array_equal(content_keys(first.x[1:]).values, content_keys(second.x).values)


@pytest.mark.parametrize("use", [{"columns": {"id": {"hash": 64}}}, {"categorical": {"id": "private"}}])
def test_integers_of_json_lines_keep_their_digits(tmp_path: Path, use: dict[str, Any]) -> None:
    ids = [2**60 + 3 * number for number in range(40)]
    rows = ["", *(json.dumps({"id": one, "y": "no"}) for one in ids)]
    first, second = of_others(tmp_path, rows, '{"id": 12.0, "y": "no"}', "t.jsonl", **use)
    np.testing.assert_array_equal(first.x[1:], second.x)
    assert len(np.unique(second.x)) > 25


def test_the_columns_of_json_lines_are_those_of_the_recipe_in_its_order(tmp_path: Path) -> None:
    told = {"bounds": {name: [0, 9] for name in "acb"}, "missing": {"a": 0}}
    rows = ["", *[json.dumps({"a": 1, "b": 2, "c": 3, "y": "no"})] * 4]
    first, second = of_others(tmp_path, rows, '{"c": 5, "b": 4, "y": "no"}', "t.jsonl", **told)
    assert (first.x[:2].tolist(), second.x[:1].tolist()) == ([[0, 5, 4], [1, 3, 2]], [[1, 3, 2]])
    with pytest.raises(DataError, match="records have a key 'z' that the recipe does not name"):
        of_others(tmp_path, rows, '{"a": 1, "b": 2, "c": 3, "z": 1, "y": "no"}', "t.jsonl", **told)


def test_a_folder_cut_by_place_says_that_names_are_public(tmp_path: Path) -> None:
    for folder in ("neg", "pos"):
        (tmp_path / "texts" / folder).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "texts" / folder / f"{number}.txt").write_text(f"{folder} {number}")
    data = Data.model_validate({"path": "texts", "classes": ["neg", "pos"], "text": {"length": 4, "words": 64}})
    said = [
        opening.load_raw(data.protecting(None, by_place=by_place), tmp_path).declarations for by_place in (False, True)
    ]
    named = [[one for one in lines if "another text under the same name" in one] for lines in said]
    assert (len(named[0]), len(named[1])) == (0, 1)


def test_bounds_make_a_column_of_numbers_whatever_its_type() -> None:
    facts = StatedFacts({"a": [0, 1]}, {}, ["no", "yes"])
    made = [
        recipe_of_table(TableRows.of({"a": pd.Series(cells), "y": ["no"] * len(cells)}), "y", facts, "t")
        for cells in ([True, False], [True, False, None])
    ]
    assert made[0] == made[1] and made[0]["data"]["bounds"] == {"a": [0, 1]}
    numbers = [
        numbers_in(Cells.of("a", pd.Series(cells)), TableFormat())[0] for cells in ([True, False], [True, False, None])
    ]
    assert numbers[0].tolist() == numbers[1][:2].tolist() == [1, 0]


def test_a_fraction_among_users_renames_nobody(tmp_path: Path) -> None:
    frames = [pd.DataFrame({"x": 0.5, "who": whose, "y": "no"}) for whose in ([1, 2, 3] * 3, [1, 2, 3] * 3 + [1.5])]
    names = [read(tmp_path, one, "t.parquet", bounds={"x": [0, 1]}, unit="who").train.owners for one in frames]
    assert sorted({*names[0]}) == ["1", "2", "3"] and sorted({*names[1]}) == ["1", "1.5", "2", "3"]


def test_a_label_that_is_no_class_as_it_is_spelled_changes_no_other(tmp_path: Path) -> None:
    rows = ["x,y", *["1,1", "2,01"] * 4]
    told: dict[str, Any] = {"bounds": {"x": [0, 9]}, "classes": ["1", "01"]}
    assert read(tmp_path, "\n".join(rows) + "\n", "t.csv", **told).train.y.tolist() == [0, 1] * 4
    with pytest.raises(DataError, match="1 label, first in data row 1, not among the classes"):
        of_others(tmp_path, rows, "3,1.0", "t.csv", **told)
    first, second = of_others(tmp_path, ["x,y", "1,1", "2,0"], "3,1.0", "t.csv", bounds={"x": [0, 9]}, classes=[0, 1])
    assert (first.y.tolist(), second.y.tolist()) == ([1, 1, 0], [1, 0])


@pytest.mark.parametrize("blank", ["", " ", "\u00a0", " \t"])
def test_a_cell_of_blanks_is_a_gap_of_every_kind(tmp_path: Path, blank: str) -> None:
    told = NUMBERS | {"categorical": {"c": ["a"]}, "columns": {"h": {"hash": 8}}}
    source = read(tmp_path, f"x,c,h,y\n{blank},{blank},{blank},no\n1,a,b,yes\n", "t.csv", **told)
    assert source.train.x[0].tolist() == [3, 1, 1, 8]
    with pytest.raises(DataError, match="1 missing label, first in data row 1"):
        read(tmp_path, f"x,y\n1,{blank}\n2,no\n", "t.csv", bounds={"x": [0, 9]})


def test_text_is_compared_in_one_form_of_unicode(tmp_path: Path) -> None:
    told = {"categorical": {"Ort": ["Zu\u0308rich"]}, "columns": {"Größe": {"hash": 64}}}
    header = "Ort,Gro\u0308ße,y"
    source = read(tmp_path, f"{header}\nZürich,é,no\nZu\u0308rich,e\u0301,yes\n", "t.csv", **told)
    assert source.train.x[0].tolist() == source.train.x[1].tolist()


@pytest.mark.parametrize(
    "text", ["1.", "+1", ".5", "1e400", "inf", "nan", "-nan", "-0", "0x10", " 1", "1_0", "1,5", "NaN", "12-", "true"]
)
def test_a_number_is_the_same_alone_and_in_a_column_that_is_converted_at_once(text: str) -> None:
    """Arrow converts columns of plain numbers; the other way calls `number_of` for each different text."""
    alone = number_of(text, TableFormat())
    for others in (["2.5"], ["2.5", "(7)"]):
        numbers, bad = numbers_in(Cells.of("x", [text, *others]), TableFormat())
        assert bad[0] == (alone is None) and (alone is None or np.array_equal(numbers[0], alone, equal_nan=True))
        assert numbers[1] == 2.5


def test_both_readers_of_text_find_the_same_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's `csv` reads files with comments or with blanks before quotes."""
    rows = ['1,"a ""b"" c",x', "", '2,"two\nlines",\u00e9', '3,half"quoted,', '"4"5, z ,"#7"']
    (tmp_path / "t.csv").write_text("\n\na,b,c\n" + "\n".join(rows))
    by_arrow = table_files.read_table(tmp_path / "t.csv", ".csv")
    monkeypatch.setattr(table_files, "_has_blank_quotes", lambda *_: True)
    by_csv = table_files.read_table(tmp_path / "t.csv", ".csv")
    assert by_arrow.arrow.to_pydict() == by_csv.arrow.to_pydict()
    assert by_csv["b"].texts() == ['a "b" c', "two\nlines", 'half"quoted', "z "]
    monkeypatch.undo()
    (tmp_path / "t.csv").write_text('a,b # names\n# nothing\n1, "x, # y" # said\n')
    found = table_files.read_table(tmp_path / "t.csv", ".csv", TableFormat(comment="#", separator=","))
    assert found.arrow.to_pydict() == {"a": ["1"], "b ": ["x, # y "]}


def test_a_typed_column_has_the_texts_of_its_values() -> None:
    typed = {
        "whole": (pa.array([2**60 + 1, None]), [str(2**60 + 1), None]),
        "real": (pa.array([3.0, float("nan")]), ["3", None]),
        "short": (pa.array([0.1, -0.0], pa.float32()), ["0.1", "0"]),
        "truth": (pa.array([True, None]), ["True", None]),
        "time": (pa.array([0, None], pa.timestamp("ns", "Europe/Berlin")), ["1970-01-01 00:00:00+00:00", None]),
        "day": (pa.array([0, 1], pa.date32()), ["1970-01-01", "1970-01-02"]),
    }
    for name, (array, texts) in typed.items():
        assert Cells(name, pa.chunked_array([array])).texts() == texts, name


NOON, DAY = datetime(2020, 1, 31, 12), date(2020, 1, 31)


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        ([NOON, DAY, None], ["2020-01-31 12:00:00", "2020-01-31", None]),
        ([DAY, DAY, None], ["2020-01-31", "2020-01-31", None]),
        ([1.0, -0.0, "x"], ["1", "0", "x"]),
        ([2**60 + 1, 0.5], ["1152921504606846977", "0.5"]),
        ([10**400, 0.5], [str(10**400), "0.5"]),
        ([True, 5], ["True", "5"]),
        ([1, 2.5, None], ["1", "2.5", None]),
    ],
)
def test_a_value_of_a_list_or_an_object_column_does_not_follow_from_the_types_of_others(
    cells: list[Any], texts: list[str | None]
) -> None:
    held = pd.Series(cells, dtype=object)
    assert Cells.of("a", held).texts() == texts
    for column in (cells, held.to_numpy()):
        table, _ = memory.records_of({"a": column})
        assert isinstance(table, TableRows)
        assert table["a"].texts() == texts


def test_one_record_of_a_random_table_changes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.fuzz` draws thousands more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seeds = range(60) if os.environ.get("CI") else random.sample(range(1 << 40), 60)
    found = [neighbours.differs(seed, tmp_path) for seed in seeds]
    assert {seed: what for seed, what in zip(seeds, found, strict=True) if what not in (None, "refused")} == {}
    assert found.count(None) > 50
