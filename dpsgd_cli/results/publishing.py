"""Put the results of a pack in place: all of them or none, whenever the process is killed.

Each result is first written whole under a hidden name (`store.stage_result`, `store.keep`). When all are there, a
record lists which hidden folder goes where; then they are renamed, and the record is removed. A process that is killed
before the record is complete leaves no result; after that, whoever next works in the folder finishes the renaming
(`roll_forward`). Several processes may do so at once: of two renames, one finds nothing left to do.

Not here: what a result consists of (`store.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.results import store
from dpsgd_cli.results.leftovers import hidden_name

RECORD = ".publishing"
Staged = tuple[Path, Path]


def publish(staged: Sequence[Staged]) -> None:
    """Rename each hidden folder to its place; no reader ever sees some of them without the rest coming."""
    if len(staged) == 1:
        store.put_in_place(*staged[0])
        return
    out = staged[0][1].parent
    record = out / f".{secrets.token_hex(8)}{RECORD}"
    temporary = hidden_name(record)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump([[hidden.name, directory.name] for hidden, directory in staged], file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, record)
    finally:
        temporary.unlink(missing_ok=True)
    _finish(record)


def discard(staged: Sequence[Staged]) -> None:
    """Remove what was staged and not published."""
    for hidden, _ in staged:
        shutil.rmtree(hidden, ignore_errors=True)


def roll_forward(out: Path) -> None:
    """Finish what processes that were killed had begun to publish in `out`."""
    for record in sorted(out.glob(f".*{RECORD}")):
        _finish(record)


def _finish(record: Path) -> None:
    try:
        pairs = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for hidden, directory in pairs:
        store.put_in_place(record.parent / hidden, record.parent / directory)
    record.unlink(missing_ok=True)
