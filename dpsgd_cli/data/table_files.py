"""The one reader of table files: CSV, Excel, JSON lines and Parquet, plain or packed.

It yields a table in parts. Tables of a user's own, cards, new rows for a model and drafts of recipes all go through it.
`TableFormat` (`column_settings.py`) says how a file is written. Nothing is guessed from a record: left out, only the
separator is looked for, and in the header alone. Cells of text files are texts, as written (`cells.py`).
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import ctypes
import gzip
import io
import itertools
import json
import re
import sys
import unicodedata
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.data import fingerprint, memory
from dpsgd_cli.data.cells import PLAIN, TableRows, text_of
from dpsgd_cli.data.column_settings import MOST_UNPACKED, TableFormat
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 100_000
_LONGEST_HEADER = 4_000_000
TITLES = 30
"""Lines in which a header is looked for."""
_BLOCK = 1 << 21
_A_RECORD = "its first line looks like a record: if it is no header, say data.format: {header: false}"
_NO_NAME = re.compile(r"\s*[^\w\s]{0,2}\d[\d\s.,:/%$€T+-]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DAMAGED = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, RuntimeError),
    *(zlib.error, zipfile.BadZipFile),
)
"""Errors that a damaged Excel file causes in the libraries that read it."""
_SEPARATORS = (",", ";", "\t", "|")
ROW_NAMES, AFTER_LAST = "row names", "after the last separator"
"""Names of the cells that rows have beyond the header (`TableFormat.extra`)."""
_END = "\x1e"
"""Cells of the row that is put behind a text file. If a quote in the file is not closed, that row is not the last."""
Only = Set[str] | None
"""The columns that are read; None for all of them."""


def parts(path: Path, kind: str, written: TableFormat | None = None, only: Only = None) -> Iterator[TableRows]:
    """Yield a table of a user's own, whose file name ends in `kind` (of `KINDS`), in parts of `ROWS_AT_ONCE` rows.

    CSV and Parquet files are read as the parts are taken; others are read as a whole. Raises DataError for a file that
    cannot be read, or has no rows.
    """
    done = 0
    held = memory.at(path)
    whole = [held.table] if held is not None and held.table is not None else None
    for part in whole or KINDS[kind](path, _with_separator(written, kind), only):
        for start in range(0, len(part), ROWS_AT_ONCE):
            rows = part.arrow.slice(start, ROWS_AT_ONCE)
            yield TableRows(rows, done, part.open_names)
            done += len(rows)
    if not done:
        raise DataError(f"{path} has {'a header but ' * (kind[:4] in ('.csv', '.tsv'))}no rows")


def read_table(path: Path, kind: str, written: TableFormat | None = None, only: Only = None) -> TableRows:
    """Return a table of a user's own as a whole. Raises DataError as `parts` does."""
    import pyarrow as pa

    found = list(parts(path, kind, written, only))
    return TableRows(pa.concat_tables([part.arrow for part in found]), 0, found[0].open_names)


def _with_separator(written: TableFormat | None, kind: str) -> TableFormat:
    written = written or PLAIN
    return written.changed(separator="\t") if kind.startswith(".tsv") and written.separator is None else written


def head_of(path: Path, written: TableFormat) -> tuple[TableFormat, list[str]]:
    """Return the format of a CSV file with its separator and the lines above its header, and the names of its columns.

    Raises DataError for a twin, and for a file without text.
    """
    with opened(path, written.encoding) as lines:
        for _ in range(written.skip):
            lines.readline(_LONGEST_HEADER)
        blank, first = _first_line(lines, path, written.comment)
        separator = separator_of(written, first)
        # a name in quotes may go on in the next line
        rows = csv.reader(itertools.chain([first], lines), delimiter=separator, skipinitialspace=written.trim)
        names = named(next(rows, []))
    if written.extra is not None and written.header:
        names = [ROW_NAMES, *names] if written.extra == "first" else [*names, AFTER_LAST]
    if not names:
        raise DataError(f"{path} holds no line of text{f' after line {written.skip}' * (written.skip > 0)}")
    if not written.header:
        names = [str(number) for number in range(1, len(names) + 1)]
    _refuse_twice(path, names)
    return written.changed(separator=separator, skip=written.skip + blank), names


