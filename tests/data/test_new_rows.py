"""New rows for a model that is there: read in the layout that it was trained on, and refused with what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.data import computed_columns, opening
from dpsgd_cli.data.cards import card_of
from dpsgd_cli.data.column_settings import Computed, TableFormat
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

LAYOUT = Layout((3,), (Column("age", (0, 99)), Column("job", values=("smith", "nurse")), Column("pay")))
DATA = Data.model_validate({"path": "trained-on.csv", "target": "y", "classes": ["no", "yes"]})
ROWS = [[30, 1, 10.5], [40, 0, -2]]
FILES = {
    "as-trained.csv": "age,job,pay\n30,nurse,10.5\n40,smith,-2\n",
    "others.csv": "id;pay;job;age;y\n#7;10.5;nurse;30;no\n;-2;smith;40;\n",
}


def write(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder / name


@pytest.mark.parametrize("name", FILES)
def test_columns_are_found_by_name_and_others_are_left_alone(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, FILES[name])
    assert source_of(DATA, LAYOUT).rows(path).tolist() == ROWS


@pytest.mark.parametrize("titles", ["", "Report of 2027\n", "Report\n\nof 2027;a;b\n\n"])
def test_a_header_is_found_however_many_lines_stand_above_it(tmp_path: Path, titles: str) -> None:
    """The recipe skips three; what is wrong with a file without a header is said once, and shows no cell."""
    data = Data.model_validate({**DATA.model_dump(exclude_unset=True), "format": {"skip": 3}})
    path = write(tmp_path, "new.csv", titles + FILES["others.csv"])
    assert source_of(data, LAYOUT).rows(path).tolist() == ROWS
    bare = write(tmp_path, "bare.csv", titles + FILES["others.csv"].partition("\n")[2] * 3)
    with pytest.raises(DataError) as refused:
        source_of(data, LAYOUT).rows(bare)
    assert len(str(refused.value).splitlines()) == 1 and "header: false" in str(refused.value)
    assert "smith" not in str(refused.value)


def test_gaps_mean_what_the_recipe_says(tmp_path: Path) -> None:
    """Of numbers with and without a column that marks them, of categories, and of labels."""
    marks = Column("age is missing", (0, 1), indicator=True, category="age is missing", marks="age")
    columns = (Column("age", (0, 99), filling=50.0), marks, Column("job", values=("smith", ""), filling=""))
    layout = Layout((3,), columns)
    data = DATA.model_copy(update={"missing": {"y": "no"}})
    rows = [[50, 1, 1], [40, 0, 0]]
    path = write(tmp_path, "new.csv", "y,job,age\nNA,,\nyes,smith,40\n")
    assert source_of(data, layout).rows(path).tolist() == rows
    assert source_of(data, layout).rows(pd.read_csv(path)).tolist() == rows
    lines = write(tmp_path, "new.jsonl", '{"y": null, "age": null}\n{"y": "yes", "job": "smith", "age": 40}\n')
    for labelled in (path, lines):
        part = source_of(data, layout).labelled(labelled, ["no", "yes"])
        assert (part.x.tolist(), part.y.tolist()) == (rows, [0, 1])


def test_targets_are_those_of_training(tmp_path: Path) -> None:
    path = write(tmp_path, "new.csv", "y,age,job,pay\n175,30,nurse,10.5\n250,40,smith,-2\n")
    bounded = DATA.model_copy(update={"task": "regression", "classes": None, "target_bounds": (100.0, 200.0)})
    assert source_of(bounded, LAYOUT).labelled(path, None).y.tolist() == [0.5, 2.0]


def test_tables_in_memory_and_parquet_are_read_alike(tmp_path: Path) -> None:
    frame = pd.DataFrame({"pay": [10.5, -2], "age": [30, 40], "job": ["nurse", "smith"]})
    frame.to_parquet(tmp_path / "new.parquet")
    assert source_of(DATA, LAYOUT).rows(tmp_path / "new.parquet").tolist() == ROWS
    assert source_of(DATA, LAYOUT).rows(frame).tolist() == ROWS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("age,jobs,pay\n1,nurse,2\n", "new.csv: there is no column 'job', which the model needs; did you mean 'jobs'?"),
        ("age,job,pay\n1,pilot,2\n", "'job': 1 cell, first in data row 1, not among its public values"),
        ("age,job,pay\n1,nurse,2\n,nurse,2\n", "'age' has 1 missing value, first in data row 2"),
        ("age,job,pay\n1,nurse,lots\n", "'pay' holds no number in data row 1"),
        ("age,job,pay\n", "has a header but no rows"),
        ("age,age,job,pay\n1,2,nurse,3\n", "two columns are called 'age'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(DataError) as refused:
        source_of(DATA, LAYOUT).rows(write(tmp_path, "new.csv", content))
    assert said in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_separator_that_is_not_the_recipes_is_said_once_and_shows_no_cell(tmp_path: Path) -> None:
    data = DATA.model_copy(update={"format": TableFormat(separator=";")})
    with pytest.raises(DataError, match=r"new\.csv: its first line is one cell; the recipe separates cells by ';'$"):
        source_of(data, LAYOUT).rows(write(tmp_path, "new.csv", "age,job,pay\n1,nurse,2\n"))


def test_labels_are_classes_by_their_names_or_targets(tmp_path: Path) -> None:
    path = write(tmp_path, "new.csv", "y,age,job,pay\nyes,30,nurse,10.5\nno,40,smith,-2\n")
    part = source_of(DATA, LAYOUT).labelled(path, ["no", "yes"])
    assert (part.x.tolist(), part.y.tolist()) == (ROWS, [1, 0])
    numbers = write(tmp_path, "numbers.csv", "y,age,job,pay\n0.5,30,nurse,10.5\n7,40,smith,-2\n")
    regression = DATA.model_copy(update={"task": "regression", "classes": None})
    assert source_of(regression, LAYOUT).labelled(numbers, None).y.tolist() == [0.5, 7]
    with pytest.raises(DataError, match="1 label, first in data row 1, not among the classes"):
        source_of(DATA, LAYOUT).labelled(write(tmp_path, "odd.csv", "y,age,job,pay\nmaybe,1,nurse,2\n"), ["no", "yes"])
    with pytest.raises(DataError, match="there is no column 'y', which holds the labels"):
        source_of(DATA, LAYOUT).labelled(write(tmp_path, "none.csv", FILES["as-trained.csv"]), ["no", "yes"])


def test_arrays_are_of_the_models_shape(tmp_path: Path) -> None:
    layout, data = Layout((2, 2), bounds=(0, 1)), Data.model_validate({"path": "x.npz"})
    x = np.arange(12.0).reshape(3, 2, 2)
    np.savez(tmp_path / "new.npz", x=x, y=[4, 5, 4])
    np.save(tmp_path / "new.npy", x)
    for name in ("new.npz", "new.npy"):
        assert source_of(data, layout).rows(tmp_path / name).tolist() == x.tolist()
    assert source_of(data, layout).labelled(tmp_path / "new.npz", [5, 4]).y.tolist() == [1, 0, 1]
    bad: dict[str, tuple[Any, str]] = {
        "flat.npy": (x.reshape(3, 4), "has shape (3, 4) of float64, but the model needs numbers (N, 2, 2)"),
        "nan.npy": (np.where(x > 5, np.nan, x), "NaN or infinite values in 2 rows, the first is row 2"),
    }
    for name, (content, said) in bad.items():
        np.save(tmp_path / name, content)
        with pytest.raises(DataError) as refused:
            source_of(data, layout).rows(tmp_path / name)
        assert said in str(refused.value)
    with pytest.raises(DataError, match="takes a table"):
        source_of(DATA, LAYOUT).rows(tmp_path / "new.npz")


def test_rows_for_a_card_are_in_the_units_of_its_files() -> None:
    digits = Data.model_validate({"name": "digits"})
    pixels = np.full((1, 1, 8, 8), 4, np.uint8)
    assert np.unique(source_of(digits, card_of(digits, Path()).layout).rows(pixels)).tolist() == [0.25]


def test_a_text_is_counted_for_all_of_its_buckets_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, counts = [], computed_columns.features

    def features(texts: Sequence[str], rule: Computed) -> np.ndarray:
        counted.append(len(texts))
        return counts(texts, rule)

    monkeypatch.setattr(computed_columns, "features", features)
    rule = Computed("note", "text", buckets=50, words=1)
    columns = tuple(Column(f"note {at}", (0, 1), computed=replace(rule, bucket=at)) for at in range(50))
    path = write(tmp_path, "notes.csv", "note\ngood\nbad bad\n")
    rows = source_of(DATA, Layout((50,), columns)).one_by_one(path)
    assert rows.x.shape == (2, 50) and rows.x.max(axis=1).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert len(counted) == 2  # to find rows that cannot be used, and to use the others


def test_rows_without_a_label_are_left_out_wherever_labels_are_read(tmp_path: Path, monkeypatch: Any) -> None:
    """In memory, in parts and of new labelled rows; each by itself, and a bad cell is named by its row of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dpsgd_cli.data.table_files.ROWS_AT_ONCE", 3)
    lines = [f"{k},{('no', 'yes', '')[k % 3]}\n" for k in range(12)]
    write(tmp_path, "t.csv", "a,y\n" + "".join(lines))
    write(tmp_path, "kept.csv", "a,y\n" + "".join(line for line in lines if not line.endswith(",\n")))
    told = {"target": "y", "classes": ["no", "yes"], "bounds": {"a": [0, 20]}}
    for on_disk in (False, True):
        data = Data.model_validate({**told, "path": "t.csv", "rows": "labelled", "on_disk": on_disk})
        own: Any = opening.load_raw(data, tmp_path).train
        other: Any = opening.load_raw(Data.model_validate({**told, "path": "kept.csv"}), tmp_path).train
        assert np.asarray(own.x[0 : len(own)]).tolist() == other.x.tolist() and len(own) == len(other.x) == 8
        assert np.asarray(own.y[0 : len(own)]).tolist() == other.y.tolist()
    layout = Layout((1,), (Column("a", (0, 20)),))
    assert (
        source_of(data, layout).labelled(tmp_path / "t.csv", ["no", "yes"]).x.ravel().tolist()
        == other.x.ravel().tolist()
    )
    assert len(source_of(data, layout).rows(tmp_path / "t.csv")) == 12
    write(tmp_path, "t.csv", "a,y\n" + "".join(lines[:10]) + "x,no\n")
    with pytest.raises(DataError, match="'a' holds no number in data row 11"):
        opening.load_raw(Data.model_validate({**told, "path": "t.csv", "rows": "labelled"}), tmp_path)
