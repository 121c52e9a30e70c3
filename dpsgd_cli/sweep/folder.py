"""The files of a sweep beside its result directories: its index, the failures of cells, its tables.

Several processes, and several sweeps, write into one folder without locks: every file is written whole under another
name and moved into place, and its name depends on its content's owner (a cell, or a sweep with exactly these cells).
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
    """The folder of one sweep. `stem` names the sweep's own files; it is the same for all its shards."""

    path: Path
    stem: str

    def file(self, ending: str) -> Path:
        return self.path / f"{self.stem}{ending}"


def folder_of(name: str, cells: Sequence[Cell], out: Path, choice: str = "") -> Folder:
    """Return the folder of a sweep with these cells; `choice` is the law of random stopping, if it is used."""
    content = "\n".join([cell.directory for cell in cells] + ([choice] if choice else []))
    return Folder(out, f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}")


def write_index(folder: Folder, source: str, cells: Sequence[Cell], secret: bool = False) -> None:
    """Write the list of the sweep's cells, for `status` and `compare`. A `secret` sweep gives no cells."""
    rows = [{"directory": cell.directory, "trials": cell.trials, "settings": cell.settings} for cell in cells]
    files.write_whole(
        folder.file(INDEX), files.to_json({"sweep": folder.stem, "source": source, "secret": secret, "cells": rows})
    )


def failure_place(cell: Cell, out: Path) -> Path:
    """Return the path of the record of a cell's failure."""
    return out / f"{cell.directory}{FAILED}"


def record_failure(cell: Cell, out: Path, error: BaseException) -> None:
    """Write the reason of a cell's failure, beside the place of its result."""
    told = {"directory": cell.directory, "settings": cell.settings, "kind": type(error).__name__, "error": str(error)}
    files.write_whole(failure_place(cell, out), files.to_json(told))


@dataclass(frozen=True)
class Status:
    """The progress of a sweep: numbers of cells and trials, and the records of failures."""

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
    """Return the progress of every sweep in a folder. Raises DataError if there is none."""
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
