"""Cells of tables: each value is a function of its own cell and of the recipe.

A column is an Arrow array. All columns of a text file (CSV, JSON lines) and of an Excel sheet are arrays of texts, as
written. A column of a typed file or frame keeps its type. The type is part of the file's schema, which is public, but
no type, order or other cell decides what a cell means: that is the kind that the recipe declares for the column. A kind
is a function of a cell's text (`Cells.mapped`), which is called once for each different text.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PLAIN = TableFormat()
MISSING = ("", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "?")
"""Texts of cells that hold no value, unless they are listed among a column's values or the classes."""
_VALUES = (str, bool, int, float, complex, date, time, timedelta, UUID)


def text_of(value: object) -> str | None:
    """Return the text by which a cell is compared; None for one that holds nothing.

    Text is in Unicode's normal form C. Equal numbers have one text, and so have equal times, which are told in UTC.
    Raises DataError, without the value, for lists, bytes and objects.

    >>> text_of(3.0), text_of(-0.0), text_of(Decimal("1.50")), text_of("3.0"), text_of(float("nan"))
    ('3', '0', '1.5', '3.0', None)
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, Decimal):
        value = float(value) if not value.is_finite() or float(value) == value else format(value.normalize(), "f")
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, float):
        return None if math.isnan(value) else str(int(value) if value.is_integer() else value)
    if not isinstance(value, _VALUES) and type(value).__name__ != "Period":
        raise DataError("holds lists or objects")
    return str(value)


def is_gap(text: str | None, written: TableFormat = PLAIN, listed: Sequence[str] = ()) -> bool:
    """Return True if a cell holds no value: only blanks, or a mark of missing values that is not in `listed`.

    >>> is_gap(" \\u00a0"), is_gap("NA"), is_gap("NA", listed=["NA"]), is_gap("0"), is_gap(None)
    (True, True, False, False, True)
    """
    bare = "" if text is None else text.strip()
    return not bare or (text not in listed and (bare in MISSING or bare in written.marks))


class Cells:
    """The cells of one column, and the number from 0 of the file's row that the first is from."""

    def __init__(self, name: str, array: pa.ChunkedArray, first: int = 0, places: np.ndarray | None = None) -> None:
        self.name, self.array, self.first, self.places = name, array, first, places

    @classmethod
    def of(cls, name: str, values: Any) -> Cells:
        """Return a column of values in memory: a series or an array of pandas or NumPy, or a list."""
        import pyarrow as pa

        return cls(name, pa.chunked_array([_array_of(name, values)]))

    def __len__(self) -> int:
        return len(self.array)

    def row(self, place: int | np.integer) -> int:
        """Return the number, from 1, of the file's row that the cell at `place` is from."""
        return self.first + int(place if self.places is None else self.places[place]) + 1

    def take(self, places: np.ndarray) -> Cells:
        """Return the cells at `places` (a mask or indices)."""
        places = np.flatnonzero(places) if places.dtype == bool else places
        return Cells(self.name, self.array.take(places))

    @property
    def is_typed(self) -> bool:
        """True if the file stores numbers or truth values here, not text."""
        from pyarrow import types

        held = self.array.type
        return bool(types.is_integer(held) or types.is_floating(held) or types.is_boolean(held))

    @property
    def is_temporal(self) -> bool:
        """True if the file stores dates, times or durations here, not text."""
        from pyarrow import types

        return bool(types.is_temporal(self.array.type))

    @property
    def is_nested(self) -> bool:
        """True if the file stores lists, objects or bytes here."""
        from pyarrow import types

        kind = self.array.type
        return bool(types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))

    @cached_property
    def distinct(self) -> tuple[list[str | None], np.ndarray]:
        """The texts of the different cells, the last None for those that hold nothing; and each cell's index (N,).

        Raises DataError, naming the first row, for cells that are lists, bytes or objects.
        """
        import pyarrow as pa

        array = self.array
        if self.is_nested:
            raise DataError(self._nested(0))
        if pa.types.is_timestamp(array.type):
            array = array.cast(pa.timestamp("us", array.type.tz and "UTC"), safe=False)
        if pa.types.is_null(array.type):
            array = array.cast(pa.string())
        encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
        chunk = encoded.unify_dictionaries().combine_chunks()
        if isinstance(chunk, pa.ChunkedArray):  # of no cells
            return [None], np.zeros(0, int)
        floats = pa.types.is_floating(chunk.dictionary.type)
        held = chunk.dictionary.to_numpy(zero_copy_only=False) if floats else chunk.dictionary.to_pylist()
        texts = [text_of(value) for value in held]
        codes = chunk.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
        return [*texts, None], codes

    def _nested(self, place: int) -> str:
        return (
            f"column {quoted(self.name)} holds lists or objects, first in data row {self.row(place)}; write plain"
            " values, a column for each"
        )

    def mapped(self, function: Callable[[str | None], Any], dtype: Any = None) -> np.ndarray:
        """Return what `function` makes of each cell's text (N,)."""
        texts, codes = self.distinct
        return np.array([function(text) for text in texts], dtype)[codes]

    def texts(self) -> list[str | None]:
        """Return the text of each cell."""
        texts, codes = self.distinct
        return [texts[code] for code in codes.tolist()]

    def gaps(self, written: TableFormat = PLAIN, listed: Sequence[str] = ()) -> np.ndarray:
        """Return a mask (N,) of the cells without a value (`is_gap`)."""
        return self.mapped(lambda text: is_gap(text, written, listed), bool)


