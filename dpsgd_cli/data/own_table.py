"""A user's own csv or parquet table: columns by name, declared in the recipe or read and declared public.

Not here: what a column's cells must look like (`table.py`).
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dpsgd_cli.data import table
from dpsgd_cli.data.dataset import Column, Layout, Part, Source
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.wording import quoted, shortened, suggested

if TYPE_CHECKING:
    import pandas as pd

_LONGEST_HEADER = 4_000_000
SEPARATORS = (",", ";", "\t", "|")


def read(data: Data, paths: list[Path], kinds: list[str], hashes: dict[str, str]) -> Source:
    """Read the table, and the test table if there is a second path; both have the same columns."""
    frames = [KINDS[kind](path, data) for path, kind in zip(paths, kinds, strict=True)]
    columns, told = _declare(data, frames, paths)
    layout = Layout((len(columns),), tuple(columns))
    matrices = [table.to_matrix(frame, columns, path.name) for frame, path in zip(frames, paths, strict=True)]
    labels, classes = table.read_labels(data, [frame[data.target] for frame in frames], paths)
    parts = [Part(x, y) for x, y in zip(matrices, labels, strict=True)]
    said = table.declarations(data, columns, classes)
    told += table.label_warnings(data, classes)
    return Source(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, tuple(told), hashes)


def _read_csv(path: Path, data: Data) -> pd.DataFrame:
    import pandas as pd

    with _as_data_errors(path), _open_text(path) as lines:
        first = _first_line(lines, path)
    separator = max(SEPARATORS, key="".join(first.split('"')[::2]).count)
    with _as_data_errors(path):
        names = next(csv.reader([first.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    _check_header(path, names, data)
    words = {*(data.categorical or ())} | ({data.target} if data.task == "classification" else set())
    with _as_data_errors(path):
        frame = pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            skipinitialspace=True,
            index_col=False,
            keep_default_na=False,
            na_values={name: list(table.MISSING) for name in names if name not in words},
            dtype=dict.fromkeys(words, "category"),
        )
    if frame.empty:
        raise DataError(f"{path} has a header but no rows")
    return frame.drop(columns=data.drop)


@contextlib.contextmanager
def _as_data_errors(path: Path) -> Iterator[None]:
    """Turn what pandas says of an unreadable table, and its warning that cells were dropped, into DataError."""
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
    """The first line that is not blank, of which no more is read than a header may be long."""
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
    """`path` opened as text, through gzip when it is compressed."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_parquet(path: Path, data: Data) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    _check_header(path, [str(name) for name in frame.columns], data)
    if frame.empty:
        raise DataError(f"{path} has no rows")
    return frame.drop(columns=data.drop)


def _check_header(path: Path, names: list[str], data: Data) -> None:
    """Every column that the recipe names must be there, and no name twice."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    problems = [f"{path}: two columns are called {quoted(name)}" for name in twice]
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    asked = {"target": [data.target], "categorical": data.categorical or (), "bounds": bounds, "drop": data.drop}
    for key, wanted in asked.items():
        problems += [
            f"{path}: data.{key} names {quoted(n)}, which is no column{suggested(str(n), names)}"
            for n in wanted
            if n not in names
        ]
    unusable = {*(data.categorical or ()), *data.drop, data.target}
    problems += [f"data.bounds names {name!r}, which is not a numeric feature" for name in bounds if name in unusable]
    if data.target in data.drop:
        problems.append(f"data.drop names the target {data.target!r}")
    if problems:
        raise DataError("\n".join(problems))


def _declare(data: Data, frames: list[pd.DataFrame], paths: list[Path]) -> tuple[list[Column], list[str]]:
    """The columns with what is public about each, and a warning for what had to be read from the rows."""
    told = []
    columns = []
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    for name in frames[0].columns:
        if name == data.target:
            continue
        for frame, path in zip(frames[1:], paths[1:], strict=True):
            if name not in frame.columns:
                raise DataError(f"{path} has no column {quoted(name)}, which {paths[0].name} has")
        if data.categorical is None or name not in data.categorical:
            pair = bounds.get(name) if isinstance(data.bounds, dict) else data.bounds
            columns.append(Column(str(name), pair))
        elif isinstance(data.categorical, dict):
            columns.append(Column(str(name), values=tuple(table.plain_text(v) for v in data.categorical[name])))
        else:
            columns.append(Column(str(name), values=_found_values(frames, str(name))))
            told.append(
                f"the values of categorical column {quoted(name)} were read from the data and are declared public;"
                f" if they are not, list them: data.categorical: {{{name}: [...]}}"
            )
    if not columns:
        raise DataError(f"{paths[0]} has no feature columns left besides the target {data.target!r}")
    return columns, told


def _found_values(frames: list[pd.DataFrame], name: str) -> tuple[str, ...]:
    found = {table.plain_text(value) for frame in frames for value in frame[name].dropna().unique()}
    return tuple(sorted(found - {""}))


KINDS: dict[str, Callable[[Path, Data], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
