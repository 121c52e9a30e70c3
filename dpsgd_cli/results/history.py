"""Reading of `history.csv`: its rows, and the values of one column over all trials by epoch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.errors import DataError

_MOST = 1 << 53


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows; an empty cell is an empty text. Raises DataError if the table is not that of a result."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            if None in row or None in row.values():
                raise ValueError("a row has more or fewer cells than the header")
            if not (0 <= int(row["trial"]) < _MOST and 0 <= int(row["epoch"]) < _MOST):
                raise ValueError("no number of a trial or epoch")
            for name in row:
                if name not in ("trial", "seed", "epoch") and row[name]:
                    float(row[name])
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path}: is no table of epochs ({type(error).__name__}); restore it, or train again") from None
    return rows


def by_epoch(rows: Sequence[dict[str, str]], column: str) -> dict[int, list[float]]:
    """Return the values of all trials by epoch, counted from 1.

    A trial that has ended keeps its last value: its weights and its spent budget stay. It has no noise multiplier any
    more.
    """
    trials: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get(column):
            trials.setdefault(row["trial"], {})[int(row["epoch"]) + 1] = float(row[column])
    found: dict[int, list[float]] = {}
    for epoch in sorted({epoch for own in trials.values() for epoch in own}):
        for own in trials.values():
            if epoch in own:
                found.setdefault(epoch, []).append(own[epoch])
            elif epoch > max(own) and column != "noise_multiplier":
                found.setdefault(epoch, []).append(own[max(own)])
    return found