@dataclass(frozen=True)
class TableRows:
    """Some consecutive rows of a table. `first` is the number from 0 of the file's row that its first is.

    `open_names`: the file has no header, so that its columns are the keys that its records happen to have. `places`:
    which of the consecutive rows were taken, None for all.
    """

    arrow: pa.Table
    first: int = 0
    open_names: bool = False
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return int(self.arrow.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self.arrow.column_names

    def __getitem__(self, name: str) -> Cells:
        return Cells(name, self.arrow.column(name), self.first, self.places)

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self.arrow.column_names)

    def beside(self, name: str, values: Any) -> TableRows:
        """Return the table with one more column."""
        return TableRows.of({**{one: self[one] for one in self.names}, name: values})

    def without(self, names: Iterable[str]) -> TableRows:
        """Return the table without some columns, which it need not have."""
        left = [name for name in self.names if name not in {*names}]
        return TableRows(self.arrow.select(left), self.first, self.open_names, self.places)

    def take(self, rows: np.ndarray) -> TableRows:
        """Return the rows of a mask (N,)."""
        kept = np.flatnonzero(rows)
        places = kept if self.places is None else self.places[kept]
        return TableRows(self.arrow.take(kept), self.first, self.open_names, places)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> TableRows:
        """Return a table of values in memory by name: the columns of a data frame, arrays, lists, or `Cells`."""
        import pyarrow as pa

        made = {
            unicodedata.normalize("NFC", str(name)): values.array
            if isinstance(values, Cells)
            else _array_of(name, values)
            for name, values in columns.items()
        }
        return cls(pa.table(made))


def _array_of(name: object, values: Any) -> pa.Array:
    """Return values in memory as an Arrow array: of their own type, or of the text of each.

    Raises DataError, naming the first row, for lists and objects, and for text that UTF-8 cannot write.
    """
    import pandas as pd
    import pyarrow as pa

    dtype = getattr(values, "dtype", np.dtype(object))
    if isinstance(dtype, pd.CategoricalDtype):
        codes, held = np.asarray(values.cat.codes), _array_of(name, values.cat.categories.to_numpy(dtype=object))
        return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), held)
    if not pd.api.types.is_object_dtype(dtype):
        with contextlib.suppress(pa.ArrowException, ValueError, TypeError):
            return pa.array(values, from_pandas=True)
    elif {*map(type, values)} <= {date, float, *map(type, (None, pd.NA, pd.NaT))} and (
        pd.api.types.infer_dtype(values) == "date"
    ):  # whose texts are the same, which those of times of a day would not be
        return pa.array(values, pa.date32(), from_pandas=True)
    texts: list[str | None] = []
    for value in values:
        try:
            texts.append(text_of(value))
        except DataError as error:
            raise DataError(
                f"column {quoted(name)} {error}, first in data row {len(texts) + 1}; write plain values, a column for"
                " each"
            ) from None
    try:
        return pa.array(texts, pa.string())
    except (UnicodeError, pa.ArrowException):
        raise DataError(f"column {quoted(name)} holds text that UTF-8 cannot write") from None


_SPACES = " \u00a0\u2009\u202f"
_APOSTROPHES = "'\u2019"
_TRUTHS = {"true": 1.0, "false": 0.0}


@functools.lru_cache(maxsize=64)
def _number_form(decimal: str, thousands: str | None, symbols: tuple[str, ...]) -> re.Pattern[str]:
    """Return the form of a number: groups are a sign, a sign after a symbol, and the digits.

    >>> form = _number_form(",", ".", ("€",))
    >>> [bool(form.fullmatch(text)) for text in ("1.234,50", "-€ 7", "12.34", "1,2,3")]
    [True, True, False, False]
    """
    mark, groups = re.escape(decimal), re.escape(thousands or "")
    for alike in (_SPACES, _APOSTROPHES):
        groups = f"[{alike}]" if thousands and thousands in alike else groups
    whole = rf"[1-9]\d{{0,2}}(?:{groups}\d{{3}})+|\d+" if groups else r"\d+"
    sign, blank = r"([+\-\u2212]?)", f"[{_SPACES}]*"
    symbol = f"(?:{'|'.join(map(re.escape, symbols))})?" if symbols else ""
    digits = rf"((?:{whole})(?:{mark}\d*)?(?:[eE][+-]?\d+)?|{mark}\d+(?:[eE][+-]?\d+)?|inf(?:inity)?)"
    return re.compile(
        f"{blank}{sign}{blank}{symbol}{blank}{sign}{digits}{blank}{symbol}{blank}", re.ASCII | re.IGNORECASE
    )


