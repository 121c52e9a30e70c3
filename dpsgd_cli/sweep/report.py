"""The table of a sweep, with one row for each cell, its result file, and the lines about its privacy.

The table does not depend on when or where a cell ran, or on the other cells of its pack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpsgd_cli.accounting.ledger import read_ledgers
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.common.rounding import epsilon_text, metric_text
from dpsgd_cli.common.text_format import count
from dpsgd_cli.results import files, reading, store
from dpsgd_cli.results.comparison import Entry
from dpsgd_cli.results.evaluated import run_of
from dpsgd_cli.results.guarantee import EXPERIMENT
from dpsgd_cli.results.result import Row
from dpsgd_cli.sweep import folder, pricing, private_tuning
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import Folder
from dpsgd_cli.sweep.planning import Planned, shared_planner
from dpsgd_cli.sweep.schema import Sweep


def write(place: Folder, sweep: Sweep, cells: Sequence[Cell], every: Sequence[Planned]) -> dict[str, Any]:
    """Write the table and the result of a sweep as far as it has run, and return the result.

    `cells` are all that run, in every shard; `every` has the plans of all cells of the file, drawn or not.
    """
    rows = [row_of(cell, place) for cell in cells]
    finished = [cell for cell in cells if store.is_complete(place.path / cell.directory)]
    priced = [one for cell in finished for one in _spent(cell, place)]
    result = {
        "sweep": place.stem,
        "cells": len(cells),
        "finished": len(finished),
        "failed": sum(row["status"] == "failed" for row in rows),
        "privacy": pricing.statement(priced, sweep, planned_spending(every)),
        "chosen": private_tuning.choose(sweep, place, cells, _records),
    }
    files.write_whole(place.file(".table.csv"), files.to_csv(rows))
    files.write_whole(place.file(".table.md"), to_markdown(rows))
    files.write_whole(place.file(".result.json"), files.to_json(result))
    return result


def _records(cell: Cell) -> int:
    """Return the number of records that a private cell trains on; 0 without a plan, so its accuracy does not count."""
    plan = shared_planner().plan(cell).plan
    return 0 if plan is None else plan.sampling.records


def row_of(cell: Cell, place: Folder) -> Row:
    """Return a cell's row of the table."""
    row: Row = {"cell": cell.number, **cell.settings}
    directory = place.path / cell.directory
    if not store.is_complete(directory):
        failure = folder.failure_place(cell, place.path)
        if not failure.exists():
            return {**row, "status": "missing"}
        return {**row, "status": "failed", "error": files.read_json(failure)["error"].splitlines()[0]}
    document = store.read_document(directory)
    row |= {"status": "done", "trials": len(document["trials"])}
    for name, metric in document["metrics"].items():
        row |= {name: metric["mean"], f"{name}_ci95": metric["ci95"]}
    privacy = document["privacy"]
    row |= {key: privacy[key] for key in ("epsilon", "delta", "adjacency", "accountant", "bound")}
    return {**row, "directory": cell.directory}


def _spent(cell: Cell, place: Folder) -> list[pricing.Spent | None]:
    """Return bounds on the trials of a finished cell, one for each different ledger; None per trial without privacy."""
    directory = place.path / cell.directory
    document = store.read_document(directory)
    found = Entry(cell.label, None, directory, document)
    privacy = found.privacy
    if privacy["accountant"] is None:
        return [None] * cell.trials
    alike: dict[tuple[Release, ...], list[int | None]] = {}
    for trial, releases in read_ledgers(reading.checked(directory, document, "ledger.jsonl")).items():
        alike.setdefault(tuple(releases), []).append(cell.loaded.recipe.seeds[trial])
    return [
        pricing.Spent(releases, replace(found.run, seeds=seeds), privacy["delta"], privacy["epsilon"], privacy["bound"])
        for releases, seeds in alike.items()
    ]


def planned_spending(planned: Sequence[Planned]) -> list[pricing.Spent | None]:
    """Return bounds on the trials of each planned cell, None without privacy. Cells that cannot run are left out."""
    found: list[pricing.Spent | None] = []
    for one in planned:
        if one.error is not None:
            continue
        if one.plan is None:
            found.append(None)
            continue
        told = one.plan.guarantee()
        releases = tuple(one.plan.priced_releases)
        found.append(pricing.Spent(releases, run_of(one.cell.loaded), one.plan.delta, told.epsilon, told.bound))
    return found


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown: settings, status and the metrics on test records, rounded."""
    left_out = ("nonprivate_", "directory", "accountant")
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith(left_out)))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.replace("|", "\\|") if isinstance(value, str) else json.dumps(value)


def privacy_lines(privacy: dict[str, Any]) -> list[str]:
    """Return the three privacy statements as lines of text."""
    seeded = f"; {EXPERIMENT}" if privacy["noise_source"] != "secure" else ""
    lines = [
        f"{'each trial':<25} epsilon {'none' if one['epsilon'] is None else epsilon_text(one['epsilon'])}"
        f" at delta {one['delta']:g}"
        f" ({one['adjacency']}, {one['bound']}{seeded})"
        for one in privacy["each_trial"]
    ]
    for name, title in (("all_trials", "all trials together"), ("choice", "publishing the chosen")):
        told = privacy[name]
        if told is None:
            continue
        if told["epsilon"] is None:
            lines.append(f"{title:<25} no statement: {told.get('note', 'no accountant covers it')}")
        else:
            extra = (
                f"; {told['kind']}" if "kind" in told else f", {count(told['trials'], 'trial')}; {told['accountant']}"
            )
            extra += f"; {EXPERIMENT}" if told.get("randomness", "secure") != "secure" else seeded
            lines.append(
                f"{title:<25} epsilon {epsilon_text(told['epsilon'])} at delta {told['delta']:g}"
                f" ({told['adjacency']}{extra})"
            )
    return [*lines, *(f"warning: {warning}" for warning in privacy["warnings"])]


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
