"""A user's own files: what is read, what is declared, and one clear message for each way to be wrong."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.data import opening
from dpsgd_cli.data.dataset import Column, Source
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data


def columns(source: Source) -> tuple[Column, ...]:
    assert source.layout.columns is not None
    return source.layout.columns


CSV = "age,job,pay,y\n30,nurse,10.5,no\n40,smith,-2,yes\n50,nurse,0,yes\n"


def read(folder: Path, content: str | bytes = CSV, name: str = "own.csv", **data: Any) -> Any:
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return opened(folder, {"path": name, "target": "y"} | data)


def opened(folder: Path, data: dict[str, Any]) -> Any:
    return opening.open_source(Data.model_validate(data), folder)


def test_a_declared_table(tmp_path: Path) -> None:
    source = read(tmp_path, categorical={"job": ["smith", "nurse"]}, bounds={"age": [0, 99]}, classes=["yes", "no"])
    assert source.train.x.tolist() == [[30, 1, 10.5], [40, 0, -2], [50, 1, 0]]
    assert source.train.y.tolist() == [1, 0, 0]
    assert [(c.name, c.bounds, c.values) for c in source.layout.columns or ()] == [
        ("age", (0, 99), None),
        ("job", None, ("smith", "nurse")),
        ("pay", None, None),
    ]
    assert source.warnings == ()
    assert len(source.declarations) == 3
    assert all("(recipe)" in said for said in source.declarations)
    assert list(source.sha256) == ["own.csv"]


def test_what_is_read_from_the_data_is_declared_public_with_a_warning(tmp_path: Path) -> None:
    source = read(tmp_path, categorical=["job"], bounds=[0, 100])
    assert columns(source)[1].values == ("nurse", "smith")
    assert source.classes == ("no", "yes")
    assert len(source.warnings) == 2
    assert "'job' were read from the data and are declared public" in source.warnings[0]
    assert sum("read from the data" in said for said in source.declarations) == 2


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_quotes_and_a_byte_order_mark(tmp_path: Path, separator: str) -> None:
    lines = [["age", '"job, or; trade"', "y"], ["30", '"a, b"', "no"], ["40", '"c; d"', "yes"]]
    content = "\ufeff" + "\r\n".join(separator.join(line) for line in lines)
    source = read(tmp_path, content, categorical=["job, or; trade"])
    assert columns(source)[1].values == ("a, b", "c; d")
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
    assert (source.train.y.tolist(), source.classes) == ([0, 1, 1], ("false", "true"))


def test_regression_targets_are_left_as_they_are(tmp_path: Path) -> None:
    source = read(tmp_path, "x,y\n1,0.25\n2,-3e2\n", task="regression")
    assert (source.train.y.tolist(), source.train.y.dtype, source.classes) == ([0.25, -300.0], np.float32, None)
    with pytest.raises(DataError, match="column 'y' has 1 missing value"):
        read(tmp_path, "x,y\n1,0.25\n2,\n", task="regression")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            "much",
            "holds 'much' in data row 2, which is not a number, as targets of data.task: regression must be; for cl",
        ),
        ("NA", "has 1 missing value, first in data row 2; fill them or leave those rows out$"),
    ],
)
def test_a_regression_target_that_is_no_number(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read(tmp_path, f"a,y\n1,2\n1,{bad}\n", task="regression")
    assert "data.categorical" not in str(raised.value) and "data.drop" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "data", "message"),
    [
        (CSV, {"target": "Y"}, r"data.target names 'Y', which is no column; did you mean 'y'\?"),
        (CSV, {"categorical": ["jbo"]}, r"data.categorical names 'jbo'.*did you mean 'job'"),
        (CSV, {"bounds": {"agee": [0, 1]}}, r"data.bounds names 'agee'.*did you mean 'age'"),
        (CSV, {"bounds": {"job": [0, 1]}, "categorical": ["job"]}, r"data.bounds names 'job', which is not a numeric"),
        (CSV, {"drop": ["nothing"]}, r"data.drop names 'nothing'"),
        (CSV, {"drop": ["y"]}, r"data.drop names the target"),
        (CSV, {"drop": ["age", "job", "pay"]}, r"no feature columns left besides the target 'y'"),
        (CSV, {}, r"own.csv: column 'job' holds 'nurse' in data row 1, which is not a number"),
        ("a,a,y\n1,2,x\n", {}, r"two columns are called 'a'"),
        ("", {}, r"own.csv is empty"),
        ("a,y\n", {}, r"has a header but no rows"),
        ("a,y\n1,x\n2,3,4,5\n", {}, r"cannot be read as a table"),
        (b"a,y\n\xff\xfe,1\n", {}, r"(not UTF-8|cannot be read)"),
        ("a,y\n1,x\nNA,z\n", {}, r"column 'a' has 1 missing value, first in data row 2"),
        ("a,y\n1,0.5\n2,1\n", {}, r"own.csv: label column 'y' holds 0.5, which is not a class"),
        ("a,y\n1,u\n2,\n", {}, r"label column 'y' has 1 missing label, first in data row 2"),
    ],
)
def test_bad_tables(tmp_path: Path, content: str | bytes, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, content, **data)


def test_all_wrong_names_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, target="z", categorical=["q"], drop=["w"])
    assert len(str(caught.value).splitlines()) == 3


def test_files_that_are_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no such file: {tmp_path.resolve()}/gone.csv"):
        opened(tmp_path, {"path": "gone.csv", "target": "y"})
    with pytest.raises(DataError, match=r"unknown kind of file; data.path takes .csv, .csv.gz, .parquet, .npz"):
        read(tmp_path, name="own.xlsx")
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


@pytest.mark.parametrize(
    ("arrays", "data", "message"),
    [
        ({"x": X}, {}, r"has no array 'y' \(known: x\)"),
        ({"x": X, "y": Y[:2]}, {}, r"labels have shape \(2,\), but must be \(3,\)"),
        ({"x": Y, "y": Y}, {}, r"x has shape \(3,\), but must be \(N, ...\)"),
        ({"x": X.astype(str), "y": Y}, {}, "must hold numbers"),
        (
            {"x": np.where(X == 9, np.nan, X), "y": Y},
            {},
            r"NaN or infinite values in 1 row of x, the first is row 2",
        ),
        ({"x": X, "y": Y, "x_test": X[:, 0], "y_test": Y}, {}, "test rows have shape"),
        ({"x": X, "y": Y + 0.5}, {}, "4.5|2.5"),
        ({"x": X, "y": Y}, {"bounds": {"a": [0, 1]}}, "an npz file has no column names"),
        ({"x": X, "y": Y.astype(object)}, {}, "cannot be read as npz"),
    ],
)
def test_bad_arrays(tmp_path: Path, arrays: dict[str, np.ndarray], data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_npz(tmp_path, arrays, **data)
