"""The one reader of table files: CSV, Excel, JSON lines and Parquet, plain or packed.

Tables of a user's own, cards, new rows for a model and drafts of recipes all go through it. `TableFormat`
(`column_settings.py`) says how a file is written. Nothing is guessed from a record: left out, only the separator is
looked for, and in the header alone. `detection.py` finds a format for a draft.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gzip
import io
import itertools
import json
import re
import sys
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.data import fingerprint, memory
from dpsgd_cli.data.column_settings import MOST_UNPACKED, TableFormat
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

PLAIN = TableFormat()
_LONGEST_HEADER = 4_000_000
_A_RECORD = "its first line looks like a record: if it is no header, say data.format: {header: false}"
_NO_NAME = re.compile(r"\s*[^\w\s]{0,2}\d[\d\s.,:/%$€T+-]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGED = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile),
)
"""Errors that a damaged Excel file causes in the libraries that read it."""
_PARQUET_TEXT = ("string", "large_string")
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
    """Read a table of a user's own, whose file name ends in `kind` (of `KINDS`).

    The columns `text_columns` and `owner` keep the text of their cells. Raises DataError for a file that cannot be
    read, or has no rows.
    """
    written = written or PLAIN
    if kind.startswith(".tsv") and written.separator is None:
        written = written.changed(separator="\t")
    return KINDS[kind](path, written, text_columns, owner)


def _read_csv(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    written, names = head_of(path, written)
    text = text_columns if owner is None else {*text_columns, owner}
    frame = parse_csv(path, path, written, names, text_columns=text, blanks=MISSING)
    if frame.empty:
        raise DataError(f"{path} has {'a header but ' * written.header}no rows")
    return frame


def head_of(path: Path, written: TableFormat) -> tuple[TableFormat, list[str]]:
    """Return the format of a CSV file with its separator, and the names of its columns. Raises DataError for a twin."""
    with opened(path, written.encoding) as lines:
        for _ in range(written.skip):
            lines.readline(_LONGEST_HEADER)
        first = _first_line(lines, path, written.comment)
        separator = separator_of(written, first)
        # a name in quotes may go on in the next line
        rows = csv.reader(itertools.chain([first], lines), delimiter=separator, skipinitialspace=written.trim)
        names = named(next(rows, []))
    if not names:
        raise DataError(f"{path} holds no line of text{f' after line {written.skip}' * (written.skip > 0)}")
    if not written.header:
        names = [str(number) for number in range(1, len(names) + 1)]
    _refuse_twice(path, names)
    return written.changed(separator=separator), names


def named(header: Sequence[object]) -> list[str]:
    """Return the names of columns: a line break within is a blank, and one without a name has its number.

    >>> named(["Age\\n(years)", "", "b"])
    ['Age (years)', 'column 2', 'b']
    """
    texts = ["" if cell is None or cell != cell else str(cell) for cell in header]
    told = [" ".join(text.split()) if "\n" in text else text for text in texts]
    return [text if text.strip() else f"column {number}" for number, text in enumerate(told, 1)]


def known_columns(name: str, names: Iterable[object]) -> str:
    """Return a hint to follow a name that is no column of a table (`suggested`), which shows no cell."""
    known = [str(one) for one in names]
    return f"; {_A_RECORD}" if is_record(known) else suggested(name, known)


def is_record(names: Sequence[str]) -> bool:
    """Return True if names are perhaps cells, which no message shows: some are numbers or dates, which do not count on.

    >>> is_record(["2019", "2020", "name"]), is_record(["34", "Smith"]), is_record(["1st visit", "age"])
    (False, True, False)
    """
    numbers = [one for one in names if _NO_NAME.fullmatch(one)]
    first = int(numbers[0]) if numbers and numbers[0].isdecimal() else 0
    return len(numbers) == 1 or numbers != [str(first + at) for at in range(len(numbers))]


def table_parts(
    path: Path,
    kind: str,
    written: TableFormat | None,
    text_columns: Set[str],
    rows: int,
    only: Set[str] | None = None,
) -> Iterator[pd.DataFrame]:
    """Yield a table, or its columns `only`, in parts of so many rows; one part is in memory at a time.

    Rows are indexed by their places in the file. Kinds of files that are not of `IN_PARTS` are one part. Raises
    DataError as `read_table` does.
    """
    written = written or PLAIN
    if kind.startswith(".tsv") and written.separator is None:
        written = written.changed(separator="\t")
    held = memory.at(path)
    if kind.startswith(IN_PARTS) and held is None:
        parts = _parquet_parts if kind == ".parquet" else _csv_parts
        empty = True
        for part in parts(path, written, text_columns, only, rows):
            empty = False
            yield part
        if not empty:
            return
        raise DataError(f"{path} has {'a header but ' * (kind != '.parquet' and written.header)}no rows")
    yield read_table(path, kind, written, text_columns)


def size_of(path: Path, kind: str) -> int:
    """Return a lower bound on the bytes that a table takes in memory when it is read as a whole, with its numbers.

    A cell takes 8 bytes in the matrix of numbers, and as much or more in the table. In a text file it seldom takes more
    than 16, and as text it takes more in memory than in the file.
    """
    if memory.at(path) is not None:
        return 0
    if kind != ".parquet":
        return path.stat().st_size
    with _parquet(path) as (file, schema):
        return 8 * file.metadata.num_rows * len(schema.names)


def names_of(path: Path, kind: str, written: TableFormat | None) -> list[str]:
    """Return the names of the columns of a csv, tsv or parquet file. Raises DataError for a twin."""
    return _parquet_names(path) if kind == ".parquet" else head_of(path, written or PLAIN)[1]


def _csv_parts(
    path: Path, written: TableFormat, text_columns: Set[str], only: Set[str] | None, rows: int
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    written, names = head_of(path, written)
    how = _options(written, names, text_columns, MISSING)
    with _as_data_errors(path), _unpacked(path) as stream, pd.read_csv(stream, chunksize=rows, **how) as parts:
        for frame in parts:
            if frame.empty:
                return
            yield _with_categories(_some(frame, only), text_columns)


def _parquet_parts(
    path: Path, written: TableFormat, text_columns: Set[str], only: Set[str] | None, rows: int
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    del written
    done = 0
    _parquet_names(path)
    with _parquet(path) as (file, schema):
        names = [field.name for field in schema if only is None or field.name in only]
        for group in range(file.num_row_groups):
            # a reader of several groups keeps the bytes of all that it has read
            for batch in file.iter_batches(rows, row_groups=[group], columns=names):
                frame = memory.frame_of(batch).rename(columns=str)
                frame.index = pd.RangeIndex(done, done + len(frame))
                done += len(frame)
                yield _with_categories(frame, _texts_in(schema, text_columns))


def _parquet_names(path: Path) -> list[str]:
    with _parquet(path) as (_, schema):
        names = [str(name) for name in schema.names]
    _refuse_twice(path, names)
    return names


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[tuple[Any, Any]]:
    """Give an open parquet file and its schema. Raises DataError if it cannot be read."""
    try:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            yield file, file.schema_arrow
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({type(error).__name__}); is it damaged?") from None


def _texts_in(schema: Any, text_columns: Set[str]) -> set[str]:
    """Return those of the columns that a parquet file has as text: as categories, they take few bytes a cell."""
    return {field.name for field in schema if field.name in text_columns and str(field.type) in _PARQUET_TEXT}


def return_freed_memory() -> None:
    """Return to the system what readers have freed: pyarrow, and the C library if it is glibc, keep it otherwise."""
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def separator_of(written: TableFormat, header: str) -> str:
    """Return the separator of a format: the most frequent one in the header, if it says none."""
    return written.separator or max(_SEPARATORS, key="".join(header.split('"')[::2]).count)


def parse_csv(
    content: Path | io.BytesIO,
    path: Path,
    written: TableFormat,
    names: Sequence[str],
    *,
    text_columns: Set[str],
    only: Set[str] | Sequence[str] | None = None,
    blanks: Sequence[str] = (),
) -> pd.DataFrame:
    """Read the columns `names` of a CSV file, or `only` some of them, from the file or its bytes.

    The columns `text_columns` keep the text of their cells. In other columns the words `blanks` are gaps;
    in all columns the marks of the format are. Numbers with groups or symbols stay text (`numbers_in`). Messages call
    the file `path`.
    """
    import pandas as pd

    if written.separator is None:
        assert isinstance(content, io.BytesIO)
        start = io.BytesIO(b"".join(content.getvalue()[:_LONGEST_HEADER].splitlines(True)[written.skip :]))
        header = _first_line(io.TextIOWrapper(start, written.encoding, errors="replace"), path, written.comment)
        written = written.changed(separator=separator_of(written, header))
    with _as_data_errors(path), _unpacked(content) as stream:
        frame = pd.read_csv(stream, **_options(written, names, text_columns, blanks))
    return _with_categories(_some(frame, only), text_columns)


def _some(frame: pd.DataFrame, only: Set[str] | Sequence[str] | None) -> pd.DataFrame:
    """Return the columns `only` of a table. A reader that is told of them does not count the fields of a line."""
    return frame if only is None else frame[[name for name in frame.columns if name in only]]


def _options(
    written: TableFormat,
    names: Sequence[str],
    text: Set[str],
    blanks: Sequence[str],
) -> dict[str, Any]:
    """Return how pandas reads a CSV file that is `written` so, with the columns `text` as text."""
    import pandas as pd

    # before version 3, pandas rounds the last digits of numbers, but not of those that `numbers_in` reads
    exact = {"float_precision": "round_trip"} if int(pd.__version__.split(".")[0]) < 3 else {}
    return exact | {
        "sep": written.separator,
        "encoding": written.encoding,
        "decimal": written.decimal,
        "comment": written.comment,
        "skiprows": written.skip,
        "header": 0 if written.header else None,
        "names": list(names),
        "skipinitialspace": written.trim,
        "index_col": False,
        "keep_default_na": False,
        "na_values": {name: written.marks if name in text else [*written.marks, *blanks] for name in names},
        # of dtype "category" pandas would parse those that all look like numbers, and make "007" and "7.0" equal
        "dtype": dict.fromkeys(text & set(names), str),
    }


def _with_categories(frame: pd.DataFrame, text_columns: Set[Any]) -> pd.DataFrame:
    return frame.astype({name: "category" for name in frame.columns if name in text_columns})


@contextlib.contextmanager
def _unpacked(content: Path | io.BytesIO) -> Iterator[Path | IO[bytes] | io.BytesIO]:
    """Give what pandas reads: a path (it unpacks gzip by itself), bytes, or the stream of a zstd file."""
    if isinstance(content, Path) and content.suffix.lower() == ".zst":
        with _open_bytes(content) as stream:
            yield stream
    else:
        yield content


class _Token(str):
    """A JSON number as it was written: 1.0 and 1, or 9007199254740993 and its neighbours, stay different."""


def _read_json_lines(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    """Read a table with one JSON object per line; an absent or null key is a missing value.

    Columns of text keep each cell as it is: of integers and a gap, pandas would make floats (`memory.frame_of`).
    Numbers under the key `owner` are kept as the text that was written. pandas would convert all of them to floats if
    one is, and different integers from 2^53 on would become equal.
    """
    import pandas as pd

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
    if frame.empty:
        raise DataError(f"{path} has no rows")
    for row, cells in enumerate(rows, 1):
        nested = next((name for name, cell in cells.items() if isinstance(cell, list | dict)), None)
        if nested is not None:
            what = f"column {quoted(nested)} holds lists or objects, first in data row {row}; write plain values"
            raise DataError(f"{path}: {what}")
    for name in text_columns & {*frame.columns}:
        frame[name] = pd.Series([row.get(name) for row in rows], dtype=object, index=frame.index)
    if owner in frame.columns:
        frame[owner] = pd.Series(owners, dtype=object, index=frame.index)
    return frame.rename(columns=str)


def _object(line: str, number: int) -> Any:
    """Return the content of a line of JSON. Raises _Unreadable for invalid JSON, and text that UTF-8 cannot write."""
    try:
        found = json.loads(line, object_pairs_hook=_once)
    except _Unreadable as error:
        raise _Unreadable(f"line {number} {error}") from None
    except RecursionError:
        raise _Unreadable(f"line {number} is nested too deeply") from None
    except ValueError as error:
        raise _Unreadable(f"line {number} is no JSON: {getattr(error, 'msg', 'a number is too long')}") from None
    if "\\u" in line and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        raise _Unreadable(f"line {number} holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises _Unreadable if it has a key twice: one of its two values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _Unreadable(f"has the key {quoted(twice)} twice")
    return found


@contextlib.contextmanager
def _as_data_errors(path: Path) -> Iterator[None]:
    """Turn errors about an unreadable table, and pandas' warning about dropped cells, into DataError without a cell."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)  # chunks of a column differ: `numbers_in` settles it
        try:
            yield
            return
        except pd.errors.ParserWarning:
            why = "rows have more fields than the header; is data.format.separator right?"
        except (pd.errors.ParserError, pd.errors.EmptyDataError, _Unreadable) as error:
            why = str(error).strip()
        except UnicodeDecodeError as error:
            why = f"byte {error.start} of its text is not {error.encoding}; give data.format.encoding, say cp1252"
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile):
            why = "it is damaged, or packed in another way than its name says"
        except (ValueError, OverflowError, csv.Error) as error:
            why = f"it is not written as data.format says ({type(error).__name__})"
    raise DataError(f"{path} cannot be read as a table: {why}")


