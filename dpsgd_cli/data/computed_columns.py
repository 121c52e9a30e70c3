"""Features of columns of dates, many categories and free text (`data.columns`), computed from each cell by itself.

- A date becomes the days since its first public day, and one category for each cycle: month of the year, day of the
  month, day of the week, hour of the day.
- A category of many becomes one of a number of buckets, by a hash of its text.
- A text becomes the counts of its words, and more, in a number of buckets (`text_features.py`).

Guarantee: the features are data-independent. They depend on the recipe and on the record's own cell only, so
neighbouring data sets stay neighbouring and the features cost no privacy. The hash is MurmurHash3 with seed 0: it is
public, and hides nothing by itself.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, quoted
from dpsgd_cli.data.cells import Cells
from dpsgd_cli.data.column_settings import ColumnUse, Computed, DateColumn, HashedColumn, Missing
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.text_features import features
from dpsgd_cli.errors import DataError

_DAY = np.timedelta64(1, "D")
_TYPED_DATE = r"\d{4,}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d+)?(\+00:00)?)?"
"""Form of the text of a cell that is a date in a file or a frame (`cells.text_of`)."""
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_CYCLES = {
    "year": ("month", tuple(map(str, range(1, 13)))),
    "month": ("day", tuple(map(str, range(1, 32)))),
    "week": ("weekday", WEEKDAYS),
    "day": ("hour", tuple(map(str, range(24)))),
}
"""Name and values of the category that stands for each cycle of a date."""


def columns_of(name: str, use: ColumnUse, filling: Missing | None, problems: list[str]) -> list[Column]:
    """Return the features of the file's column `name`. Appends to `problems` what its `filling` cannot mean.

    A missing category is a category of its own, and so is the cycle of a missing date; a missing text has no words.
    """
    if isinstance(use, DateColumn):
        return _of_dates(name, use, filling, problems)
    if filling is not None:
        problems.append(
            f"data.missing: {name}: a missing cell of a hash or text column is one of its own; leave {quoted(name)} out"
        )
    if isinstance(use, HashedColumn):
        values = tuple(f"bucket {number}" for number in range(use.hash))
        return [Column(name, values=(*values, ""), filling="", computed=Computed(name, "hash", buckets=use.hash))]
    rule = Computed(name, "text", buckets=use.text, words=use.words, rarity=use.rarity, lexicon=use.lexicon)
    return [
        Column(
            f"{name} (text {number})",
            (0.0, 1.0),
            indicator=True,
            category=f"{name} (text)",
            computed=replace(rule, bucket=number),
        )
        for number in range(rule.features)
    ]


def _of_dates(name: str, use: DateColumn, filling: Missing | None, problems: list[str]) -> list[Column]:
    first, last = use.ends
    days = float((last - first).days + 1)
    value: float | None = None
    if filling is not None:
        value = days / 2 if filling.value is None else _days_of(filling.value, first)
        if value is None or not 0 <= value <= days:
            problems.append(
                f"data.missing: {name}: give a day within the column's bounds, as {use.bounds[0]}, or leave the value"
                " out, which takes their middle"
            )
    own = [Column(name, (0.0, days), filling=value, computed=Computed(name, "days", use.date, use.bounds[0]))]
    if filling is not None and filling.indicator:
        marks = f"{name} is missing"
        own.append(Column(marks, (0.0, 1.0), indicator=True, category=marks, marks=name))
    for cycle in use.told_cycles:
        called, values = _CYCLES[cycle]
        own.append(
            Column(f"{name} ({called})", values=(*values, ""), filling="", computed=Computed(name, cycle, use.date))
        )
    return own


def _days_of(value: object, first: datetime) -> float | None:
    try:
        return float((datetime.fromisoformat(str(value)) - first).days)
    except (ValueError, TypeError):
        return None


def entries(cells: Cells, missing: np.ndarray, column: Column, kept: dict[str, Any]) -> np.ndarray:
    """Return the entries (N,) of a computed column for the cells of its source, `missing` (N,) of which are gaps.

    `kept` holds what several columns of one source share; it starts empty for every source.

    Raises DataError, naming the first row, for a cell that is no date of the column's form, and for a missing date
    without a filling.
    """
    rule = column.computed
    assert rule is not None
    if rule.kind == "text":
        if "text" not in kept:
            texts, codes = cells.distinct
            kept["text"] = features([*(text or "" for text in texts), ""], rule), np.where(missing, len(texts), codes)
        told, codes = kept["text"]  # "" has no words, as a gap
        return np.asarray(told[codes, rule.bucket])
    if rule.kind == "hash":
        return np.where(missing, rule.buckets, cells.mapped(lambda text: _bucket(text or "", rule.buckets), np.int64))
    if "dates" not in kept:
        kept["dates"] = moments(cells, missing, rule.form)
    return _of_moments(kept["dates"], missing, cells, column)


def _of_moments(times: np.ndarray, missing: np.ndarray, cells: Cells, column: Column) -> np.ndarray:
    rule = column.computed
    assert rule is not None
    days = times.astype("datetime64[D]")
    if rule.kind == "days":
        found = (times - np.datetime64(rule.first, "us")) / _DAY
        if missing.any() and column.filling is None:
            raise DataError(
                f"column {quoted(rule.of)} has {count(int(missing.sum()), 'missing date')}, first in data row"
                f" {cells.row(missing.argmax())}; say what they mean,"
                f" data.missing: {{{rule.of}: {{indicator: true}}}}, or leave those rows out"
            )
        return np.where(missing, float(column.filling or 0.0), found)
    months = times.astype("datetime64[M]")
    codes = {
        "year": lambda: months.astype(np.int64) % 12,
        "month": lambda: (days - months.astype("datetime64[D]")).astype(np.int64),
        "week": lambda: (days.astype(np.int64) + 3) % 7,  # 1 January 1970 was a Thursday
        "day": lambda: (times - days).astype("timedelta64[h]").astype(np.int64),
    }[rule.kind]()
    return np.where(missing, len(column.values or ()) - 1, codes)


def moments(cells: Cells, missing: np.ndarray, form: str) -> np.ndarray:
    """Return the times of cells, datetime64[us] (N,): of text in the form `form`, or as typed files and frames tell it.

    Raises DataError, naming the first row, for a cell that is neither missing nor a date. Never its content.
    """
    import pandas as pd

    texts, codes = cells.distinct
    told = pd.Series([(text or "").strip() for text in texts], dtype=object)
    read = pd.to_datetime(told, format=form, errors="coerce", utc=True)
    typed = pd.to_datetime(told.where(told.str.fullmatch(_TYPED_DATE)), format="ISO8601", errors="coerce", utc=True)
    times = read.fillna(typed).dt.tz_localize(None).to_numpy("datetime64[us]")[codes]
    bad = np.isnat(times) & ~missing
    if bad.any():
        more = f" and {int(bad.sum()) - 1} more" if bad.sum() > 1 else ""
        raise DataError(
            f"column {quoted(cells.name)} holds no date of the form {form} in data row {cells.row(bad.argmax())}"
            f"{more}; mend it, or give the column another use under data.columns"
        )
    return np.where(missing, np.datetime64(0, "us"), times)


def _bucket(text: str, buckets: int) -> int:
    from sklearn.utils import murmurhash3_32

    return int(murmurhash3_32(text, seed=0, positive=True) % buckets)