def named(header: Sequence[object]) -> list[str]:
    """Return the names of columns: a line break within is a blank, and one without a name has its number.

    >>> named(["Age\\n(years)", "", "b"])
    ['Age (years)', 'column 2', 'b']
    """
    texts = ["" if cell is None or cell != cell else unicodedata.normalize("NFC", str(cell)) for cell in header]
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


def size_of(path: Path, kind: str) -> int:
    """Return a lower bound on the bytes that a table takes in memory when it is read as a whole, with its numbers.

    A cell takes 8 bytes in the matrix of numbers, and as much or more in the table. In a text file it seldom takes more
    than 16, and as text it takes more in memory than in the file.
    """
    if memory.at(path) is not None:
        return 0
    if kind != ".parquet":
        return path.stat().st_size
    with _parquet(path) as file:
        return 8 * file.metadata.num_rows * len(file.schema_arrow.names)


def names_of(path: Path, kind: str, written: TableFormat | None) -> list[str]:
    """Return the names of the columns of a csv, tsv or parquet file. Raises DataError for a twin."""
    if kind != ".parquet":
        return head_of(path, _with_separator(written, kind))[1]
    with _parquet(path) as file:
        return _names_in(path, file)


def with_header(path: Path, kind: str, written: TableFormat, wanted: Collection[str]) -> TableFormat:
    """Return the format with as many lines above the header as `path` has: its first line with all names `wanted`.

    For new rows, on which nothing was trained. Without such a line among the first `TITLES`, as many as `written` says.
    """
    if not written.header or not kind.startswith((".csv", ".tsv", ".xlsx")):
        return written
    for skip in dict.fromkeys([written.skip, *range(TITLES)]):
        tried = written.changed(skip=skip)
        with contextlib.suppress(DataError):
            if kind == ".xlsx":
                names = named(next(iter(rows_of_sheet(path, written.sheet or 0, skip, 1)), []))
            else:
                names = head_of(path, _with_separator(tried, kind))[1]
            if {*wanted} <= {*names}:
                return tried
    return written


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


def parse_csv(content: bytes, path: Path, written: TableFormat, names: Sequence[str], only: Only) -> TableRows:
    """Return the columns `only` of the content of a CSV file with the columns `names`. Messages call it `path`."""
    import pyarrow as pa

    if written.separator is None:
        start = io.BytesIO(b"".join(content[:_LONGEST_HEADER].splitlines(True)[written.skip :]))
        lines = io.TextIOWrapper(start, written.encoding, errors="replace")
        written = written.changed(separator=separator_of(written, _first_line(lines, path, written.comment)[1]))
    found = list(_rows_of_text(partial(io.BytesIO, content), path, written, names, only))
    return TableRows(pa.concat_tables([part.arrow for part in found]))


def _read_csv(path: Path, written: TableFormat, only: Only) -> Iterator[TableRows]:
    written, names = head_of(path, written)
    yield from _rows_of_text(partial(_open_bytes, path), path, written, names, only)


def _rows_of_text(
    open_bytes: Callable[[], IO[bytes]], path: Path, written: TableFormat, names: Sequence[str], only: Only
) -> Iterator[TableRows]:
    """Yield the rows of a text file as columns of texts.

    pyarrow reads all files but those with comments, and those with a blank between a separator and a quote: these
    Python's `csv` reads, to the same cells. Raises DataError, naming the row, for another number of cells than `names`.
    """

    by_hand = written.comment is not None or (written.trim and _has_blank_quotes(open_bytes, written))
    read = _by_csv if by_hand else _by_arrow
    last: pa.Table | None = None
    with _as_data_errors(path, written), open_bytes() as stream:
        text = _Text(stream, written, len(names))
        for batch in read(text, written, names):
            if last is not None:
                yield _some(last, written, only)
            last = batch
    assert last is not None
    if last.slice(len(last) - 1).to_pylist() != [dict.fromkeys(names, _END)]:
        raise DataError(f"{path} cannot be read as a table: EOF inside of quotes, one of which is not closed")
    yield _some(last.slice(0, len(last) - 1), written, only)


