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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np

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
    wanted = Wanted.by_recipe(data)
    frames = [KINDS[kind](path, wanted) for path, kind in zip(paths, kinds, strict=True)]
    columns, told = _declare(data, frames, paths)
    layout = Layout((len(columns),), tuple(columns))
    matrices = [table.to_matrix(frame, columns, path.name) for frame, path in zip(frames, paths, strict=True)]
    labels, classes = table.read_labels(data, [frame[data.target] for frame in frames], paths)
    parts = [Part(x, y) for x, y in zip(matrices, labels, strict=True)]
    said = table.declarations(data, columns, classes)
    told += table.label_warnings(data, classes)
    return Source(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, tuple(told), hashes)


@dataclass(frozen=True)
class Wanted:
    """What a table is read for: columns of `words`, those to `drop`, and what is wrong with its column names."""

    words: frozenset[str]
    drop: tuple[str, ...]
    problems: Callable[[list[str]], list[str]]

    @classmethod
    def by_recipe(cls, data: Data) -> Wanted:
        """A table to train on: it has every column that the recipe names."""
        words = {*(data.categorical or ())} | ({str(data.target)} if data.task == "classification" else set())
        return cls(frozenset(words), tuple(data.drop), partial(_unlike_recipe, data))

    @classmethod
    def by_layout(cls, layout: Layout, target: str | None = None, words: bool = True) -> Wanted:
        """New rows for a model: a table with every column of `layout`, and `target` (`words`: of classes) if given."""
        read_as_text = {*layout.categorical, *([target] if target is not None and words else ())}
        return cls(frozenset(read_as_text), (), partial(_unlike_layout, layout, target))


def read_new(path: Path, kind: str, wanted: Wanted, layout: Layout) -> tuple[np.ndarray, pd.DataFrame]:
    """Rows (N, D) of a table in the columns of `layout`, and the table; its other columns and their order are free."""
    frame = KINDS[kind](path, wanted)
    return table.to_matrix(frame, layout.columns or (), path.name), frame


def rows_of(frame: pd.DataFrame, layout: Layout, target: str | None, where: str) -> np.ndarray:
    """The same of a table in memory, which messages call `where`, and which has the column `target` (None: no such)."""
    problems = _unlike_layout(layout, target, [str(name) for name in frame.columns])
    if problems:
        raise DataError("\n".join(f"{where}: {problem}" for problem in problems))
    if frame.empty:
        raise DataError(f"{where} has no rows")
    return table.to_matrix(frame, layout.columns or (), where)


def _read_csv(path: Path, wanted: Wanted) -> pd.DataFrame:
    import pandas as pd

    with _as_data_errors(path), _open_text(path) as lines:
        first = _first_line(lines, path)
    separator = max(SEPARATORS, key="".join(first.split('"')[::2]).count)
    with _as_data_errors(path):
        names = next(csv.reader([first.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    _check_header(path, names, wanted)
    with _as_data_errors(path):
        frame = pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            skipinitialspace=True,
            index_col=False,
            keep_default_na=False,
            na_values={name: list(table.MISSING) for name in names if name not in wanted.words},
            dtype=dict.fromkeys(wanted.words, "category"),
        )
    if frame.empty:
        raise DataError(f"{path} has a header but no rows")
    return frame.drop(columns=list(wanted.drop))


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


def _read_parquet(path: Path, wanted: Wanted) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    _check_header(path, [str(name) for name in frame.columns], wanted)
    if frame.empty:
        raise DataError(f"{path} has no rows")
    return frame.drop(columns=list(wanted.drop))


def _check_header(path: Path, names: list[str], wanted: Wanted) -> None:
    """Every column that is wanted must be there, and no name twice."""
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    problems = [f"two columns are called {quoted(name)}" for name in twice] + wanted.problems(names)
    if problems:
        raise DataError("\n".join(f"{path}: {problem}" for problem in problems))


def _unlike_layout(layout: Layout, target: str | None, names: list[str]) -> list[str]:
    """What columns called `names` lack of those that a model was trained on."""
    wanted = [column.name for column in layout.columns or ()]
    missing = [name for name in wanted if name not in names]
    told = [f"there is no column {quoted(name)}, which the model needs{suggested(name, names)}" for name in missing]
    if target is not None and target not in names:
        told.append(f"there is no column {quoted(target)}, which holds the labels{suggested(target, names)}")
    return told


def _unlike_recipe(data: Data, names: list[str]) -> list[str]:
    """What is wrong with columns called `names`, for what the recipe says of them."""
    problems = []
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    asked = {"target": [data.target], "categorical": data.categorical or (), "bounds": bounds, "drop": data.drop}
    for key, wanted in asked.items():
        problems += [
            f"data.{key} names {quoted(n)}, which is no column{suggested(str(n), names)}"
            for n in wanted
            if n not in names
        ]
    unusable = {*(data.categorical or ()), *data.drop, data.target}
    problems += [f"data.bounds names {name!r}, which is not a numeric feature" for name in bounds if name in unusable]
    if data.target in data.drop:
        problems.append(f"data.drop names the target {data.target!r}")
    return problems


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


KINDS: dict[str, Callable[[Path, Wanted], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
