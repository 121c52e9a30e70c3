"""Files as JSON and CSV, written completely or not at all (`common/whole_files.py`); removal of unfinished ones."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.common.whole_files import host, writing
from dpsgd_cli.errors import DataError
from dpsgd_cli.results.result import Row

_MARK = re.compile(r"\.writing-(?P<host>[A-Za-z0-9-]*)_(?P<pid>\d+)_[0-9a-f]{8}$")
_A_DAY = 86_400.0


def write_whole(path: Path, content: str | bytes, owner_only: bool = False, replace: bool = True) -> None:
    """Write a file at once, as `whole_files.writing` does."""
    with writing(path, owner_only, replace) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises DataError if the file is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not what a sweep writes; remove it")
    return content


def to_json(value: Any) -> str:
    """Return JSON, with null for numbers that are not finite (JSON has none)."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """Return the value with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with columns in order of appearance. Missing cells are empty, and no text is a formula."""
    layouts = dict.fromkeys(map(tuple, rows))  # most rows have the same keys
    columns = list(dict.fromkeys(key for layout in layouts for key in layout))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([no_formula(column) for column in columns])
    writer.writerows([no_formula(row.get(column)) for column in columns] for row in rows)
    return text.getvalue()


def no_formula(cell: Any) -> Any:
    """Return `cell` for a CSV: with an apostrophe before a text that a spreadsheet would run as a formula.

    Such a text begins with =, +, -, @ or a tab, and is no number. Spreadsheets show the text alone. A carriage return
    becomes a space, because Python's writer does not quote it and a new line would begin after it.

    >>> no_formula("=cmd()"), no_formula("-1"), no_formula(-1), no_formula("-x")
    ("'=cmd()", '-1', -1, "'-x")
    """
    if not isinstance(cell, str):
        return cell
    cell = cell.replace("\r", " ")
    if not cell.startswith(("=", "+", "-", "@", "\t")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def sweep_up(folder: Path) -> None:
    """Remove the unfinished files of killed processes: those of this machine at once, those of others after a day."""
    for left in folder.glob(".*.writing-*"):
        if _is_abandoned(left):
            _remove(left)


def remove(path: Path) -> bool:
    """Remove the unfinished files of `path` from this process and from killed ones. Returns whether there were any."""
    names = path.parent.glob(f".{path.name.lstrip('.')}.writing-*")
    found = [left for left in names if _owner(left) == (host(), os.getpid()) or _is_abandoned(left)]
    for left in found:
        _remove(left)
    return bool(found)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _owner(path: Path) -> tuple[str, int] | None:
    """Return the machine and the process that writes a file; None for a file of another name."""
    mark = _MARK.search(path.name)
    return None if mark is None else (mark["host"], int(mark["pid"]))


def _is_abandoned(path: Path) -> bool:
    owner = _owner(path)
    if owner is None:
        return False
    if owner[0] == host():
        return not _is_alive(owner[1])
    try:
        return time.time() - path.stat().st_mtime > _A_DAY
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
