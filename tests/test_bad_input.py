"""Bad input through the program: each generated fault is refused by row and column, and no message holds a cell."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.main import main

ROWS = 40
SECRETS = ("Quetzal77", "7177", "17.07.2071")
"""What faulty cells hold, and no message may."""
RECIPE: dict[str, Any] = {
    "name": "faulty",
    "data": {
        "target": "y",
        "classes": ["u", "v"],
        "bounds": {"n": [0, 100]},
        "categorical": {"c": ["a", "b"]},
        "columns": {"d": {"date": "%Y-%m-%d", "bounds": ["2020-01-01", "2021-12-31"]}},
        "preprocess": [{"bin": {"waves": 4}}],
    },
    "model": {"kind": "linear"},
    "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0},
    "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}},
    "epochs": 2,
    "seed": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "csv": ("t.csv", {}),
    "in parts": ("t.csv", {"on_disk": True}),
    "parquet": ("t.parquet", {}),
    "parquet in parts": ("t.parquet", {"on_disk": True}),
    "JSON": ("t.jsonl", {}),
}
CELLS: dict[str, tuple[str, str, str]] = {
    "text among numbers": ("n", SECRETS[0], "column 'n' holds no number"),
    "another decimal mark": ("n", "7177,5", "column 'n' holds no number"),
    "two decimal marks": ("n", "7177.5.1", "column 'n' holds no number"),
    "groups that the format does not have": ("n", "7,177.5", "column 'n' holds no number"),
    "an infinite number": ("n", "inf", "column 'n' has 1 missing or infinite value"),
    "a gap without a meaning": ("n", "", "column 'n' has 1 missing value"),
    "an unlisted category": ("c", SECRETS[0], "column 'c': 1 cell"),
    "no date": ("d", SECRETS[0], "'d' holds no date of the form %Y-%m-%d"),
    "another form of dates": ("d", SECRETS[2], "'d' holds no date of the form %Y-%m-%d"),
    "an unlisted label": ("y", SECRETS[0], "'y': 1 label"),
    "a missing label": ("y", "", "'y' has 1 missing label"),
}
"""Column, content of one cell, and what is said; the row is drawn by the case's name."""
FAULTS = [
    (cell, kind) for cell in CELLS for kind in KINDS if kind in ("csv", "parquet in parts") or cell in list(CELLS)[:2]
]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def sound() -> pd.DataFrame:
    random, number = np.random.default_rng(0), np.arange(ROWS)
    frame = pd.DataFrame({"n": random.integers(0, 900, ROWS) / 10, "c": np.where(number % 3 == 0, "a", "b")})
    frame["d"] = (np.datetime64("2020-01-01") + random.integers(0, 700, ROWS)).astype(str)
    frame["y"] = np.where(number % 2 == 0, "u", "v")
    return frame.astype(str)


def write(folder: Path, frame: pd.DataFrame, kind: str = "csv", **data: Any) -> Path:
    """Write the table and its recipe; return the recipe."""
    name, told = KINDS[kind]
    if name.endswith(".parquet"):
        frame.to_parquet(folder / name)
    elif name.endswith(".jsonl"):
        frame.to_json(folder / name, orient="records", lines=True)
    else:
        frame.to_csv(folder / name, index=False)
    recipe = RECIPE | {"data": RECIPE["data"] | {"path": name} | told | data}
    (folder / "t.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "t.yaml"


def refused(result: Result, said: str) -> None:
    assert result.exit_code in (1, 2) and re.search(said, result.output), result.output
    assert "Traceback" not in result.output and not any(secret in result.output for secret in SECRETS), result.output


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_without_a_fault_is_accepted(tmp_path: Path, kind: str) -> None:
    accepted = command("train", write(tmp_path, sound(), kind), "--dry-run")
    assert accepted.exit_code == 0, accepted.output


@pytest.mark.parametrize(("cell", "kind"), FAULTS)
def test_a_faulty_cell_is_named_by_row_and_column(tmp_path: Path, cell: str, kind: str) -> None:
    column, content, said = CELLS[cell]
    frame, row = sound(), zlib.crc32(f"{cell}{kind}".encode()) % ROWS
    frame.loc[row, column] = content
    result = command("train", write(tmp_path, frame, kind), "--dry-run")
    refused(result, rf"{said}.*data row {row + 1}\b")
    assert result.exit_code == 2


def drafted(folder: Path, column: str, cells: dict[int, str]) -> Result:
    frame = sound()
    for row, cell in cells.items():
        frame.loc[row, column] = cell
    write(folder, frame)
    draft = ("recipe", "new", folder / "t.csv", "--target", "y")
    assert command(*draft, "--text", column).exit_code == 0, "as text, any cell will do"
    return command(*draft)


def booked(folder: Path, edit: Callable[[Path], object]) -> Result:
    """Charge a book of the table, after `edit` of the folder."""
    recipe = write(folder, sound())
    made = command("budget", "create", folder / "t.book", "--data", folder / "t.csv", "--epsilon", 3, "--delta", 1e-5)
    assert made.exit_code == 0, made.output
    edit(folder)
    return command("train", recipe, "seed=null", "--book", folder / "t.book", "--out", folder / "out")


def change(name: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


def cut_short(folder: Path) -> None:
    path = folder / "t.book"
    path.write_bytes(path.read_bytes()[:-20])


def uncovered(folder: Path) -> Result:
    """Train behind a step that is fitted to the records, then ask for a limit on what the statement promises."""
    recipe = write(
        folder, sound(), columns=None, drop=["d"], preprocess=[{"scale": {"by": "standard"}}, {"one-hot": {}}]
    )
    trained = command("train", recipe, "--out", folder / "out")
    assert trained.exit_code == 0, trained.output
    return command("account", next((folder / "out").iterdir()), "--max-epsilon", 5)


FORMS = "column 'n' holds numbers in several forms: .* data row 8"
WHOLE: dict[str, tuple[Callable[[Path], Result], str]] = {
    "bounds that hold no value": (
        lambda folder: command("train", write(folder, sound(), bounds={"n": [-7, -1]}), "--dry-run"),
        "the bounds of 'n' hold none of its 40 values, first in data row 1",
    ),
    "two decimal marks in a draft": (lambda folder: drafted(folder, "n", {7: "7177,5"}), FORMS),
    "two forms of dates in a draft": (
        lambda folder: drafted(folder, "d", {30: SECRETS[2]}),
        "column 'd' holds dates in several forms.* data row 31",
    ),
    "a word among dates in a draft": (
        lambda folder: drafted(folder, "d", {30: SECRETS[0]}),
        "column 'd' holds dates in several forms, or .* data row 31",
    ),
    "a book of another table": (lambda folder: booked(folder, change("t.csv", "a", "b")), "t.book is of another table"),
    "a book cut short": (
        lambda folder: booked(folder, cut_short),
        "t.book: ends before its last line; the book was cut short",
    ),
    "an edited book": (lambda folder: booked(folder, change("t.book", "3", "8")), "t.book:2: .* the book was edited"),
    "a step that is fitted to the records": (uncovered, "scale by standard was fitted on the training rows"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_wrong_as_a_whole_is_refused(tmp_path: Path, case: str) -> None:
    run, said = WHOLE[case]
    refused(run(tmp_path), said)
