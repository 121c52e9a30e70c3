"""A large table in parts: the numbers of the reader of small tables, on disk, in files of the owner's own."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import dpsgd_cli as dpsgd
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.data import large_table, on_disk, opening, table_files
from dpsgd_cli.data.on_disk import DiskPart
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine import coded_table
from dpsgd_cli.errors import DataError
from dpsgd_cli.methods.dp_sgd import coded as coded_sums
from dpsgd_cli.users.settings import Unit

TOLD: dict[str, Any] = {
    "path": "t.csv",
    "target": "y",
    "classes": ["no", "01"],
    "format": {"separator": ";", "decimal": ",", "missing": ["-"]},
    "categorical": {"c": ["u", "v"]},
    "columns": {"d": {"date": "%d.%m.%Y", "bounds": ["2020-01-01", "2020-12-31"]}, "h": {"hash": 8}},
    "missing": {"n": {"value": 3, "indicator": True}},
    "drop": ["id"],
}
ROWS = [
    f"{i};{'-' if i % 5 == 0 else f'{i},5'};{'uv'[i % 2]};{i % 28 + 1:02d}.02.2020;k{i % 11};{['no', '01'][i % 3 == 0]}"
    for i in range(50)
]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(large_table, "ROWS_AT_ONCE", 7)


def read(folder: Path, rows: list[str], **changes: Any) -> Any:
    (folder / "t.csv").write_text("id;n;c;d;h;y\n" + "\n".join(rows) + "\n")
    return opening.load_raw(Data.model_validate(TOLD | changes), folder)


def test_what_reading_a_large_table_frees_goes_back_to_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(table_files, "return_freed_memory", lambda: returned.append(True))
    read(tmp_path, ROWS)
    assert returned == []
    monkeypatch.setattr(opening, "_MOST_LEFT", 100)
    read(tmp_path, ROWS[1:])
    assert returned == [True]


def test_parquet_columns_are_handed_over_as_pandas_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, np.nan, 2.0], "c": ["u", None, "v"], "d": [True, False, True]})
    rows.to_parquet(tmp_path / "t.parquet", row_group_size=2)
    found = table_files.read_table(tmp_path / "t.parquet", ".parquet", text_columns={"c"})
    expected = pd.read_parquet(tmp_path / "t.parquet")
    assert isinstance(found["c"].dtype, pd.CategoricalDtype)
    pd.testing.assert_frame_equal(found.astype({"c": expected["c"].dtype}), expected)


def test_the_numbers_are_those_of_a_small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read(tmp_path, ROWS)
    opening._kept.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(large_table, "ROWS_AT_ONCE", 7)
    for _ in range(2):
        parts = read(tmp_path, ROWS, on_disk=True)
        assert isinstance(parts.train, DiskPart)
        assert np.array_equal(parts.train.x[0:50], plain.train.x) and np.array_equal(parts.train.y[0:50], plain.train.y)
        assert (parts.layout, parts.classes, parts.declarations) == (plain.layout, plain.classes, plain.declarations)
        opening._kept.clear()
    kept = sorted((cache_folder() / "tables").iterdir())
    assert len(kept) == 2 and all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in kept)


@pytest.mark.usefixtures("small_parts")
def test_what_is_wrong_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    bad = [*ROWS[:20], "9;Quetzal77;u;01.02.2020;k;no"]
    with pytest.raises(DataError, match=r"counted from row 15: column 'n' holds no number in data row 7") as refused:
        read(tmp_path, bad, on_disk=True)
    assert "Quetzal77" not in str(refused.value)
    with pytest.raises(DataError, match=r"data\.drop names 'di', which is no column"):
        read(tmp_path, ROWS, drop=["di"], on_disk=True)
    assert list((cache_folder() / "tables").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": None}, "needs data.classes"),
        ({"categorical": ["c"]}, "needs the values of data.categorical"),
        ({"categorical": {"c": "private"}}, "needs stated bounds and categories"),
        ({"bounds": {"n": "private"}, "missing": None}, "needs stated bounds and categories"),
        ({"test_path": "t.csv"}, "is for one csv, tsv or parquet file"),
    ],
)
def test_what_would_be_read_from_all_rows_is_declared(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"data.on_disk: {said}"):
        read(tmp_path, ROWS, on_disk=True, **changes)


def test_rows_of_users_are_not_kept_apart(tmp_path: Path) -> None:
    data = Data.model_validate(TOLD | {"on_disk": True, "drop": []}).protecting(Unit(column="id", most_rows=2))
    (tmp_path / "t.csv").write_text("id;n;c;d;h;y\n" + "\n".join(ROWS) + "\n")
    with pytest.raises(DataError, match=r"data.on_disk: keeps rows apart, and those of a user \(privacy.unit\)"):
        opening.load_raw(data, tmp_path)


@pytest.mark.usefixtures("small_parts")
def test_parquet_in_parts_has_the_numbers_of_the_whole_file(tmp_path: Path) -> None:
    plain = read(tmp_path, ROWS)
    frame = pd.read_csv(tmp_path / "t.csv", sep=";", decimal=",", na_values="-", dtype={"y": str})
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=20)
    for changes in ({}, {"on_disk": True}):
        found = opening.load_raw(Data.model_validate(TOLD | {"path": "t.parquet", "format": None} | changes), tmp_path)
        np.testing.assert_array_equal(found.train.x[0:50], plain.train.x)
        np.testing.assert_array_equal(found.train.y[0:50], plain.train.y)


def test_a_training_on_all_rows_in_parts_is_that_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, keys and labels stay in files; held-out rows are counted in pieces. Equal but for the order of sums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module, name in ((coded_sums, "PIECE"), (coded_table, "PIECE"), (on_disk, "_CODED_AT_ONCE")):
        monkeypatch.setattr(module, name, 64)
    read(tmp_path, ROWS * 6)
    recipe = {
        "name": "large",
        "data": TOLD | {"bounds": {"n": [0, 50]}, "preprocess": [{"bin": {"grid": 2048}}], "split": {"test": 0.3}},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full"},
        "privacy": {"budget": {"epsilon": 5, "delta": 1e-4}},
        "seed": 1,
    }
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(recipe))
    asked, of_rows = [], coded_table.CodedTable.codes

    def watched(self: coded_table.CodedTable, start: int, stop: int) -> torch.Tensor:
        asked.append(self.coded.in_memory)
        return of_rows(self, start, stop)

    monkeypatch.setattr(coded_table.CodedTable, "codes", watched)
    found = []
    for name, changes in (("memory", {}), ("disk", {"data.on_disk": True})):
        asked.clear()
        result = dpsgd.train(tmp_path / "large.yaml", changes, out=tmp_path / name)
        assert asked and all(own == (name == "memory") for own in asked)
        found.append({key: own["mean"] for key, own in result.metrics.items()})
    assert found[0].keys() == found[1].keys() and "test_accuracy" in found[0]
    for key, own in found[0].items():
        assert own == pytest.approx(found[1][key], rel=1e-4, nan_ok=True), key


def test_a_model_is_that_of_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same recipe and seed: equal losses but for the order of sums."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read(tmp_path, ROWS * 6)
    recipe = {
        "name": "large",
        "data": TOLD | {"bounds": {"n": [0, 50]}, "preprocess": [{"bin": {"waves": 4}}]},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 50, "learning_rate": 1},
        "privacy": {"budget": {"epsilon": 5, "delta": 1e-5}},
        "epochs": 3,
        "seed": 1,
    }
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(recipe))
    losses = [
        dpsgd.train(tmp_path / "large.yaml", changes, out=tmp_path / name).metrics["test_loss"]["mean"]
        for name, changes in (("memory", {}), ("disk", {"data.on_disk": True}))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
