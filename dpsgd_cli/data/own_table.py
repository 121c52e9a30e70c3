"""A user's own table: columns by name, declared in the recipe or read from the rows and declared public.

The recipe gives a rule for the missing values of each column. It fills each record by itself, from public constants, so
neighbouring files stay neighbouring, and it costs no privacy.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from dpsgd_cli.common.text_format import quoted, shortened, similar, suggested
from dpsgd_cli.data import table
from dpsgd_cli.data.card import MOST_UNPACKED
from dpsgd_cli.data.dataset import Column, Layout, Part, Source
from dpsgd_cli.data.settings import Data, Missing
from dpsgd_cli.data.users import owners_of
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_LONGEST_HEADER = 4_000_000
_SURROGATE = re.compile("[\ud800-\udfff]")
SEPARATORS = (",", ";", "\t", "|")
Judge = Callable[[Layout], object]
"""Function that raises DataError for a layout that cannot be used."""


def read(data: Data, paths: list[Path], kinds: list[str], hashes: dict[str, str], judge: Judge) -> Source:
    """Read the table, and the test table if there is a second path; both have the same columns.

    Raises one DataError for all problems: with the names in the recipe, the cells of each column, the labels, and what
    `judge` refuses in the layout.
    """
    owner = data.unit.column if data.unit is not None and not data.unit.in_a_file else None
    words = {*(data.categorical or ())} | ({str(data.target)} if data.task == "classification" else set())
    frames = [KINDS[kind](path, words, owner) for path, kind in zip(paths, kinds, strict=True)]
    problems = _Problems()
    for frame, path in zip(frames, paths, strict=True):
        problems.found += _wrong_names(path, list(frame.columns), data)
    owners: list[np.ndarray | None] = [None] * len(frames)
    if owner is not None and all(owner in frame.columns for frame in frames):
        with problems.kept():
            owners = [owners_of(frame[owner], path.name) for frame, path in zip(frames, paths, strict=True)]
    # a column that a wrong name probably meant is not checked: its declarations are missing
    left_out = {*data.drop, *_meant(list(frames[0].columns), data)} | (set() if owner is None else {owner})
    frames = [frame.drop(columns=list(left_out), errors="ignore") for frame in frames]
    columns, found = _declare(data, frames, problems.found)
    if not columns and left_out == {*data.drop}:
        problems.found.append(f"{paths[0]} has no feature columns left besides the target {data.target!r}")
    matrices, unusable = [], set[str]()
    for frame, path in zip(frames, paths, strict=True):
        missing = [c.name for c in columns if (c.marks or c.name) not in frame.columns]
        problems.found += [f"{path} has no column {quoted(name)}, which {paths[0].name} has" for name in missing]
        with problems.kept():
            try:
                usable = [column for column in columns if column.name not in missing]
                matrices.append(table.to_matrix(frame, usable, path.name))
            except table.BadColumns as error:
                unusable |= error.no_numbers
                raise
    sound = tuple(column for column in columns if column.name not in unusable)
    with problems.kept():
        judge(Layout((len(sound),), sound))
    labels: list[np.ndarray] = []
    classes: tuple[Any, ...] | None = None
    if all(data.target in frame.columns for frame in frames):
        with problems.kept():
            labels, classes = table.read_labels(data, [frame[data.target] for frame in frames], paths)
    problems.refuse()
    layout = Layout((len(columns),), tuple(columns))
    parts = [Part(x, y, owners=whose) for x, y, whose in zip(matrices, labels, owners, strict=True)]
    said, told = table.declarations(data, columns, classes), table.read_warnings(data, classes, found)
    return Source(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, told, hashes)


def columns_of(layout: Layout) -> list[str]:
    """Return the columns that a table needs for `layout`; columns that mark gaps are computed from others."""
    return list(dict.fromkeys(column.marks or column.name for column in layout.columns or ()))


def read_new(
    path: Path, kind: str, layout: Layout, target: str | None = None, words: bool = True
) -> tuple[np.ndarray, pd.DataFrame]:
    """Read a table for a model: rows (N, D) with the columns of `layout`, and the table, with `target` if it is given.

    `words`: the target holds classes. The table may have other columns, in any order.
    """
    frame = KINDS[kind](path, {*layout.categorical, *([target] if target is not None and words else ())})
    return rows_of(frame, layout, target, str(path)), frame


def rows_of(frame: pd.DataFrame, layout: Layout, target: str | None, where: str) -> np.ndarray:
    """Return rows (N, D) with the columns of `layout` from a table in memory, which messages call `where`.

    Raises DataError if the table is empty, or lacks a column or the `target` (None: no target is needed).
    """
    names = [str(name) for name in frame.columns]
    told = [
        f"there is no column {quoted(name)}, which the model needs{suggested(name, names)}"
        for name in columns_of(layout)
        if name not in names
    ]
    if target is not None and target not in names:
        told.append(f"there is no column {quoted(target)}, which holds the labels{suggested(target, names)}")
    if told:
        raise DataError("\n".join(f"{where}: {problem}" for problem in told))
    if frame.empty:
        raise DataError(f"{where} has no rows")
    return table.to_matrix(frame, layout.columns or (), where)


class _Problems:
    """The problems of a table, which are reported together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a DataError that is raised inside, and go on."""
        try:
            yield
        except DataError as error:
            self.found += str(error).splitlines()

    def refuse(self) -> None:
        """Raise DataError if there is any problem."""
        if self.found:
            raise DataError("\n".join(dict.fromkeys(self.found)))


def _read_csv(path: Path, words: Set[str], owner: str | None = None, separator: str | None = None) -> pd.DataFrame:
    """Read a table with a header. The columns `words` and `owner` keep the text of their cells."""
    import pandas as pd

    words = words if owner is None else {*words, owner}

    with _as_data_errors(path), _open_text(path) as lines:
        first = _first_line(lines, path)
    separator = separator or max(SEPARATORS, key="".join(first.split('"')[::2]).count)
    with _as_data_errors(path):
        names = next(csv.reader([first.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    _refuse_twice(path, names)
    with _as_data_errors(path):
        frame = pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            skipinitialspace=True,
            index_col=False,
            keep_default_na=False,
            na_values={name: list(table.MISSING) for name in names if name not in words},
            # pandas would parse categories that all look like numbers, and make "007" and "7.0" equal
            dtype={name: str if name == owner else "category" for name in words},
        )
    if frame.empty:
        raise DataError(f"{path} has a header but no rows")
    return frame


class _Token(str):
    """A JSON number as it was written: 1.0 and 1, or 9007199254740993 and its neighbours, stay different."""


def _read_json_lines(path: Path, words: Set[str], owner: str | None = None) -> pd.DataFrame:
    """Read a table with one JSON object per line; an absent or null key is a missing value.

    Numbers under the key `owner` are kept as the text that was written. pandas would convert all of them to floats if
    one is, and different integers from 2^53 on would become equal.
    """
    import pandas as pd

    del words
    rows, owners = [], []
    with _as_data_errors(path), _open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(line, number))
            if line.strip() and owner is not None and isinstance(rows[-1], dict):
                written = json.loads(line, parse_int=_Token, parse_float=_Token, parse_constant=_Token)
                whose = written.get(owner)
                owners.append(_Token(whose).lower() if isinstance(whose, bool) else whose)
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} cannot be read as a table: a line is no object; write one with a key for each column")
    frame = pd.DataFrame(rows)
    nested = [name for name in frame.columns if any(isinstance(cell, list | dict) for cell in frame[name])]
    if frame.empty or nested:
        what = f"column {quoted(nested[0])} holds lists or objects; write plain values" if nested else "has no rows"
        raise DataError(f"{path}: {what}")
    if owner in frame.columns:
        frame[owner] = pd.Series(owners, dtype=object, index=frame.index)
    return frame.rename(columns=str)


def _object(line: str, number: int) -> Any:
    """Return the content of a line of JSON. Raises ValueError for invalid JSON, and text that UTF-8 cannot write."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError(f"line {number} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {getattr(error, 'msg', 'a number is too long')}") from None
    if "\\u" in line and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        raise ValueError(f"line {number} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
    return found


@contextlib.contextmanager
def _as_data_errors(path: Path) -> Iterator[None]:
    """Turn pandas' errors about an unreadable table, and its warning about dropped cells, into DataError."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            yield
        except pd.errors.ParserWarning:
            raise DataError(f"{path} cannot be read as a table: rows have more fields than the header") from None
        except (ValueError, OSError, EOFError, OverflowError, csv.Error, zlib.error) as error:
            raise DataError(f"{path} cannot be read as a table: {shortened(str(error).strip(), 200)}") from None


def _first_line(lines: TextIO, path: Path) -> str:
    """Return the first line that is not blank, or "". Raises DataError if it is longer than a header may be."""
    while line := lines.readline(_LONGEST_HEADER + 1):
        if len(line) > _LONGEST_HEADER:
            raise DataError(
                f"{path} cannot be read as a table: its first line is longer than {_LONGEST_HEADER} characters;"
                " is it text, with a header of column names?"
            )
        if line.strip():
            return line
    return ""


def _open_text(path: Path) -> TextIO:
    """Open `path` as text, through gzip if its name ends in .gz."""
    if path.suffix == ".gz":
        _refuse_bomb(path)
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _refuse_bomb(path: Path) -> None:
    """Raise DataError if a gzip file unpacks to more than `MOST_UNPACKED` bytes. Needs constant memory."""
    given = 0
    with gzip.open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            given += len(block)
            if given > MOST_UNPACKED:
                raise DataError(f"{path}: unpacks to more than {MOST_UNPACKED} bytes; unpack it, and name that file")


def _read_parquet(path: Path, words: Set[str], owner: str | None = None) -> pd.DataFrame:
    import pandas as pd

    del words, owner  # a column has a type, which keeps integers and text as they are
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    _refuse_twice(path, [str(name) for name in frame.columns])
    if frame.empty:
        raise DataError(f"{path} has no rows")
    return frame.rename(columns=str)


def _refuse_twice(path: Path, names: list[str]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice:
        raise DataError("\n".join(f"{path}: two columns are called {quoted(name)}" for name in twice))


def _wrong_names(path: Path, names: list[str], data: Data) -> list[str]:
    """Return the problems with the columns that the recipe names: each must exist, and have one role."""
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    problems = [
        f"{path}: data.{key} names {quoted(name)}, which is no column{suggested(name, names)}"
        for key, wanted in _named(data).items()
        for name in wanted
        if name not in names
    ]
    if data.target in bounds and data.task == "regression":
        problems.append(f"data.bounds names the target {data.target!r}; give data.target_bounds")
    unusable = {*(data.categorical or ()), *data.drop, data.target}
    problems += [f"data.bounds names {name!r}, which is not a numeric feature" for name in bounds if name in unusable]
    if data.target in data.drop:
        problems.append(f"data.drop names the target {data.target!r}")
    owner = None if data.unit is None or data.unit.in_a_file else data.unit.column
    if owner is not None and owner not in names:
        problems.append(
            f"{path}: privacy.unit.column names {quoted(owner)}, which is no column{suggested(owner, names)}"
        )
    elif owner is not None and owner in (*(data.categorical or ()), *bounds, *(data.missing or ())):
        problems.append(
            f"data.categorical, bounds and missing are of features, and {quoted(owner)} is none: privacy.unit.column"
            " names it; leave it out there"
        )
    return problems


def _named(data: Data) -> dict[str, list[str]]:
    """Return the columns that the recipe names, by key."""
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    lists = {"target": [str(data.target)], "categorical": data.categorical or (), "bounds": bounds}
    return {key: list(names) for key, names in (lists | {"missing": data.missing or (), "drop": data.drop}).items()}


def _meant(names: list[str], data: Data) -> set[str]:
    """Return the columns that the recipe's wrong names were probably meant to be."""
    wrong = [name for wanted in _named(data).values() for name in wanted if name not in names]
    return {near for name in wrong if (near := similar(name, names)) is not None and near != data.target}


def _declare(data: Data, frames: list[pd.DataFrame], problems: list[str]) -> tuple[list[Column], list[str]]:
    """Return the columns with their public facts, and the names of those whose values were read from the rows."""
    found, columns = [], []
    for name in map(str, frames[0].columns):
        if name == data.target:
            continue
        filling = data.fillings.get(name)
        if data.categorical is None or name not in data.categorical:
            pair = data.bounds.get(name) if isinstance(data.bounds, dict) else data.bounds
            columns += _numeric(name, pair, filling, problems)
            continue
        if isinstance(data.categorical, dict):
            values = tuple(table.plain_text(value) for value in data.categorical[name])
        else:
            try:
                values = found_values(frames, name)
            except DataError as error:
                problems.append(str(error))
                continue
            found.append(name)
        columns.append(_categorical(name, values, filling or Missing(), problems))
    return columns, found


def _numeric(
    name: str, bounds: tuple[float, float] | None, filling: Missing | None, problems: list[str]
) -> list[Column]:
    """Return the column, and the column that marks its gaps if the recipe asks for one."""
    if filling is None:
        return [Column(name, bounds)]
    value, here = filling.value, f"data.missing: {name}:"
    if value is None and bounds is not None:
        value = (bounds[0] + bounds[1]) / 2
    if value is None:
        problems.append(f"{here} give a value, for the column has no bounds to take the middle of")
    elif isinstance(value, str):
        problems.append(f"{here} {quoted(value)} is no number; name the column under data.categorical if it holds text")
    elif bounds is not None and not bounds[0] <= value <= bounds[1]:
        problems.append(f"{here} {value:g} is not within the column's bounds {list(bounds)}")
    marks = f"{name} is missing"
    own = [Column(name, bounds, filling=0.0 if isinstance(value, str) else value)]
    return own + [Column(marks, (0.0, 1.0), indicator=True, category=marks, marks=name)] * filling.indicator


def _categorical(name: str, values: tuple[str, ...], filling: Missing, problems: list[str]) -> Column:
    """Return the column. Without a filling, "" is one of its values even if no value is missing."""
    if filling.indicator:
        problems.append(f"data.missing: {name}: a category needs no indicator; give it one of its own, or leave it out")
    if filling.value is None:
        return Column(name, values=values if "" in values else (*values, ""), filling="")
    value = table.plain_text(filling.value)
    if value not in values:
        problems.append(f"data.missing: {name}: {quoted(value)} is not among the column's values; add it there")
    return Column(name, values=values, filling=value)


def found_values(frames: list[pd.DataFrame], name: str) -> tuple[str, ...]:
    held = [frame[name] for frame in frames if name in frame.columns]
    for cells in held:
        table.refuse_nested(cells)
    found = {table.plain_text(value) for cells in held for value in cells.dropna().unique()}
    return tuple(sorted(found - {""}))


_READERS: dict[str, Callable[..., pd.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, separator="\t"),
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
KINDS = {
    **{ending + packed: reader for ending, reader in _READERS.items() for packed in ("", ".gz")},
    ".parquet": _read_parquet,
}