def _some(rows: pa.Table, written: TableFormat, only: Only) -> TableRows:
    """Return the columns `only`, without blanks before cells if they are no part of them."""
    from pyarrow import compute

    chosen = rows.select([name for name in rows.column_names if only is None or name in only])
    for at, name in enumerate(chosen.column_names if written.trim else ()):
        if compute.any(compute.starts_with(chosen.column(at), " ")).as_py():
            chosen = chosen.set_column(at, name, compute.utf8_ltrim(chosen.column(at), " "))
    return TableRows(chosen)


class _Text:
    """The bytes of a text file as UTF-8, without a byte order mark, and a row of `_END` behind it."""

    closed = False

    def __init__(self, stream: IO[bytes], written: TableFormat, cells: int) -> None:
        utf8 = codecs.lookup(written.encoding).name in ("utf-8", "utf-8-sig", "ascii")
        self._decoder = None if utf8 else codecs.getincrementaldecoder(written.encoding)()
        self._stream, self._last = stream, f"\n{(written.separator or '').join([_END] * cells)}\n".encode()

    def read(self, size: int = _BLOCK) -> bytes:
        block = self._stream.read(size)
        if self._decoder is not None:
            block = self._decoder.decode(block, final=not block).encode()
        if block:
            return block
        last, self._last = self._last, b""
        return last


