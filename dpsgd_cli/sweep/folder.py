"""The files of a sweep beside its result directories: what it consists of, which cells failed and why, its tables.

Several processes, and several sweeps, write into one folder without locks: every file is written whole under another
name and moved into place, and its name depends on its content's owner (a cell, or a sweep with just these cells).
Not here: result directories (`results/store.py`), what a table says (`report.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import DataError
from dpsgd_cli.results import files, store
from dpsgd_cli.results.store import FAILED, INDEX
from dpsgd_cli.sweep.expansion import Cell


@dataclass(frozen=True)
class Folder:
    """Where one sweep writes. `stem` names the sweep's own files; it is the same for all its shards."""

    path: Path
    stem: str

    def file(self, ending: str) -> Path:
        return self.path / f"{self.stem}{ending}"


def folder_of(name: str, cells: Sequence[Cell], out: Path, choice: str = "") -> Folder:
    """The folder of a sweep with these cells, and with this law where the number of their runs is drawn."""
    content = "\n".join([cell.directory for cell in cells] + ([choice] if choice else []))
    return Folder(out, f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}")


def write_index(folder: Folder, source: str, cells: Sequence[Cell], secret: bool = False) -> None:
    """What the sweep consists of, for `status` and `compare`; of a `secret` one that it was begun."""
    rows = [{"directory": cell.directory, "trials": cell.trials, "settings": cell.settings} for cell in cells]
    files.write_whole(
        folder.file(INDEX), files.to_json({"sweep": folder.stem, "source": source, "secret": secret, "cells": rows})
    )


def failure_place(cell: Cell, out: Path) -> Path:
    """Where a cell's failure is recorded."""
    return out / f"{cell.directory}{FAILED}"


def record_failure(cell: Cell, out: Path, error: BaseException) -> None:
    """Keep why a cell failed, beside where its result would lie."""
    told = {"directory": cell.directory, "settings": cell.settings, "kind": type(error).__name__, "error": str(error)}
    files.write_whole(failure_place(cell, out), files.to_json(told))


@dataclass(frozen=True)
class Status:
    """How far a sweep is."""

    sweep: str
    cells: int
    trials: int
    done: int
    done_trials: int
    failed: list[dict[str, Any]]
    secret: bool = False

    @property
    def missing(self) -> int:
        return self.cells - self.done - len(self.failed)


def statuses(path: Path) -> list[Status]:
    """Every sweep that was begun in a folder. DataError when there is none."""
    indices = sorted(path.glob(f"*{INDEX}"))
    if not indices:
        raise DataError(f"{path}: no sweep was begun here (no *{INDEX} file)")
    return [_status(path, files.read_json(index)) for index in indices]


def _status(path: Path, index: dict[str, Any]) -> Status:
    cells = index["cells"]
    done = [cell for cell in cells if store.is_complete(path / cell["directory"])]
    finished = {cell["directory"] for cell in done}
    records = [path / f"{cell['directory']}{FAILED}" for cell in cells if cell["directory"] not in finished]
    return Status(
        sweep=index["sweep"],
        cells=len(cells),
        trials=sum(cell["trials"] for cell in cells),
        done=len(done),
        done_trials=sum(cell["trials"] for cell in done),
        failed=[files.read_json(record) for record in records if record.is_file()],
        secret=bool(index.get("secret")),
    )
