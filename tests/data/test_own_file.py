"""A user's own files: what is read, what is declared, and one clear message for each way to be wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from dpsgd_cli.data import opening, preparation
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.dataset import Column, RawDataset
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from dpsgd_cli.users.settings import Unit


def columns(source: RawDataset) -> tuple[Column, ...]:
    assert source.layout.columns is not None
    return source.layout.columns


CSV = "age,job,pay,y\n30,nurse,10.5,no\n40,smith,-2,yes\n50,nurse,0,yes\n"


def read(folder: Path, content: str | bytes = CSV, name: str = "own.csv", **data: Any) -> Any:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return opened(folder, {"path": name, "target": "y"} | data)


def opened(folder: Path, data: dict[str, Any]) -> Any:
    return opening.load_raw(Data.model_validate(data), folder)


def test_a_declared_table(tmp_path: Path) -> None:
    source = read(tmp_path, categorical={"job": ["smith", "nurse"]}, bounds={"age": [0, 99]}, classes=["yes", "no"])
    assert source.classes == ("no", "yes")  # the positive one is the second
    assert source.train.x.tolist() == [[30, 1, 10.5], [40, 0, -2], [50, 1, 0]]
    assert source.train.y.tolist() == [0, 1, 1]
    assert [(c.name, c.bounds, c.values) for c in source.layout.columns or ()] == [
        ("age", (0, 99), None),
        ("job", None, ("smith", "nurse", "")),
        ("pay", None, None),
    ]
    assert source.warnings == ()
    assert len(source.declarations) == 3
    assert all("(recipe)" in said for said in source.declarations)
    assert list(source.sha256) == ["own.csv"]


def test_what_is_read_from_the_data_is_declared_public_with_a_warning(tmp_path: Path) -> None:
    source = read(tmp_path, categorical=["job"], bounds=[0, 100])
    assert columns(source)[1].values == ("nurse", "smith", "")
    assert source.classes == ("no", "yes")
    (warning,) = source.warnings
    assert "column 'job' and the class labels were read from the data and are declared public" in warning
    assert sum("read from the data" in said for said in source.declarations) == 2


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_quotes_and_a_byte_order_mark(tmp_path: Path, separator: str) -> None:
    lines = [["age", '"job, or; trade"', "y"], ["30", '"a, b"', "no"], ["40", '"c; d"', "yes"]]
    content = "\ufeff" + "\r\n".join(separator.join(line) for line in lines)
    source = read(tmp_path, content, categorical=["job, or; trade"])
    assert columns(source)[1].values == ("a, b", "c; d", "")
    assert source.train.y.tolist() == [0, 1]


def test_compressed_csv_and_a_test_file(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("y,pay,job,age\nno,1,smith,20\n")
    source = read(tmp_path, gzip.compress(CSV.encode()), "own.csv.gz", test_path="test.csv", categorical=["job"])
    assert source.test is not None
    assert (source.test.x.tolist(), source.test.y.tolist()) == ([[20, 1, 1]], [0])
    assert set(source.sha256) == {"own.csv.gz", "test.csv"}


def test_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": [1, 2, 3], "c": pd.Categorical(["u", "v", "u"]), "y": [False, True, True]})
    frame.to_parquet(tmp_path / "own.parquet")
    source = opened(tmp_path, {"path": "own.parquet", "target": "y", "categorical": {"c": ["u", "v"]}})
    assert source.train.x.tolist() == [[1, 0], [2, 1], [3, 0]]
    assert (source.train.y.tolist(), source.classes) == ([0, 1, 1], (False, True))


def test_regression_targets_are_left_as_they_are(tmp_path: Path) -> None:
    source = read(tmp_path, "x,y\n1,0.25\n2,-3e2\n", task="regression")
    assert (source.train.y.tolist(), source.train.y.dtype, source.classes) == ([0.25, -300.0], np.float32, None)
    with pytest.raises(DataError, match="column 'y' has 1 missing value"):
        read(tmp_path, "x,y\n1,0.25\n2,\n", task="regression")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("much", "holds no number in data row 2, as data.format says .*; targets of data.task: regression must be"),
        ("NA", "has 1 missing value, first in data row 2; say what they mean, data.missing: {y: VALUE}, or leave"),
    ],
)
def test_a_regression_target_that_is_no_number(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path, f"a,y\n1,2\n1,{bad}\n", task="regression")
    assert "data.categorical" not in str(raised.value) and "data.drop" not in str(raised.value)


def test_all_that_is_wrong_with_a_table_is_reported_together(tmp_path: Path) -> None:
    """Names, cells, labels and bounds; nothing else of a column that a wrong name meant, or that holds text."""
    content = "age,job,pay,rank,y\n30,nurse,10.5,1,no\n,smith,inf,2,\n50,,0,3,yes\n"
    data = {"path": "own.csv", "target": "y", "classes": ["no", "yes"], "bounds": {"rnak": [0, 9]}}
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(DataError) as caught:
        preparation.outline(Data.model_validate(data), tmp_path)
    lines = str(caught.value).splitlines()
    wanted = [
        "data.bounds names 'rnak'",
        "'age' has 1 missing",
        "'job' holds no number in data row 1",
        "'pay' has 1 missing or inf",
    ]
    wanted += ["scale by bounds: no public bounds for columns age, pay;", "label column 'y' has 1 missing label"]
    for line, words in zip(lines, wanted, strict=True):
        assert words in line


GAPS = "age,job,pay,y\n30,nurse,10.5,no\n,,NA,yes\n50,?,-2,no\n"


def test_a_gap_means_what_the_recipe_says(tmp_path: Path) -> None:
    missing = {"age": {"indicator": True}, "pay": 7, "job": "other"}
    data: dict[str, Any] = {"categorical": {"job": ["nurse", "other"]}, "bounds": {"age": [20, 60], "pay": [-9, 99]}}
    source = read(tmp_path, GAPS, missing=missing, classes=["no", "yes"], **data)
    assert [column.name for column in columns(source)] == ["age", "age is missing", "job", "pay"]
    assert source.train.x.tolist() == [[30, 0, 0, 10.5], [40, 1, 1, 7], [50, 0, 1, -2]]
    assert source.warnings == ()
    assert source.declarations[-1].endswith("are public (recipe): age 40.0, job 'other', pay 7.0.")


def test_an_empty_category_is_a_category_whether_there_are_any_or_not(tmp_path: Path) -> None:
    """Or what a model looks like would tell of single records."""
    data: dict[str, Any] = {"missing": {"age": 0, "pay": 0}, "categorical": {"job": ["nurse"]}}
    with_gaps, without = (read(tmp_path, text, **data) for text in (GAPS, GAPS.replace(",,", ",nurse,")))
    assert columns(with_gaps) == columns(without) and columns(without)[1].values == ("nurse", "")
    assert with_gaps.train.x[:, 1].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("task", "filling", "targets"), [("classification", "no", [1, 0]), ("regression", 5, [1, -0.5])]
)
def test_a_missing_target_may_have_a_meaning(tmp_path: Path, task: str, filling: Any, targets: list[float]) -> None:
    told = "yes" if task == "classification" else "20"
    asked = {"classes": ["no", "yes"]} if task == "classification" else {"target_bounds": [0, 20]}
    source = read(tmp_path, f"a,y\n1,{told}\n2,\n", task=task, missing={"y": filling}, **asked)
    assert source.train.y.tolist() == targets


@pytest.mark.parametrize("name", ["own.tsv", "own.tsv.gz", "own.jsonl", "own.ndjson.gz"])
def test_tabs_and_json_lines(tmp_path: Path, name: str) -> None:
    """A key that an object lacks is a missing value; text that looks like a date stays text."""
    rows = [{"age": 30, "day": "2020-01-01", "y": True}, {"age": 4.5, "day": "x", "y": False}, {"day": "x", "y": True}]
    if "tsv" in name:
        text = "age\tday\ty\n30\t2020-01-01\ttrue\n4.5\tx\tFALSE\n\tx\ttrue\n"
    else:
        text = "\n".join(json.dumps(row) for row in rows)
    content = gzip.compress(text.encode()) if name.endswith("gz") else text
    classes = ("FALSE", "true") if "tsv" in name else (False, True)
    days = {"day": ["x", "2020-01-01"]}
    source = read(tmp_path, content, name, missing={"age": -1}, bounds={"age": [-1, 99]}, categorical=days)
    assert source.train.x.tolist() == [[30, 1], [4.5, 0], [-1, 0]]
    assert (source.train.y.tolist(), source.classes) == ([1, 0, 1], classes)


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no such file: {tmp_path.resolve()}/gone.csv"):
        opened(tmp_path, {"path": "gone.csv", "target": "y"})
    with pytest.raises(
        DataError, match=r"unknown kind of file; data.path takes .csv, .csv.gz, .csv.zst, .tsv.*.parquet, .xlsx, .npz"
    ):
        read(tmp_path, name="own.ods")
    with pytest.raises(DataError, match=r"own.parquet cannot be read as parquet"):
        read(tmp_path, name="own.parquet")
    with pytest.raises(DataError, match=r"own.npz cannot be read as npz"):
        read(tmp_path, name="own.npz")


def test_a_test_file_without_a_column(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("y,pay,age\nno,1,20\n")
    with pytest.raises(DataError, match=r"test.csv has no column 'job', which own.csv has"):
        read(tmp_path, test_path="test.csv", drop=[])


X = np.arange(24, dtype=np.float64).reshape(3, 2, 2, 2)
Y = np.array([4, 2, 4])


def read_npz(folder: Path, arrays: dict[str, np.ndarray], **data: Any) -> Any:
    np.savez(folder / "own.npz", **arrays)  # type: ignore[arg-type]
    return opened(folder, {"path": "own.npz"} | data)


def test_arrays(tmp_path: Path) -> None:
    source = read_npz(tmp_path, {"x": X, "y": Y, "x_test": X[:1], "y_test": Y[:1]}, bounds=[0, 24])
    assert source.train.x.tolist() == X.tolist()
    assert (source.train.y.tolist(), source.classes) == ([1, 0, 1], (2, 4))
    assert source.test is not None
    assert source.test.y.tolist() == [1]
    assert (source.layout.shape, source.layout.bounds) == ((2, 2, 2), (0, 24))
    assert source.warnings


def test_arrays_of_bytes_have_public_bounds(tmp_path: Path) -> None:
    source = read_npz(tmp_path, {"x": X.astype(np.uint8), "labels": Y}, target="labels")
    assert source.layout.bounds == (0, 255)
    assert source.train.x.dtype == np.float32
    assert source.test is None


EUROPEAN = "# of last year\n30;nürse;10,5;n\n40;smith;-999;y\n"
FORMAT = {"separator": ";", "encoding": "latin-1", "decimal": ",", "header": False, "comment": "#", "missing": "-999"}


def test_a_file_is_read_as_the_recipe_says_it_is_written(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "target": "4",
        "categorical": {"2": ["nürse", "smith"]},
        "missing": {"3": 0.5},
        "format": FORMAT,
    }
    data |= {"target": "4"}
    source = read(tmp_path, EUROPEAN.encode("latin-1"), **data)
    assert source.train.x.tolist() == [[30, 0, 10.5], [40, 1, 0.5]]
    assert source.classes == ("n", "y")
    new = source_of(Data.model_validate({"path": "own.csv"} | data), source.layout, tmp_path)
    assert new.rows(tmp_path / "own.csv").tolist() == source.train.x.tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "adult"}, "format: only for a file of your own"),
        ({"path": "own.csv", "target": "y", "format": {"encoding": "hex"}}, "'hex' is no encoding of text"),
    ],
)
def test_a_format_that_cannot_be(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Data.model_validate({"format": FORMAT} | data)


def test_a_first_record_does_not_decide_how_its_file_is_read() -> None:
    """Without a header the first line is private, so the separator is not looked for in it."""
    with pytest.raises(ValueError, match="separator: is needed with header: false"):
        TableFormat(header=False)
    assert TableFormat(header=False, separator=";").separator == ";"


def test_a_changed_section_is_checked_and_leaves_its_original_alone() -> None:
    data = Data(path="own.csv", target="y").protecting(Unit(column="who", most_rows=2), folds=3)
    other = data.changed(target="z").protecting(None)
    assert (other.target, other.unit, data.target) == ("z", None, "y")
    assert data.unit == Unit(column="who", most_rows=2)
    assert data.changed(target="z").unit == data.unit
    with pytest.raises(ValueError, match="nothing"):
        data.changed(nothing=1)
