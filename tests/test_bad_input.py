"""Bad input through the program: each fault is refused by row and column, and no message holds a cell.

Kinds of faults times kinds of files are in `tests/data/test_faults.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result

import dpsgd_cli as dpsgd
from dpsgd_cli.errors import DataError
from dpsgd_cli.main import main
from tests.data.faulty_tables import DATA, ROWS, SECRETS, sound
from tests.data.test_faults import CELLS, NUMBER, message

RECIPE: dict[str, Any] = {
    "name": "faulty",
    "model": {"kind": "linear"},
    "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0},
    "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}},
    "epochs": 2,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_faulty_records_in_memory_are_named_and_never_shown(tmp_path: Path) -> None:
    stated: dict[str, Any] = {"target": "y", "epsilon": 1, "delta": 1e-5, "bounds": DATA["bounds"], "out": tmp_path}
    stated |= {"categories": DATA["categorical"], "classes": DATA["classes"], "columns": DATA["columns"]}
    cells: list[tuple[str, Any, str]] = [
        ("n", ["Quetzal77"], "column 'n' holds lists or objects, first in"),
        ("n", 7177j, NUMBER),
        *(CELLS[one][:3] for one in ("text among numbers", "another form of dates")),
    ]
    for column, content, said in cells:
        frame = sound().assign(n=[float(one) for one in sound().n]).astype(object)
        frame.at[6, column] = content
        with pytest.raises(DataError) as refused:
            dpsgd.train(frame, **stated)
        assert re.search(rf"{said}.*data row 7\b", message(refused.value)), said


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def write(folder: Path, frame: pd.DataFrame, **data: Any) -> Path:
    """Write the table as CSV, and its recipe; return the recipe."""
    frame.to_csv(folder / "t.csv", index=False)
    (folder / "t.yaml").write_text(yaml.safe_dump(RECIPE | {"data": DATA | {"path": "t.csv"} | data}))
    return folder / "t.yaml"


def refused(result: Result, said: str) -> None:
    assert result.exit_code in (1, 2) and re.search(said, result.output), result.output
    assert "Traceback" not in result.output and not any(secret in result.output for secret in SECRETS), result.output


def test_commands_refuse_with_exit_code_2_and_predict_goes_on(tmp_path: Path) -> None:
    recipe = write(tmp_path, sound())
    assert command("train", recipe, "--out", tmp_path / "out").exit_code == 0
    (made,) = (tmp_path / "out").iterdir()
    frame = sound()
    frame.loc[6, "n"] = SECRETS[0]
    write(tmp_path, frame)
    for given in (
        ("train", recipe, "--dry-run"),
        ("evaluate", made, tmp_path / "t.csv"),
    ):
        result = command(*given)
        refused(result, r"column 'n' holds .* data row 7\b")
        assert result.exit_code == 2
    told = command("predict", made, tmp_path / "t.csv")
    assert told.exit_code == 0 and "1 row without a prediction" in told.stderr
    assert "column 'n' holds no number" in told.stdout.splitlines()[7]
    assert not any(secret in told.output for secret in SECRETS)


def arrays(folder: Path, x: np.ndarray) -> Result:
    np.savez(folder / "t.npz", x=x, y=np.arange(ROWS) % 2)
    data = {"path": "t.npz", "classes": [0, 1], "bounds": [0, 1]}
    (folder / "t.yaml").write_text(yaml.safe_dump(RECIPE | {"data": data}))
    return command("train", folder / "t.yaml", "--dry-run")


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
        folder, sound(), columns=None, drop=["d", "t"], preprocess=[{"scale": {"by": "standard"}}, {"one-hot": {}}]
    )
    trained = command("train", recipe, "--out", folder / "out")
    assert trained.exit_code == 0, trained.output
    return command("account", next((folder / "out").iterdir()), "--max-epsilon", 5)


WHOLE: dict[str, tuple[Callable[[Path], Result], str]] = {
    "bounds that hold no value": (
        lambda folder: command("train", write(folder, sound(), bounds={"n": [-7, -1]}), "--dry-run"),
        "the bounds of 'n' hold none of its 24 values, first in data row 1",
    ),
    "arrays out of bounds": (
        lambda folder: arrays(folder, np.full((ROWS, 2), 71.77)),
        "t.npz: x: data.bounds hold none of its values",
    ),
    "an array with a gap": (
        lambda folder: arrays(folder, np.where(np.arange(2 * ROWS) == 9, np.nan, 1.0).reshape(-1, 2)),
        "NaN or infinite values in 1 row, the first is row 5",
    ),
    "a book of another table": (lambda folder: booked(folder, change("t.csv", "a", "b")), "t.book is of another table"),
    "a book cut short": (
        lambda folder: booked(folder, cut_short),
        "t.book: ends within a line; the book was cut short",
    ),
    "a step that is fitted to the records": (uncovered, "scale by standard was fitted on the training rows"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_wrong_as_a_whole_is_refused(tmp_path: Path, case: str) -> None:
    run, said = WHOLE[case]
    refused(run(tmp_path), said)