class _Unreadable(ValueError):
    """The reason why a line is no row, without its content."""


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
        if "\0" in line:
            raise DataError(
                f"{path} cannot be read as a table: its first line holds NUL characters; is it text, and"
                " data.format.encoding right, say utf-16-le?"
            )
        line = line if comment is None else line.partition(comment)[0]
        if line.strip():
            return line
    return ""


@contextlib.contextmanager
def opened(path: Path, encoding: str) -> Iterator[TextIO]:
    """Give the text of a file, unpacked. Raises DataError if it cannot be read."""
    with _as_data_errors(path), _open_text(path, encoding) as lines:
        yield lines


def _open_text(path: Path, encoding: str) -> TextIO:
    """Open `path` as text, unpacked if its name ends in .gz or .zst."""
    if path.suffix.lower() not in PACKED:
        return path.open(encoding=encoding, newline="")
    _refuse_bomb(path)
    return io.TextIOWrapper(_open_bytes(path), encoding=encoding, newline="")


def _open_bytes(path: Path) -> Any:
    """Open a packed file as a stream of its unpacked bytes."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: unpacking zstd needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))


def _refuse_bomb(path: Path) -> None:
    """Raise DataError if a packed file unpacks to more than `MOST_UNPACKED` bytes. A file is unpacked once for this."""
    fingerprint.found(path, f"unpacks to at most {MOST_UNPACKED} bytes", partial(_unpack, path))


def _unpack(path: Path) -> dict[str, Any]:
    given = 0
    with _open_bytes(path) as stream:
        while block := stream.read(1 << 20):
            given += len(block)
            if given > MOST_UNPACKED:
                raise DataError(f"{path}: unpacks to more than {MOST_UNPACKED} bytes; unpack it, and name that file")
    return {}


@contextlib.contextmanager
def _book(path: Path) -> Iterator[Any]:
    """Give an open Excel file. Raises DataError if it, or what the block reads of it, is damaged or too large."""
    import pandas as pd

    try:
        import openpyxl  # noqa: F401
    except ImportError:
        raise DataError(f"{path}: reading Excel files needs openpyxl; run `pip install 'dpsgd[excel]'`") from None
    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MOST_UNPACKED:
            raise DataError(f"{path}: unpacks to more than {MOST_UNPACKED} bytes; save it as CSV")
        with pd.ExcelFile(path, engine="openpyxl") as book:
            yield book
    except _DAMAGED as error:
        raise DataError(f"{path} cannot be read as an Excel file ({type(error).__name__})") from None


def sheets_of(path: Path) -> list[str]:
    """Return the names of the sheets of an Excel file."""
    with _book(path) as book:
        return list(map(str, book.sheet_names))


def first_rows(path: Path, sheet: str, rows: int) -> list[list[object]]:
    """Return the cells of the first rows of a sheet."""
    import pandas as pd

    with _book(path) as book:
        read = pd.read_excel(book, sheet_name=sheet, header=None, dtype=object, nrows=rows)
    return [list(cells) for cells in read.itertuples(index=False)]


def _read_excel(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    """Read a sheet of an Excel file. Cells keep their type; formulas are read as their last values."""
    import pandas as pd

    with _book(path) as book:
        if written.sheet is not None and written.sheet not in book.sheet_names:
            raise DataError(f"{path} has no sheet {quoted(written.sheet)}, which data.format names")
        how = {
            "sheet_name": written.sheet or 0,
            "header": None,
            "dtype": object,
            "keep_default_na": False,
            "skiprows": written.skip,
        }
        frame = pd.read_excel(book, na_values=written.marks, **how)
    names = named(frame.iloc[0] if written.header and len(frame) else range(1, frame.shape[1] + 1))
    _refuse_twice(path, names)
    frame = frame.set_axis(names, axis=1).iloc[int(written.header) :].reset_index(drop=True)
    if frame.empty:
        raise DataError(f"{path} has no rows")
    text = text_columns if owner is None else {*text_columns, owner}
    return frame.where(frame != "").apply(lambda cells: cells if cells.name in text else cells.infer_objects())


def _read_parquet(path: Path, written: TableFormat, text_columns: Set[str], owner: str | None) -> pd.DataFrame:
    del written, owner  # a column has a type, which keeps integers and text as they are
    held = memory.at(path)
    if held is not None and held.table is not None:
        frame = held.table
    else:
        with _parquet(path) as (_, schema):
            from pyarrow.parquet import read_table as read_arrow

            _refuse_twice(path, list(map(str, schema.names)))
            texts = sorted(_texts_in(schema, text_columns))
            # each column is handed over without a copy, or its own is freed at once
            arrow = read_arrow(path, read_dictionary=texts)
            frame = memory.frame_of(arrow, split_blocks=True, self_destruct=True)
            del arrow
    if frame.empty:
        raise DataError(f"{path} has no rows")
    return frame.rename(columns=str).reset_index(drop=True)


def _refuse_twice(path: Path, names: list[str]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice and is_record(names):
        raise DataError(f"{path}: two columns have one name; {_A_RECORD}")
    if twice:
        raise DataError("\n".join(f"{path}: two columns are called {quoted(name)}" for name in twice))


_READERS: dict[str, Callable[[Path, TableFormat, Set[str], str | None], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
PACKED = (".gz", ".zst")
IN_PARTS = (".csv", ".tsv", ".parquet")
"""Beginnings of the kinds of files that are read in parts."""
KINDS = {
    **{ending + packed: reader for ending, reader in _READERS.items() for packed in ("", *PACKED)},
    ".parquet": _read_parquet,
    ".xlsx": _read_excel,
}
"""Reader of each kind of table, by the ending of its file name."""