def _by_arrow(text: _Text, written: TableFormat, names: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow as pa
    from pyarrow import csv as reader

    odd: list[_OddRow] = []

    def refuse(row: Any) -> str:
        odd.append(_OddRow(row.number, row.actual_columns, row.expected_columns))
        return "error"

    reading = reader.ReadOptions(
        column_names=list(names),
        skip_rows=written.skip,
        skip_rows_after_names=int(written.header),
        use_threads=False,
        block_size=_BLOCK,
    )
    parsing = reader.ParseOptions(delimiter=written.separator, newlines_in_values=True, invalid_row_handler=refuse)
    converting = reader.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    try:
        with reader.open_csv(text, reading, parsing, converting) as batches:
            for batch in batches:
                yield pa.Table.from_batches([batch])
    except pa.ArrowInvalid as error:
        raise (odd[0] if odd else error) from None  # the message of Arrow shows the row


def _by_csv(text: _Text, written: TableFormat, names: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow as pa

    lines = io.TextIOWrapper(io.BytesIO(b"".join(iter(text.read, b""))), "utf-8-sig", newline="")
    for _ in range(written.skip):
        lines.readline()
    told: Iterable[str] = lines if written.comment is None else _without_comments(lines, written.comment)
    reader = csv.reader(told, delimiter=written.separator or ",", skipinitialspace=written.trim)
    rows = itertools.islice(filter(None, reader), int(written.header), None)
    done = 0
    while block := list(itertools.islice(rows, ROWS_AT_ONCE)):
        for number, row in enumerate(block, done + 1 + written.header):
            if len(row) != len(names):
                raise _OddRow(number, len(row), len(names))
        done += len(block)
        yield pa.table(
            dict(zip(names, zip(*block, strict=True), strict=True)), pa.schema({n: pa.string() for n in names})
        )


def _without_comments(lines: Iterable[str], mark: str) -> Iterator[str]:
    """Yield lines without what follows `mark` outside of quotes; a line of a comment alone becomes empty."""
    inside = False
    for line in lines:
        pieces = line.split('"')
        for at, piece in enumerate(pieces):
            if not inside and mark in piece:
                line = '"'.join([*pieces[:at], piece.partition(mark)[0]]) + "\n"
                break
            inside ^= at < len(pieces) - 1
        yield line


def _has_blank_quotes(open_bytes: Callable[[], IO[bytes]], written: TableFormat) -> bool:
    """Return True if a cell perhaps begins with blanks and a quote."""
    before = b""
    sought = f"{written.separator} ".encode()
    with open_bytes() as stream:
        text = _Text(stream, written, 0)
        while block := text.read():
            if b' "' in before + block and re.search(re.escape(sought) + b'+"|\n +"', before + block):
                return True
            before = block[-64:]
    return False


def _read_json_lines(path: Path, written: TableFormat, only: Only) -> Iterator[TableRows]:
    """Yield a table with one JSON object per line, with its keys in alphabetical order; an absent key is a gap.

    A number is the text that was written, so 1.0 and 1, or 9007199254740993 and its neighbours, stay different.
    """
    rows, names = list[dict[str, Any]](), set[str]()
    with _as_data_errors(path, written), _open_text(path, written.encoding) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _object(line, number, written)
            if not isinstance(row, dict):
                raise _Unreadable("a line is no object; write one with a key for each column")
            rows.append(row)
            names.update(row)
    for number, row in enumerate(rows, 1):
        nested = next((name for name, cell in row.items() if isinstance(cell, list | dict)), None)
        if nested is not None:
            what = f"column {quoted(nested)} holds lists or objects, first in data row {number}; write plain values"
            raise DataError(f"{path}: {what}")
    if rows:
        made = TableRows.of(
            {name: [row.get(name) for row in rows] for name in sorted(names) if only is None or name in only}
        )
        yield TableRows(made.arrow, 0, open_names=True)


def _object(line: str, number: int, written: TableFormat) -> Any:
    """Return the content of a line of JSON, with numbers as texts.

    Raises _Unreadable for invalid JSON, and for text that UTF-8 cannot write.
    """

    def fraction(text: str) -> str:
        return text.replace(".", written.decimal)

    try:
        found = json.loads(line, object_pairs_hook=_once, parse_int=str, parse_float=fraction, parse_constant=str)
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
    found = {unicodedata.normalize("NFC", key): value for key, value in pairs}
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(unicodedata.normalize("NFC", key) for key, _ in pairs).most_common(1)
        raise _Unreadable(f"has the key {quoted(twice)} twice")
    return found


@contextlib.contextmanager
def _as_data_errors(path: Path, written: TableFormat = PLAIN) -> Iterator[None]:
    """Turn errors about an unreadable table into DataError without a cell."""
    import pyarrow as pa

    advice = f"its text is not {written.encoding.removesuffix('-sig')}; give data.format.encoding, say cp1252"
    try:
        yield
        return
    except _Unreadable as error:
        why = str(error)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} of {advice}"
    except pa.ArrowInvalid as error:
        told = str(error)
        why = advice if "UTF8" in told else "a cell is too long" if "straddling" in told else "it is damaged"
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile):
        why = "it is damaged, or packed in another way than its name says"
    except (ValueError, OverflowError, csv.Error) as error:
        why = f"it is not written as data.format says ({type(error).__name__})"
    raise DataError(f"{path} cannot be read as a table: {why}") from None


class _Unreadable(ValueError):
    """The reason why a line is no row, without its content."""


class _OddRow(_Unreadable):
    """A row, counted from 1 with the header, that has another number of cells than the header."""

    def __init__(self, number: int, cells: int, names: int) -> None:
        more = " Or are they row names, as R writes them (data.format: {extra: first}), or a separator at the end of"
        more = f"{more} each line (extra: last)?" if cells == names + 1 else ""
        more = " Or is it a total or a note, which is no record? Take it out of the file." if cells < names else more
        super().__init__(f"row {number} has {cells} cells, not {names}; is data.format.separator right?{more}")


def _first_line(lines: TextIO, path: Path, comment: str | None) -> tuple[int, str]:
    """Return how many lines are blank, and the first that is not, without its comment, or "".

    Raises DataError if it is longer than a header may be.
    """
    blank = 0
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
            return blank, line
        blank += 1
    return blank, ""


@contextlib.contextmanager
def opened(path: Path, encoding: str) -> Iterator[TextIO]:
    """Give the text of a file, unpacked. Raises DataError if it cannot be read."""
    with _as_data_errors(path), _open_text(path, encoding) as lines:
        yield lines


