"""Location and reading of the audit of a result, for its report. Audits are made in `audit/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpsgd_cli.errors import DataError
from dpsgd_cli.results.files import read_json

FOLDER = "audits"
AUDIT = "audit.json"


def place(out: Path, name: str) -> Path:
    """Return the folder for the audit of the result `name` in `out`; neither has to exist."""
    return out / FOLDER / name


def read(directory: Path) -> dict[str, Any] | None:
    """Return the audit of the result in `directory`; None if there is none, it is damaged, or its hash is another's."""
    there = directory.resolve()
    file = place(there.parent, there.name) / AUDIT
    if not file.is_file():
        return None
    try:
        found = read_json(file)
    except DataError:
        return None
    return found if there.name.endswith(f"-{found.get('hash')}") else None
