"""Faults of tables times kinds of files times doors: each is refused by row and column, and no cell is shown.

Doors are the functions behind `recipe new`, `train` (whole and in parts), `evaluate` and `predict`. A new fault is a
line of `CELLS` or `FILES`. `tests/test_bad_input.py` tries whole commands, and records in memory.
"""

from __future__ import annotations

import re
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.data import draft, memory, opening
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.data.dataset import Layout
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from tests.data.faulty_tables import DATA, KINDS, PACKED, ROWS, SECRETS, SEMICOLONS, TEXT, bytes_of, packed, sound


def data_of(name: str, **more: Any) -> Data:
    return Data.model_validate(DATA | {"path": name} | (SEMICOLONS if name == "semicolons.csv" else {}) | more)


def layout() -> Layout:
    """Return the layout of a model of the sound table."""
    with memory.holding(Path("sound.parquet"), TableRows.of(sound().assign(n=1.0))):
        return opening.load_raw(data_of("sound.parquet"), Path()).layout


LAYOUT = layout()


def predicted(path: Path) -> None:
    """Raise DataError for the first row without a prediction, as the column `error` names it."""
    found = source_of(data_of(path.name), LAYOUT).one_by_one(path)
    bad = [(row, reason) for row, reason in enumerate(found.reasons, 1) if reason is not None]
    if bad:
        raise DataError(f"{path.name}: {bad[0][1]}, alone in data row {bad[0][0]}" if bad[1:] == [] else "several rows")


DOORS: dict[str, Callable[[Path], object]] = {
    "new": lambda path: draft.draft(path, "y", None, path.name),
    "train": lambda path: opening.load_raw(data_of(path.name), path.parent),
    "parts": lambda path: opening.load_raw(data_of(path.name, on_disk=True), path.parent),
    "evaluate": lambda path: source_of(data_of(path.name), LAYOUT).labelled(path, ["u", "v"]),
    "predict": predicted,
}


def message(error: BaseException) -> str:
    """Return the message of an error for the user; no part of its traceback holds a cell."""
    assert isinstance(error, DataError) and error.exit_code == 2, repr(error)
    whole = "".join(traceback.format_exception(error))
    for secret in SECRETS:
        assert secret not in whole, whole
    return str(error)


def opens(door: str, name: str) -> bool:
    return door != "parts" or name not in ("t.jsonl", "t.xlsx")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opening._kept.clear()


@pytest.mark.parametrize("name", KINDS)
def test_the_table_without_a_fault_is_accepted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(packed(name, bytes_of(name, sound(), tmp_path)))
    opened = [enter(tmp_path / name) for door, enter in DOORS.items() if opens(door, name)]
    assert opened


NUMBER, DAY = "column 'n' holds no number", "column 'd' holds no date of the form %Y-%m-%d"
CELLS: dict[str, tuple[str, Any, str]] = {
    "text among numbers": ("n", SECRETS[0], NUMBER),
    "a number in words": ("n", "seven thousand Quetzal77", NUMBER),
    "another decimal mark": ("n", "7177,5", NUMBER),
    "two decimal marks": ("n", "7177.5.1", NUMBER),
    "groups that the format does not have": ("n", "7,177.5", NUMBER),
    "a NUL in a number": ("n", "71\x0077", NUMBER),
    "an infinite number": ("n", "inf", "column 'n' has 1 missing or infinite value"),
    "a gap without a meaning": ("n", "", "column 'n' has 1 missing value"),
    "an unlisted category": ("c", SECRETS[0], "column 'c': 1 cell"),
    "no date": ("d", SECRETS[0], DAY),
    "another form of dates": ("d", SECRETS[2], DAY),
    "a day that no calendar has": ("d", "2071-71-77", DAY),
    "a missing date": ("d", "", "column 'd' has 1 missing date"),
    "an unlisted label": ("y", SECRETS[0], "'y': 1 label"),
    "a missing label": ("y", "", "'y' has 1 missing label"),
}
"""Column, content of one cell, and what is said. The row is drawn by the case's name. A draft takes every cell."""
OF_CELLS = {
    "t.csv": "train parts predict evaluate",
    "t.csv.zst": "parts",
    "semicolons.csv": "train",
    "t.jsonl": "train",
    "t.parquet": "train parts",
    "t.xlsx": "evaluate",
}
"""Kinds of files and the doors that each cell is tried at: every reader and every door."""


@pytest.mark.parametrize("cell", CELLS)
def test_a_faulty_cell_is_named_by_row_and_column(tmp_path: Path, cell: str) -> None:
    column, content, said = CELLS[cell]
    for name, doors in OF_CELLS.items():
        if cell.startswith("a NUL") and name == "t.xlsx":  # which no Excel file can hold
            continue
        frame, row = sound(), zlib.crc32(f"{cell}{name}".encode()) % ROWS
        frame.loc[row, column] = content
        (tmp_path / name).write_bytes(packed(name, bytes_of(name, frame, tmp_path)))
        if name == "t.csv":
            assert draft.draft(tmp_path / name, "y", None, name).told
        for door in doors.split():
            if door == "predict" and column == "y":
                continue
            with pytest.raises(DataError) as refused:
                DOORS[door](tmp_path / name)
            assert re.search(rf"{said}.*data row {row + 1}\b", message(refused.value)), (name, door, refused.value)


def changed(change: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[str, Path], bytes]:
    return lambda name, folder: packed(name, bytes_of(name, change(sound()), folder))


def edited(edit: Callable[[bytes], bytes]) -> Callable[[str, Path], bytes]:
    return lambda name, folder: packed(name, edit(bytes_of(name, sound(), folder)))


