"""Readers of table files: CSV, JSON lines and Parquet.

Tables of a user's own, cards, new rows for a model and drafts of recipes all go through them. `settings.TableFormat`
says how a CSV file is written.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dpsgd_cli.common.text_format import quoted, shortened
from dpsgd_cli.data import memory
from dpsgd_cli.data.cards import MOST_UNPACKED
from dpsgd_cli.data.settings import TableFormat
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_LONGEST_HEADER = 4_000_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEPARATORS = (",", ";", "\t", "|")
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
"""Cells that hold no value, unless they are listed among a column's values or the classes."""


def read_table(
    path: Path,
    kind: str,
    written: TableFormat | None = None,
    text_columns: Set[str] = frozenset(),
    owner: str | None = None,
) -> pd.DataFrame:
    """Read a table of a user's own, whose file name ends in `kind` (of `KINDS`); `written` describes CSV files only.

    The columns `text_columns` and `owner` keep the text of their cells. Raises DataError for a file that cannot be
    read, or has no rows.
    """
    if written is not None and not kind.startswith((".csv", ".tsv")):
        raise DataError(f"{path}: data.format is for csv and tsv files; leave it out")
    written = written or TableFormat()
    if kind.startswith(".tsv") and written.separator is None:
        written = TableFormat.model_validate(written.model_dump() | {"separator": "\t"})
    return KINDS[kind](path, written, text_columns, owner)


def _read_csv(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    with _as_data_errors(path), _open_text(path, written.encoding) as lines:
        first = _first_line(lines, path, written.comment)
    among = [mark for mark in _SEPARATORS if mark != written.decimal]
    separator = written.separator or max(among, key="".join(first.split('"')[::2]).count)
    written = TableFormat.model_validate(written.model_dump() | {"separator": separator})
    with _as_data_errors(path):
        names = next(csv.reader([first.strip("\r\n")], delimiter=separator, skipinitialspace=True), [])
    if not written.header:
        names = [str(number) for number in range(1, len(names) + 1)]
    _refuse_twice(path, names)
    frame = parse_csv(path, path, written, names, text_columns=text_columns, owner=owner, blanks=MISSING)
    if frame.empty:
        raise DataError(f"{path} has {'a header but ' * written.header}no rows")
    return frame


def parse_csv(
    content: Path | io.BytesIO,
    path: Path,
    written: TableFormat,
    names: Sequence[str],
    *,
    text_columns: Set[str],
    owner: str | None = None,
    only: Sequence[str] | None = None,
    blanks: Sequence[str] = (),
) -> pd.DataFrame:
    """Read the columns `names` of a CSV file, or `only` some of them, from the file or its bytes.

    The columns `text_columns` and `owner` keep the text of their cells. In other columns the words `blanks` are gaps;
    in all columns the mark of the format is. Messages call the file `path`.
    """
    import pandas as pd

    mark = [] if written.missing is None else [written.missing]
    text = text_columns if owner is None else {*text_columns, owner}
    with _as_data_errors(path):
        return pd.read_csv(
            content,
            sep=written.separator,
            encoding=written.encoding,
            decimal=written.decimal,
            comment=written.comment,
            header=0 if written.header else None,
            names=None if written.header else list(names),
            usecols=only,
            skipinitialspace=True,
            index_col=False,
            keep_default_na=False,
            na_values={name: mark if name in text else [*mark, *blanks] for name in names},
            # pandas would parse categories that all look like numbers, and make "007" and "7.0" equal
            dtype={name: str if name == owner else "category" for name in text},
        )


class _Token(str):
    """A JSON number as it was written: 1.0 and 1, or 9007199254740993 and its neighbours, stay different."""


def _read_json_lines(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    """Read a table with one JSON object per line; an absent or null key is a missing value.

    Numbers under the key `owner` are kept as the text that was written. pandas would convert all of them to floats if
    one is, and different integers from 2^53 on would become equal.
    """
    import pandas as pd

    del text_columns
    rows, owners = [], []
    with _as_data_errors(path), _open_text(path, written.encoding) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_object(line, number))
            if line.strip() and owner is not None and isinstance(rows[-1], dict):
                tokens = json.loads(line, parse_int=_Token, parse_float=_Token, parse_constant=_Token)
                whose = tokens.get(owner)
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


def _first_line(lines: TextIO, path: Path, comment: str | None) -> str:
    """Return the first line that is not blank, without its comment, or "".

    Raises DataError if it is longer than a header may be.
    """
    while line := lines.readline(_LONGEST_HEADER + 1):
        if len(line) > _LONGEST_HEADER:
            raise DataError(
                f"{path} cannot be read as a table: its first line is longer than {_LONGEST_HEADER} characters;"
                " is it text, with a header of column names?"
            )
        line = line if comment is None else line.partition(comment)[0]
        if line.strip():
            return line
    return ""


def _open_text(path: Path, encoding: str) -> TextIO:
    """Open `path` as text, through gzip if its name ends in .gz."""
    if path.suffix == ".gz":
        _refuse_bomb(path)
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def _refuse_bomb(path: Path) -> None:
    """Raise DataError if a gzip file unpacks to more than `MOST_UNPACKED` bytes. Needs constant memory."""
    given = 0
    with gzip.open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            given += len(block)
            if given > MOST_UNPACKED:
                raise DataError(f"{path}: unpacks to more than {MOST_UNPACKED} bytes; unpack it, and name that file")


def _read_parquet(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    import pandas as pd

    del written, text_columns, owner  # a column has a type, which keeps integers and text as they are
    held = memory.at(path)
    try:
        frame = pd.read_parquet(path) if held is None or held.table is None else held.table
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


_READERS: dict[str, Callable[[Path, TableFormat, Set[str], str | None], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
KINDS = {
    **{ending + packed: reader for ending, reader in _READERS.items() for packed in ("", ".gz")},
    ".parquet": _read_parquet,
}
"""Reader of each kind of table, by the ending of its file name."""
