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
from dpsgd_cli.common import free_memory
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.data import on_disk, opening, own_table, table_files
from dpsgd_cli.data.on_disk import DiskPart
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine import coded_table
from dpsgd_cli.errors import DataError
from dpsgd_cli.methods.risks import affine as coded_sums
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
    monkeypatch.setattr(table_files, "ROWS_AT_ONCE", 7)


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


def test_the_numbers_are_those_of_a_small_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read(tmp_path, ROWS)
    opening._kept.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(table_files, "ROWS_AT_ONCE", 7)
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
    with pytest.raises(DataError, match=r"t.csv: column 'n' holds no number in data row 21") as refused:
        read(tmp_path, bad, on_disk=True)
    assert "Quetzal77" not in str(refused.value)
    with pytest.raises(DataError, match=r"data\.drop names 'di', which is no column"):
        read(tmp_path, ROWS, drop=["di"], on_disk=True)
    assert list((cache_folder() / "tables").iterdir()) == []


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


def test_rows_are_named_by_their_place_whatever_index_a_parquet_file_has(tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": ["1", "2", "x"], "y": ["u", "v", "u"]}, index=["a", "b", "c"])
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="column 'n' holds no number in data row 3"):
        opening.load_raw(Data(path="t.parquet", target="y"), tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_cannot_fit_into_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    read(tmp_path, ROWS)
    frame = pd.read_csv(tmp_path / "t.csv", sep=";", decimal=",", na_values="-", dtype={"y": str})
    frame.to_parquet(tmp_path / "t.parquet")
    size = (tmp_path / "t.csv").stat().st_size if kind == "csv" else 50 * 6 * 8
    changes = {"path": f"t.{kind}"} | ({"format": None} if kind == "parquet" else {})
    told = Data.model_validate(TOLD | changes)
    opening._kept.clear()
    monkeypatch.setattr(free_memory, "free_memory", lambda: size)
    opening.load_raw(told, tmp_path)
    opening._kept.clear()
    monkeypatch.setattr(free_memory, "free_memory", lambda: size - 1)
    monkeypatch.setattr(own_table, "read_table", None)
    with pytest.raises(DataError, match=rf"t\.{kind}: its rows take at least .* give data.on_disk: true"):
        opening.load_raw(told, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(opening.load_raw(told.model_copy(update={"on_disk": True}), tmp_path).train) == 50
    users = told.model_copy(update={"drop": []}).protecting(Unit(column="id", most_rows=2))
    with pytest.raises(DataError, match=r"for data\.on_disk: true, which reads in parts, keeps rows apart"):
        opening.load_raw(users, tmp_path)


def test_bounds_that_hold_no_value_are_refused_after_all_parts(tmp_path: Path, small_parts: None) -> None:
    """One value in the last part is enough; the first value outside is named by its place in the file."""
    rows = [f"{i};{'-' if i < 9 else '90'};u;01.02.2020;k;no" for i in range(30)]
    told = {"bounds": {"n": [0, 50]}, "on_disk": True}
    with pytest.raises(
        DataError, match=r"data.bounds: the bounds of 'n' hold none of its 21 values, first in data row 10"
    ):
        read(tmp_path, rows, **told)
    assert len(read(tmp_path, [*rows, "9;4;u;01.02.2020;k;no"], **told).train) == 31


def test_a_training_on_all_rows_in_parts_is_that_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and keys stay in files, and all rows are read in pieces. Weights and metrics are equal to the last bit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module, name in ((coded_sums, "PIECE"), (coded_table, "PIECE"), (on_disk, "CODED_AT_ONCE")):
        monkeypatch.setattr(module, name, 64)
    for name, number in (("MOST_HELD", 0), ("_KEYS_AT_ONCE", 100)):
        monkeypatch.setattr(on_disk, name, number)
    monkeypatch.setattr(table_files, "ROWS_AT_ONCE", 70)
    read(tmp_path, ROWS * 6)
    recipe = {
        "name": "large",
        "data": TOLD | {"bounds": {"n": [0, 50]}, "preprocess": [{"bin": {"grid": 2048}}], "split": {"test": 0.3}},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full"},
        "privacy": {"budget": {"epsilon": 5, "delta": 1e-4}},
        "epochs": 4,
        "seed": 1,
        "save_model": True,
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
        (weights,) = (tmp_path / name).rglob("model.safetensors")
        found.append((weights.read_bytes(), repr(result.metrics)))
    assert found[0] == found[1] and "test_accuracy" in found[0][1]