def _sign_first(text: str) -> str:
    """Return text with the sign of accounts before it: the minus behind a number, or brackets around it.

    >>> _sign_first("12-"), _sign_first("(12)"), _sign_first("12"), _sign_first("(-12)")
    ('-12', '-12', '12', '--12')
    """
    if text[:1] == "(" and text[-1:] == ")":
        return f"-{text[1:-1]}"
    return f"-{text[:-1]}" if len(text) > 1 and text[-1] in "-\u2212" else text


def below_limit(text: str) -> str | None:
    """Return the limit of a cell that says only that it is below one, None for other cells.

    >>> below_limit("<0.2"), below_limit("<= 5"), below_limit("5")
    ('0.2', '5', None)
    """
    read = re.fullmatch(r"\s*[<\u2264]=?\s*([^<\u2264\s].*)", text)
    return None if read is None else read[1]


_PARTS = (
    (1, 60, 3600, re.compile(r"(\d{1,4}):([0-5]\d)(?::([0-5]\d))?", re.ASCII)),
    (1, 60, 3600, re.compile(r"(\d{1,4}) ?h(?:(?: ?([0-5]?\d) ?m(?:in)?)(?: ?([0-5]?\d) ?s)?)?", re.ASCII)),
    (1, 12, 12, re.compile(r"(\d{1,2}) ?(?:'|\u2032|ft) ?(\d|1[01])? ?(?:\"|''|\u2033|in)?()", re.ASCII)),
)
"""What each part of a number is divided by, and its form: of hours, minutes and seconds, or of feet and inches."""


def _of_parts(text: str) -> float | None:
    """Return the hours or feet that a text is, None for something else.

    >>> _of_parts("22:15"), _of_parts("2h 30m"), _of_parts("5'6"), _of_parts("50m")
    (22.25, 2.5, 5.5, None)
    """
    for *divided, form in _PARTS:
        if (read := form.fullmatch(text)) is not None:
            return sum(int(part or 0) / by for part, by in zip(read.groups(), divided, strict=True))
    return None


def number_of(text: str | None, written: TableFormat) -> float | None:
    """Return the number that a text is, NaN for a gap, and None for something else; -0 is 0, and true is 1.

    Text is a number only if it is `written` so as a whole: groups have three digits, and there is one decimal mark.
    """
    if text is None or is_gap(text, written):
        return np.nan
    if written.below is not None and (limit := below_limit(text)) is not None:
        number = number_of(limit, written)
        return number if number is None or written.below == "limit" else number / 2
    read = _number_form(written.decimal, written.thousands, tuple(written.symbols)).fullmatch(_sign_first(text.strip()))
    if read is None:
        parts = _of_parts(text.strip()) if written.parts else None
        return _TRUTHS.get(text.strip().casefold()) if parts is None else parts
    signs = (read[1] + read[2]).replace("\u2212", "-")
    if len(signs) > 1:
        return None
    unwanted = dict.fromkeys((written.thousands or "") + _SPACES + _APOSTROPHES) | {written.decimal: "."}
    return float(signs + read[3].translate(str.maketrans(unwanted))) + 0.0


def numbers_in(cells: Cells, written: TableFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers in cells, float64 (N,), NaN where there is none; and a mask (N,) of cells with something else.

    Each is `number_of` its text. A column that is stored as numbers, or whose texts are all plain numbers, is converted
    as a whole to the same numbers, which is faster.
    """
    if (found := _at_once(cells, written)) is None:
        made = cells.mapped(lambda text: number_of(text, written), object)
        bad = made == None  # noqa: E711, each cell
        made[bad] = np.nan
        return made.astype(np.float64), bad
    return found, np.zeros(len(cells), bool)


def _at_once(cells: Cells, written: TableFormat) -> np.ndarray | None:
    """Return the numbers of a column if all cells are plain numbers, or stored as numbers; None otherwise."""
    import pyarrow as pa
    from pyarrow import compute, types

    plain = {mark: number for mark in written.marks if (number := number_of(mark, TableFormat())) is not None}
    array = cells.array
    if cells.is_typed:
        stored = (
            array.to_numpy()
            if types.is_floating(array.type)
            else compute.cast(array, pa.float64(), safe=False).to_numpy()
        )
        values = stored.astype(np.float64) + 0.0
        values[np.isin(stored, np.array([n for mark, n in plain.items() if text_of(n) == mark], stored.dtype))] = np.nan
        return values
    if not (types.is_string(array.type) or types.is_large_string(array.type)) or written.decimal != ".":
        return None
    blank = compute.is_in(array, value_set=pa.array([*MISSING, *written.marks], array.type))
    with contextlib.suppress(pa.ArrowInvalid):
        values = compute.cast(compute.if_else(blank, None, array), pa.float64())
        if compute.all(compute.is_finite(values)).as_py():
            return values.to_numpy().astype(np.float64) + 0.0
    return None
