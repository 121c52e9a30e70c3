"""The files of a sweep beside its result directories: index, failures of cells, tables, and its result.

Several processes, and several sweeps, write into one folder without locks: every file is written whole under another
name and moved into place, and its name depends on its content's owner (a cell, or a sweep with exactly these cells).
The table does not depend on when or where a cell ran, or on the other cells of its pack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.ledger import priced_parts, read_entries
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.common.text_format import count, metric_text
from dpsgd_cli.engine.metrics import in_words, is_of_class, less_is_better, usual_metric
from dpsgd_cli.errors import DataError
from dpsgd_cli.results import files, reading, store
from dpsgd_cli.results.comparison import Entry
from dpsgd_cli.results.document import Bullets, Heading, TableBlock, Text, html
from dpsgd_cli.results.guarantee import sweep_lines
from dpsgd_cli.results.result import NONPRIVATE, Row
from dpsgd_cli.results.store import FAILED, INDEX
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.pricing import Spent

RESULT = ".result.json"
_LEFT_OUT = (NONPRIVATE, "directory", "accountant")
"""Columns that no table for people shows."""
_INTERVAL = "_ci95"


@dataclass(frozen=True)
class Folder:
    """The folder of one sweep. `stem` names the sweep's own files; it is the same for all its shards."""

    path: Path
    stem: str

    def file(self, ending: str) -> Path:
        return self.path / f"{self.stem}{ending}"

    def is_complete(self, cell: Cell) -> bool:
        """Return True if the cell has a result here."""
        return store.is_complete(self.path / cell.directory)

    def finished(self, cells: Sequence[Cell]) -> list[tuple[Cell, dict[str, Any]]]:
        """Return the cells that have a result here, each with its document.

        Other processes add results meanwhile. So whatever is stated together is computed from one such list.
        """
        return [(cell, store.read_document(self.path / cell.directory)) for cell in cells if self.is_complete(cell)]


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


def status_lines(path: Path) -> list[str]:
    """Return the progress of every sweep in a folder, and what failed. Raises DataError if there is no sweep."""
    indices = sorted(path.glob(f"*{INDEX}"))
    if not indices:
        raise DataError(f"{path}: no sweep was begun here (no *{INDEX} file)")
    return [line for index in indices for line in _status(path, files.read_json(index))]


def _status(path: Path, index: dict[str, Any]) -> list[str]:
    if index.get("secret"):
        over = (path / f"{index['sweep']}{RESULT}").exists()
        return [f"{index['sweep']}: {'published' if over else 'begun; its progress stays secret'}"]
    cells = index["cells"]
    done = [cell for cell in cells if store.is_complete(path / cell["directory"])]
    records = [path / f"{cell['directory']}{FAILED}" for cell in cells if cell not in done]
    failed = [files.read_json(record) for record in records if record.is_file()]
    line = (
        f"{index['sweep']}: {len(done)} of {count(len(cells), 'cell')} done ({sum(cell['trials'] for cell in done)} of"
        f" {count(sum(cell['trials'] for cell in cells), 'trial')}), {len(failed)} failed,"
        f" {len(cells) - len(done) - len(failed)} missing"
    )
    return [line, *(f"  failed  {one['directory']}: {one['error'].splitlines()[0]}" for one in failed)]


def write_tables(
    place: Folder,
    cells: Sequence[Cell],
    finished: Sequence[tuple[Cell, dict[str, Any]]],
    privacy: dict[str, Any],
    chosen: dict[str, Any] | None,
) -> dict[str, Any]:
    """Write the table and the result of a sweep as far as it has run, and return the result.

    `cells` are all that run, in every shard; `privacy` and `chosen` are the statements on those that `finished`. Only
    the owner may read the CSV where a result is not public in full: it has `nonprivate_` columns.
    """
    documents = {cell.directory: document for cell, document in finished}
    rows = [_row(cell, place, documents.get(cell.directory)) for cell in cells]
    result = {
        "sweep": place.stem,
        "cells": len(cells),
        "finished": sum(row["status"] == "done" for row in rows),
        "failed": sum(row["status"] == "failed" for row in rows),
        "privacy": privacy,
        "chosen": chosen,
    }
    hidden = any(key.startswith(NONPRIVATE) for row in rows for key in row)
    files.write_whole(place.file(".table.csv"), files.to_csv(rows), owner_only=hidden)
    files.write_whole(place.file(".report.html"), _page(result, rows, sweep_lines(privacy)))
    files.write_whole(place.file(RESULT), files.to_json(result))
    return result