def _open_text(path: Path, encoding: str) -> TextIO:
    """Open `path` as text, unpacked if its name ends in .gz or .zst."""
    return io.TextIOWrapper(_open_bytes(path), encoding=encoding, newline="")


def _open_bytes(path: Path) -> Any:
    """Open a file as a stream of bytes, unpacked if its name ends in .gz or .zst.

    Raises DataError if a packed file unpacks to more than `MOST_UNPACKED` bytes. A file is unpacked once for this.
    """
    if path.suffix.lower() not in PACKED:
        return path.open("rb")
    fingerprint.found(path, f"unpacks to at most {MOST_UNPACKED} bytes", partial(_unpack, path))
    return _unpacked(path)


def _unpacked(path: Path) -> Any:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))


def _unpack(path: Path) -> dict[str, Any]:
    given = 0
    with _unpacked(path) as stream:
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


def rows_of_sheet(path: Path, sheet: str | int, skip: int = 0, rows: int | None = None) -> list[list[object]]:
    """Return the cells of a sheet, or of its first rows. Formulas are read as their last values."""
    import pandas as pd

    with _book(path) as book:
        how = {"header": None, "dtype": object, "na_filter": False, "skiprows": skip, "nrows": rows}
        return [list(cells) for cells in pd.read_excel(book, sheet_name=sheet, **how).itertuples(index=False)]


def _read_excel(path: Path, written: TableFormat, only: Only) -> Iterator[TableRows]:
    """Yield a sheet of an Excel file as columns of texts; its numbers are written as `written` says."""
    if written.sheet is not None and written.sheet not in sheets_of(path):
        raise DataError(f"{path} has no sheet {quoted(written.sheet)}, which data.format names")
    rows = rows_of_sheet(path, written.sheet or 0, written.skip)
    names = named(rows[0] if written.header and rows else range(1, len(rows[0] if rows else ()) + 1))
    _refuse_twice(path, names)

    def text(cell: object) -> object:
        shown = text_of(cell)
        return shown if isinstance(cell, str) or shown is None else shown.replace(".", written.decimal)

    columns = zip(*rows[int(written.header) :], strict=True)
    if len(rows) > written.header:
        yield TableRows.of(
            {
                name: [text(cell) for cell in column]
                for name, column in zip(names, columns, strict=True)
                if only is None or name in only
            }
        )


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """Give an open parquet file. Raises DataError if it cannot be read."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            yield file
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({type(error).__name__}); is it damaged?") from None


def _names_in(path: Path, file: Any) -> list[str]:
    names = [unicodedata.normalize("NFC", str(name)) for name in file.schema_arrow.names]
    _refuse_twice(path, names)
    return names


def _read_parquet(path: Path, written: TableFormat, only: Only) -> Iterator[TableRows]:
    """Yield the rows of a parquet file, group by group: a reader of several keeps the bytes of all that it has read."""
    import pyarrow as pa

    del written  # cells have types
    with _parquet(path) as file:
        chosen = [
            one
            for one in zip(_names_in(path, file), file.schema_arrow.names, strict=True)
            if only is None or one[0] in only
        ]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[stored for _, stored in chosen]):
                arrow = pa.Table.from_batches([batch]).select([stored for _, stored in chosen])
                yield TableRows(arrow.rename_columns([name for name, _ in chosen]))


def _refuse_twice(path: Path, names: list[str]) -> None:
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
    if twice and is_record(names):
        raise DataError(f"{path}: two columns have one name; {_A_RECORD}")
    if twice:
        raise DataError("\n".join(f"{path}: two columns are called {quoted(name)}" for name in twice))


_OF_TEXT: dict[str, Callable[[Path, TableFormat, Only], Iterator[TableRows]]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
PACKED = (".gz", ".zst")
IN_PARTS = (".csv", ".tsv", ".parquet")
"""Beginnings of the kinds of files that are read in parts."""
KINDS = {
    **{ending + packed: reader for ending, reader in _OF_TEXT.items() for packed in ("", *PACKED)},
    ".parquet": _read_parquet,
    ".xlsx": _read_excel,
}
"""Reader of each kind of table, by the ending of its file name."""