def after(edit: Callable[[bytes], bytes]) -> Callable[[str, Path], bytes]:
    return lambda name, folder: edit(packed(name, bytes_of(name, sound(), folder)))


def longer(text: bytes) -> bytes:
    """Put a separator into the tenth record."""
    lines = text.splitlines(keepends=True)
    mark = next(one for one in (b";", b"\t", b",") if one in lines[0])
    return b"".join([*lines[:10], lines[10].replace(mark, mark + b"Quetzal77" + mark, 1), *lines[11:]])


ALL, TRAINED = " ".join(DOORS), "train parts predict evaluate"
FILES: dict[str, tuple[Callable[[str, Path], bytes], str, str, str]] = {
    "empty": (after(lambda _: b""), " ".join(KINDS), ALL, "is empty|no line of text|has no rows|cannot be read"),
    "empty once unpacked": (edited(lambda _: b""), " ".join(PACKED), ALL, "holds no line of text"),
    "blank lines": (edited(lambda _: b"\n\n  \n"), "t.csv t.csv.gz t.jsonl", ALL, "no line of text|has no rows"),
    "a header alone": (changed(lambda frame: frame[:0]), " ".join({*KINDS} - {"t.jsonl"}), ALL, "has .*no rows"),
    "two columns of one name": (
        edited(lambda text: text.replace(b"d", b"n", 1)), " ".join(TEXT), ALL, "two columns are called 'n'",
    ),
    "a key twice": (
        edited(lambda text: text.replace(b'"c"', b'"n"')), "t.jsonl", ALL, "line 1 has the key 'n' twice",
    ),
    "a column missing": (changed(lambda frame: frame.drop(columns="n")), " ".join(KINDS), TRAINED, "no.*'n'|'n', wh"),
    "labels missing": (changed(lambda frame: frame.drop(columns="y")), " ".join(KINDS), "new train evaluate", "'y'"),
    "a column of gaps": (changed(lambda frame: frame.assign(n="")), " ".join(KINDS), "train parts evaluate",
                         "'n' has 24 missing values, first in data row 1"),
    "a record in place of the header": (
        edited(lambda text: text.partition(b"\n")[2]), " ".join(TEXT), ALL, "looks like a record",
    ),
    "cut short": (after(lambda content: content[:-3]), " ".join(KINDS), "train parts evaluate", ""),
    "cut short when packed": (
        after(lambda content: content[: len(content) // 2]), "t.csv.gz t.parquet t.xlsx", ALL, "cannot be read as",
    ),
    "bytes changed": (
        after(lambda content: content[:60] + bytes(255 - one for one in content[60:90]) + content[90:]),
        "t.csv t.csv.gz t.jsonl", "train", "",
    ),
    "another encoding": (
        edited(lambda text: text.replace(b"home", b"home \xe9")), " ".join((*TEXT, "t.jsonl")), TRAINED, "is not utf-8",
    ),
    "NUL characters": (edited(lambda text: text.replace(b"n", b"n\0", 1)), " ".join(TEXT), ALL, "NUL characters"),
    "UTF-16 without its mark": (
        edited(lambda text: text.decode().encode("utf-16-le")), " ".join(TEXT), ALL, "utf-16-le",
    ),
    "a line with too many fields": (edited(longer), " ".join(TEXT), ALL, "row 11 has 6 cells, not 5"),
    "a quote that is not closed": (
        edited(lambda text: text + b'"Quetzal77\n'), " ".join((*TEXT, "t.jsonl")), ALL,
        "EOF inside|row 26 has 1 cells|line 25 is no JSON",
    ),
    "no table": (after(lambda _: b"\x93Quetzal77 \xff" * 50), " ".join(KINDS), TRAINED, ""),
    "a list in a cell": (
        edited(lambda text: text.replace(b'"c": "b"', b'"c": ["Quetzal77"]', 1)), "t.jsonl", ALL,
        "column 'c' holds lists or objects, first in data row 2",
    ),
}  # fmt: skip
"""How a file is made, its kinds, the doors that refuse it, and what is said."""


@pytest.mark.parametrize("fault", FILES)
def test_a_faulty_file_is_refused(tmp_path: Path, fault: str) -> None:
    make, names, doors, said = FILES[fault]
    for name in names.split():
        (tmp_path / name).write_bytes(make(name, tmp_path))
        for door in doors.split():
            if not opens(door, name):
                continue
            with pytest.raises(DataError, match=name.partition(".")[0]) as refused:
                DOORS[door](tmp_path / name)
            assert re.search(said, message(refused.value)), (name, door, refused.value)


def test_true_is_one_whatever_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpsgd_cli.data.table_files.ROWS_AT_ONCE", 3)
    told = {"target": "y", "classes": ["u", "v"], "bounds": {"n": [0, 9]}, "path": "t.csv"}

    def numbers(cells: list[str], parts: bool) -> list[float]:
        rows = "".join(f"{cell},{'uv'[at % 2]}\n" for at, cell in enumerate(cells))
        (tmp_path / "t.csv").write_text("n,y\n" + rows)
        found = opening.load_raw(Data.model_validate(told | {"on_disk": parts}), tmp_path).train
        return [float(one) for one in np.asarray(found.x[0 : len(found)])[:, 0]]

    for parts in (False, True):
        assert numbers(["True", "False", "FALSE", "true"], parts) == [1, 0, 0, 1]
        assert numbers(["True", "2", "0", "5", "false"], parts) == [1, 2, 0, 5, 0]
