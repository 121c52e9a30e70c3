"""One record more or fewer changes nothing of the others, however a table is kept and read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpsgd_cli as dpsgd
from dpsgd_cli.common import free_memory
from dpsgd_cli.data import fingerprint, memory, opening, table_files
from dpsgd_cli.data.cells import TableRows, numbers_in, text_of
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

USES: dict[str, dict[str, Any]] = {
    "hash": {"columns": {"id": {"hash": 64}}},
    "text": {"columns": {"id": {"text": 16}}},
}
BERLIN = pd.Timestamp("2020-01-01 01:00", tz="Europe/Berlin")
IDS = [2**60 + 3 * number for number in range(20)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(table_files, "ROWS_AT_ONCE", 6)


def written(path: Path, ids: Sequence[int | None]) -> None:
    """Write a table of ids, which are no floats, and of classes that follow them."""
    classes = ["u" if identity is None or identity % 2 else "v" for identity in ids]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "y": classes}), path, row_group_size=9)
    else:
        rows = [{"id": identity, "y": one} for identity, one in zip(ids, classes, strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def features(path: Path, use: str, **more: Any) -> np.ndarray:
    opening._kept.clear()
    told = {"path": path.name, "target": "y", "classes": ["u", "v"], **USES.get(use, {}), **more}
    part = opening.load_raw(Data.model_validate(told), path.parent).train
    return np.asarray(part.x[0 : len(part)])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ending", ["jsonl", "parquet", "parquet in parts"])
def test_a_record_without_a_value_leaves_the_texts_of_others(tmp_path: Path, ending: str, use: str) -> None:
    """Integers beyond 2^53 beside a gap, which pandas would make floats, and so round."""
    kind, _, parts = ending.partition(" ")
    more = {"on_disk": True} if parts else {}
    found = []
    for name, ids in (("with", [None, *IDS]), ("without", IDS)):
        written(tmp_path / f"{name}.{kind}", ids)
        found.append(features(tmp_path / f"{name}.{kind}", use, **more))
    assert len(np.unique(found[1], axis=0)) > 5
    np.testing.assert_array_equal(found[0][1:], found[1])


@pytest.mark.parametrize("use", [*USES.values(), {"categorical": {"id": "private"}}, {"categorical": {"id": ["1"]}}])
@pytest.mark.parametrize("first", [True, False, Decimal("1.00"), Decimal("0"), 1.0, BERLIN])
def test_a_record_that_equals_others_leaves_their_texts(first: Any, use: dict[str, Any]) -> None:
    """pandas takes True for 1, and 1.00 for 1: the first of them would be the text of all."""
    others = [1, 0, Decimal("1.0"), True, False, 2, BERLIN.tz_convert("UTC")]
    if "1" in str(use.get("categorical")):
        first, others = Decimal("1.00"), [1, Decimal("1.0"), "1"]
    found = []
    for cells in ([first, *others], others):
        frame = pd.DataFrame({"id": pd.Series(cells, dtype=object), "y": ["u", "v", *["u"] * (len(cells) - 2)]})
        with memory.holding(Path("t.parquet"), TableRows.of(frame)):
            found.append(features(Path("t.parquet"), "", **use))
    np.testing.assert_array_equal(found[0][1:], found[1])


def test_equal_times_have_one_text() -> None:
    assert text_of(BERLIN) == text_of(BERLIN.tz_convert("UTC")) == "2020-01-01 00:00:00+00:00"


def test_arrow_tables_in_memory_keep_their_integers() -> None:
    found = memory.table_of(pa.table({"id": pa.array([None, *IDS], pa.int64()), "n": pa.array([1, *IDS], pa.uint64())}))
    assert found is not None
    assert found["id"].texts()[1:] == found["n"].texts()[1:] == list(map(str, IDS))


def test_a_line_with_too_many_fields_is_refused_in_parts_too(tmp_path: Path) -> None:
    """A comma in a cell that is not quoted would put values into other columns."""
    lines = ["a,b,y", *["1,2,u"] * 8, "1,5,u,v", *["1,2,v"] * 3]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    told = {"path": "t.csv", "target": "y", "classes": ["u", "v"], "bounds": {"a": [0, 9]}, "drop": ["b"]}
    for more in ({}, {"on_disk": True}):
        with pytest.raises(DataError, match="row 10 has 4 cells, not 3"):
            opening.load_raw(Data.model_validate(told | more), tmp_path)


def test_a_file_that_changes_while_it_is_converted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, parts = tmp_path / "t.csv", table_files.parts
    path.write_text("a,y\n" + "1,u\n2,v\n" * 10)

    def meanwhile(*given: Any) -> Any:
        path.write_text("a,y\n" + "7,u\n8,v\n" * 10)
        yield from parts(*given)

    monkeypatch.setattr("dpsgd_cli.data.own_table.parts", meanwhile)
    told = {"path": "t.csv", "target": "y", "classes": ["u", "v"], "bounds": {"a": [0, 9]}, "on_disk": True}
    with pytest.raises(DataError, match="changed while it was read"):
        opening.load_raw(Data.model_validate(told), tmp_path)
    assert not [*(tmp_path / "cache").rglob("*.npy")]


def test_an_answer_about_a_file_that_is_written_meanwhile_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("old")
    os.utime(path, ns=(10**18, 10**18))

    def read() -> dict[str, Any]:
        path.write_text("new")
        return {"text": "new"}

    fingerprint.found(path, "?", read)
    path.write_text("old")
    os.utime(path, ns=(10**18, 10**18))
    assert fingerprint.found(path, "?", lambda: {"text": path.read_text()}) == {"text": "old"}


def test_numbers_are_read_to_the_last_digit(tmp_path: Path) -> None:
    """Else a number would depend on whether another record's cell makes its column one of texts."""
    numbers = np.random.default_rng(0).random(300)
    (tmp_path / "t.csv").write_text("a\n" + "".join(f"{number:.17g}\n" for number in numbers))
    found = table_files.read_table(tmp_path / "t.csv", ".csv")
    np.testing.assert_array_equal(numbers_in(found["a"], TableFormat())[0], numbers)


def test_copies_of_files_count_as_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large file fills a container with them."""
    for name, told in (
        ("memory.max", "1000"),
        ("memory.current", "999"),
        ("memory.stat", "anon 9\ninactive_file 600\nactive_file 300\n"),
    ):
        (tmp_path / name).write_text(told + "\n")
    monkeypatch.setattr(free_memory, "_GROUP", tmp_path)
    assert free_memory.free_memory() == 901


def test_a_frame_with_an_arrow_stream_trains(tmp_path: Path) -> None:
    rows = pa.Table.from_pandas(pd.DataFrame({"a": [1, None, 3, 4] * 5, "y": ["u", "v"] * 10}).convert_dtypes())
    told: dict[str, Any] = {
        "bounds": {"a": (0, 9)},
        "missing": {"a": {"value": 1}},
        "classes": ["u", "v"],
        "epsilon": 1,
        "delta": 1e-5,
    }
    result = dpsgd.train(rows, {"data.evaluation": "public", "epochs": 1}, target="y", out=tmp_path, **told)
    assert result.privacy["epsilon"] <= 1