def _row(cell: Cell, place: Folder, document: dict[str, Any] | None) -> Row:
    row: Row = {"cell": cell.number, **cell.settings}
    if document is None:
        failure = failure_place(cell, place.path)
        if not failure.exists():
            return {**row, "status": "missing"}
        return {**row, "status": "failed", "error": files.read_json(failure)["error"].splitlines()[0]}
    row |= {"status": "done", "trials": len(document["trials"])}
    for name, metric in document["metrics"].items():
        row |= {name: metric["mean"], f"{name}_ci95": metric["ci95"]}
    privacy = document["privacy"]
    row |= {key: privacy[key] for key in ("epsilon", "delta", "adjacency", "accountant", "bound")}
    return {**row, "directory": cell.directory}


def spent(cell: Cell, document: dict[str, Any], place: Folder) -> list[Spent | None]:
    """Return bounds on the trials of a finished cell, one for each different ledger; None per trial without privacy."""
    directory = place.path / cell.directory
    found = Entry(cell.label, None, directory, document)
    privacy = found.privacy
    if privacy["accountant"] is None:
        return [None] * cell.trials
    alike: dict[tuple[tuple[Release, ...], ...], list[int | None]] = {}
    for trial, entries in read_entries(reading.checked(directory, document, "ledger.jsonl")).items():
        alike.setdefault(tuple(map(tuple, priced_parts(entries))), []).append(cell.loaded.recipe.seeds[trial])
    bound = privacy["delta"], privacy["epsilon"], privacy["bound"]
    return [Spent(parts[0], replace(found.run, seeds=seeds), *bound, *parts[1:]) for parts, seeds in alike.items()]


def _page(result: dict[str, Any], rows: Sequence[Row], said: Sequence[str]) -> str:
    """Return the page as HTML, of a sweep's result, the rows of its table, and the lines about its privacy.

    Cells are in the order of their usual test metric, the best first. That order is not a choice that is priced. The
    baseline's metrics are left out: they are the same for all cells of a data set.
    """
    columns = [
        key
        for row in rows
        for key in row
        if not key.startswith((*_LEFT_OUT, "constant_")) and not key.endswith(_INTERVAL)
    ]
    columns = [column for column in dict.fromkeys(columns) if not is_of_class(column)]
    metric = usual_metric(columns)
    ordered = list(rows)
    if metric is not None:
        sign = 1 if less_is_better(metric) else -1
        known = [row for row in rows if row.get(metric) is not None]
        ordered = sorted(known, key=lambda row: sign * row[metric]) + [row for row in rows if row not in known]
    best = "" if metric is None or not ordered else f"; the best {in_words(metric)} is {_cell(ordered[0].get(metric))}"
    done = f"{result['finished']} of {result['cells']} cells are done, {result['failed']} failed{best}."
    chosen = result["chosen"]
    return html(
        [
            Heading(f"{result['sweep']}: {result['finished']} of {result['cells']} cells", 1),
            Text(done),
            Heading("What it costs"),
            Bullets([" ".join(line.split()) for line in said]),
            *([] if chosen is None else [Text("One of the runs was chosen privately; its price is above.")]),
            Heading("The cells"),
            Text(
                "The best first. If you publish or use the best because it is the best, you owe the price of a choice."
            ),
            TableBlock(
                [in_words(column) for column in columns], [[_with_interval(row, c) for c in columns] for row in ordered]
            ),
        ]
    )


def _with_interval(row: Row, column: str) -> str:
    """Return a cell, with its 95% interval where the row has one."""
    around = row.get(f"{column}{_INTERVAL}")
    return _cell(row.get(column)) + ("" if around is None else f" +- {_cell(around)}")


def _cell(value: Any) -> str:
    """Return a value of a table for people: numbers rounded, settings as YAML writes them."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def chosen_line(chosen: dict[str, Any]) -> str:
    """Return a line about the chosen trial."""
    if chosen["directory"] is None:
        return str(chosen["note"])
    settings = ", ".join(f"{key}={json.dumps(value)}" for key, value in chosen["settings"].items())
    if "trial" in chosen:
        return f"{settings} (trial {chosen['trial']} of {chosen['directory']})"
    measured = {name: value for name, value in chosen["metrics"].items() if value is not None}
    metrics = ", ".join(f"{name} {metric_text(value)}" for name, value in measured.items())
    return f"{settings} ({metrics}; {chosen['directory']})"
